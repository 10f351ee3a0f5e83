"""More curves as public reports describe them, in other styles: prints, gaps, other column names.

The numbers are made by hand after the description. Where the report's answer was "this is usual",
that is the right answer here too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lehr.diagnosis.doctor import diagnose
from lehr.diagnosis.doctor_look import Context
from lehr.diagnosis.doctor_readers import curve_of_text


def falling(count: int, start: float, end: float, spread: float = 0.02, seed: int = 5) -> Any:
    noise = np.random.default_rng(seed).normal(0.0, spread, count)
    return end + (start - end) * np.exp(-np.arange(count) / (0.15 * count)) + noise


def minicpm_v_212() -> str:
    """Dictionaries as a trainer prints them: the gradient is not a number from the first row."""
    rows = [{"loss": 1.0778, "grad_norm": math.nan, "learning_rate": 0.0, "epoch": 0.0}]
    rows += [
        {"loss": 0.0, "grad_norm": math.nan, "learning_rate": 1e-7 * i, "epoch": 0.0}
        for i in range(1, 40)
    ]
    return "\n".join(str(row) for row in rows)


def llamafactory_506() -> str:
    """trainer_log.jsonl, every tenth step: from one row on the loss is exactly 0."""
    values = [float(v) for v in falling(440, 3.4, 2.6)] + [0.0] * 60
    return "\n".join(
        json.dumps(
            {
                "current_steps": 10 * i,
                "total_steps": 9750,
                "loss": round(v, 4),
                "eval_loss": None,
                "learning_rate": 2.9e-5,
                "percentage": round(10 * i / 97.5, 2),
                "elapsed_time": f"0:{i // 60:02d}:{i % 60:02d}",
            }
        )
        for i, v in enumerate(values, 1)
    )


def alpaca_lora_391() -> str:
    """The same within fifteen steps, as a pasted list."""
    return ", ".join(["2.1", "2.05", *(f"{1.9 - 0.05 * i:.2f}" for i in range(13)), *["0.0"] * 12])


def stanford_alpaca_236() -> str:
    """Stairs: a drop where each of three epochs begins, level within; no evaluation."""
    noise = np.random.default_rng(2).normal(0.0, 0.03, 300)
    stairs = np.repeat([1.1, 0.75, 0.4], 100) + 0.15 * np.exp(-np.arange(300) / 8.0)
    lines = ["step,train/epoch,train/loss"]
    lines += [f"{i + 1},{(i + 1) / 100:.2f},{v:.4f}" for i, v in enumerate(stairs + noise)]
    return "\n".join(lines)


def the_lm_book_6() -> str:
    """GRPO: the reward is level, KL and with it the loss grow from step 400 on."""
    steps = np.arange(600)
    kl = 0.02 + 0.001 * steps / 100 + np.where(steps > 400, 0.02 * 1.035 ** (steps - 400), 0.0)
    reward = np.minimum(2.0, steps / 50) + np.random.default_rng(1).normal(0, 0.05, 600)
    rows = [
        {"step": int(s), "loss": float(0.04 * k), "kl": float(k), "reward": float(r)}
        for s, k, r in zip(steps, kl, reward, strict=True)
    ]
    return json.dumps({"log_history": rows})


def litgpt_125() -> str:
    """Lines of a script: the same loss at every iteration, near ln 65024."""
    return "\n".join(
        f"iter {i}: loss 11.0666, time: {13381 + i}.00ms, speed: 306 toks/s/device"
        for i in range(1, 400, 3)
    )


def bert_746() -> str:
    """From scratch with 30522 tokens: falls to about 7.3 and stays there."""
    values = 7.3 + 3.1 * np.exp(-np.arange(400) / 30.0) + falling(400, 0.0, 0.0, spread=0.04)
    lines = ["Wall time,Step,Value"]
    lines += [f"{1.6e9 + 30 * i},{100 * i},{v}" for i, v in enumerate(values)]
    return "\n".join(lines)


def ainode_186() -> str:
    """A handful of rows: a gradient norm of millions, then not a number."""
    rows: list[dict[str, Any]] = [{"step": 10, "loss": 12.61, "grad_norm": 3.3e6, "epoch": 0.5}]
    rows += [{"step": s, "loss": math.nan, "grad_norm": math.nan, "epoch": 1.0} for s in (20, 30)]
    return json.dumps({"log_history": rows, "global_step": 30})


def search_r1_88() -> str:
    """A run of reinforcement learning that blows up in the middle: KL from 0.05 to 9."""
    kl = [0.05 + 0.0005 * i for i in range(160)] + [9.0 + 0.1 * i for i in range(40)]
    reward = [0.3 + 0.001 * i for i in range(160)] + [0.02] * 40
    lines = ["step;actor/kl_loss;critic/score/mean;kl;reward"]
    lines += [
        f"{i};{k:.4f};{r:.4f};{k:.4f};{r:.4f}"
        for i, (k, r) in enumerate(zip(kl, reward, strict=True))
    ]
    return "\n".join(lines)


REPORTS: list[tuple[Callable[[], str], dict[str, Any], str]] = [
    (minicpm_v_212, {}, "nan_at_first_step"),
    (llamafactory_506, {}, "nan_at_step"),
    (alpaca_lora_391, {}, "nan_at_step"),
    (stanford_alpaca_236, {}, "epoch_sawtooth"),
    (the_lm_book_6, {}, "kl_runaway"),
    (litgpt_125, {"vocabulary": 65024}, "flat_at_chance"),
    (bert_746, {"vocabulary": 30522}, "flat_at_unigram"),
    (ainode_186, {"vocabulary": 151936}, "nan_at_step"),
    (search_r1_88, {}, "kl_runaway"),
]


@pytest.mark.parametrize(("text", "known", "name"), REPORTS, ids=[r[0].__name__ for r in REPORTS])
def test_a_reported_curve_is_named(text: Callable[[], str], known: dict[str, Any], name: str):
    found = diagnose(curve_of_text(text()), Context(**known)).findings
    assert [one.name for one in found][:1] == [name], found


def test_steps_are_those_of_the_file():
    assert curve_of_text(llamafactory_506()).steps[-1] == 5000


def test_a_loss_that_reaches_zero_by_learning_is_finite():
    values = [max(0.0, 2.0 - 0.02 * i) for i in range(140)]
    found = diagnose(curve_of_text("\n".join(f"{v:.4f}" for v in values))).findings
    assert "nan_at_step" not in [one.name for one in found]
