"""Curves as public reports describe them, from people who never used lehr, in their tools' formats.

The numbers are made by hand after the description; nothing is known beside the file but what
its owner would say (the size of the vocabulary).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lehr.diagnosis.doctor import diagnose
from lehr.diagnosis.doctor_look import Context
from lehr.diagnosis.doctor_readers import curve_of_text


def trainer_state(rows: list[dict[str, Any]]) -> str:
    return json.dumps({"log_history": rows})


def wandb(columns: dict[str, Any]) -> str:
    """An export of wandb: names carry the run, empty cells where a step has no value."""
    out = io.StringIO()
    count = len(next(iter(columns.values())))
    out.write(",".join(['"Step"', *(f'"lucky-sun-7 - {name}"' for name in columns)]) + "\n")
    for index in range(count):
        cells = ["" if (v := column[index]) is None else f'"{v}"' for column in columns.values()]
        out.write(",".join([f'"{index}"', *cells]) + "\n")
    return out.getvalue()


def falling(count: int, start: float, end: float, seed: int = 3, spread: float = 0.02) -> Any:
    noise = np.random.default_rng(seed).normal(0.0, spread, count)
    return end + (start - end) * np.exp(-np.arange(count) / (0.15 * count)) + noise


def litgpt_2151() -> str:
    """Pretraining from scratch whose loss stays at ln V: the optimizer never saw the weights."""
    values = 10.82 + np.random.default_rng(1).normal(0, 0.01, 80)
    lines = (
        f"Epoch 1 | iter {4 * i} step {i} | loss train: {v:.3f}, val: n/a | iter time: 410.11 ms"
        for i, v in enumerate(values, 1)
    )
    return "\n".join(lines)


def nanochat_68() -> str:
    """Falls, then climbs smoothly for the rest of the run."""
    values = falling(200, 10.8, 4.2)
    values[80:] += np.linspace(0, 3.0, 120)
    return "\n".join(f"step {i:05d}/200 | loss: {v:.6f} | dt: 95.1ms" for i, v in enumerate(values))


def lingua_61() -> str:
    """Each pass over the chunks shows the same saw."""
    values = falling(400, 9.0, 3.0) + 0.4 * ((np.arange(400) % 80) / 80)
    rows = [
        {"global_step": i, "loss/out": float(v), "optim/lr": 3e-4, "epoch": i / 80}
        for i, v in enumerate(values)
    ]
    return "\n".join(json.dumps({"train_loss": r["loss/out"], **r}) for r in rows)


def accelerate_4071() -> str:
    """Two pieces of one log: after the restart the loss begins higher."""
    first = [{"step": i, "loss": float(v)} for i, v in enumerate(falling(120, 8.0, 2.5), 1)]
    again = [{"step": 100 + i, "loss": float(v)} for i, v in enumerate(falling(120, 3.6, 2.4), 1)]
    return trainer_state(first + again)


def fastai_memorised() -> str:
    """Fine-tuning over three epochs: the evaluation rises while training goes down."""
    train = falling(300, 1.9, 0.3, spread=0.03)
    evaluated = [
        float(1.1 + 0.12 * i) if (step + 1) % 50 == 0 else None
        for step in range(300)
        for i in [step // 50]
    ]
    return wandb({"train/loss": train.tolist(), "eval/loss": evaluated})


def trl_6702() -> str:
    """A step that was not finite, shown as a loss of 0.0 beside a gradient norm of nan."""
    rows: list[dict[str, Any]] = [
        {"step": i, "loss": float(v), "grad_norm": 1.2}
        for i, v in enumerate(falling(60, 2.0, 1.2), 1)
    ]
    rows[30] |= {"loss": 0.0, "grad_norm": math.nan}
    return trainer_state(rows)


def trl_800() -> str:
    """DPO: the margin grows while the chosen answers lose 13 nats at the usual beta."""
    steps = np.arange(120.0)
    return wandb(
        {
            "train/loss": falling(120, 0.69, 0.3).tolist(),
            "train/rewards/chosen": (-0.012 * steps).tolist(),
            "train/rewards/rejected": (-0.02 * steps).tolist(),
            "train/rewards/margins": (0.008 * steps).tolist(),
        }
    )


def transformers_34242() -> str:
    """Accumulation of 8: the training loss is about eight times the evaluation's."""
    train = 8 * falling(160, 2.1, 1.4)
    evaluated = [float(train[i] / 8 + 0.02) if i % 20 == 19 else None for i in range(160)]
    return wandb({"train/loss": train.tolist(), "eval/loss": evaluated})


def marin_1368() -> str:
    """One spike of a few steps that heals."""
    values = falling(1000, 11.0, 3.1)
    values[620:626] += [1.0, 2.4, 2.0, 1.3, 0.8, 0.4]
    return "\n".join(f"{v:.4f}" for v in values)


def timm_224() -> str:
    """The averaged model is evaluated and hardly moves."""
    train = falling(200, 6.9, 2.0)
    evaluated = [6.9 - 0.002 * i if i % 20 == 19 else None for i in range(200)]
    return wandb({"train_loss": train.tolist(), "eval_loss": evaluated})


def torchtitan_1056() -> str:
    """FP8: not a number within the first steps."""
    lines = [f"step: {i}  loss: {v}" for i, v in enumerate(["12.2", "11.9", *["nan"] * 20], 1)]
    return "\n".join(lines)


def unsloth_never_ends() -> str:
    """The loss is fine, and every answer runs into the limit."""
    return wandb(
        {
            "train/reward": falling(80, 0.1, 0.8).tolist(),
            "train/completions/clipped_ratio": [0.98] * 80,
            "train/completions/mean_length": [512.0] * 80,
        }
    )


def neox_1008() -> str:
    """A schedule shorter than the run: the rate is at its floor of 0 for the last third."""
    rate = np.maximum(0.0, 1e-3 * (1 - np.arange(300) / 200))
    columns = {
        "train/lm_loss": falling(300, 10.8, 3.0).tolist(),
        "train/learning_rate": rate.tolist(),
    }
    return wandb(columns)


REPORTS: list[tuple[Callable[[], str], dict[str, Any], str]] = [
    (litgpt_2151, {"vocabulary": 50254}, "flat_at_chance"),
    (nanochat_68, {}, "falls_then_climbs"),
    (lingua_61, {}, "epoch_sawtooth"),
    (accelerate_4071, {}, "jump_at_resume"),
    (fastai_memorised, {}, "train_down_eval_up"),
    (trl_6702, {}, "nan_at_step"),
    (trl_800, {}, "chosen_collapses"),
    (transformers_34242, {}, "scales_with_accumulation"),
    (marin_1368, {}, "spike_that_heals"),
    (timm_224, {}, "eval_apart_from_start"),
    (torchtitan_1056, {}, "nan_at_step"),
    (unsloth_never_ends, {}, "never_stops"),
    (neox_1008, {}, "rate_ran_out"),
]


@pytest.mark.parametrize(("text", "known", "name"), REPORTS, ids=[r[0].__name__ for r in REPORTS])
def test_a_reported_curve_is_named(text: Callable[[], str], known: dict[str, Any], name: str):
    found = diagnose(curve_of_text(text()), Context(**known)).findings
    assert [one.name for one in found][:1] == [name], found
