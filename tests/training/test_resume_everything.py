"""Every option on at once, as far as they go together: a resumed run is the run without a stop.

One arm for each precision. In all of them: dropout, batch norm (pooled, frozen late, measured
anew for the average), groups of tensors, a schedule with an initial rate, the guard at a limit
so low that it skips and goes back, adaptive clipping, z-loss, gradient flow, effective steps,
early stop, the best weights kept, restarts. Averages and the noise scale wherever the precision
allows.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Cycle, NextToken, Small, lines_of, make_engine, rows, weights_hash

from lehr.objectives.base import Loss
from lehr.training import events
from lehr.training.averaging import AverageSettings
from lehr.training.batch_norm import BatchNormSettings
from lehr.training.clipping import AdaptiveClipSettings
from lehr.training.float8_recipe import Float8Settings
from lehr.training.guard import GuardSettings
from lehr.training.loss_scale import LossScaleSettings
from lehr.training.optimizers import GroupRule, OptimizerSettings
from lehr.training.restarts import RestartSettings
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

UPDATES, STOPS = 42, (6, 36)
GROUPS = (GroupRule("head.*", learning_rate_scale=2.0), GroupRule("norm.*", 0.0, 0.5))
FP8 = Float8Settings(scaling="delayed", window=3, measure_every=2, convert=("up", "head"))
COMMON: dict[str, Any] = {
    "learning_rate": 0.1,
    "batch_norm": BatchNormSettings(freeze_after=30, reestimate_updates=2),
    "guard": GuardSettings("rewind", limit=1.0, window=32, rewinds=3),
    "gradient_flow_every": 3,
    "evaluate_every": 6,
    "early_stop": 50,
    "promote": "best",
    "checkpoint_every": 6,
    "checkpoints_kept": 3,
    "nonfinite_limit": 5,
    "restart": RestartSettings(every=17, after_rewind=True, warmup=3, initial=0.2),
}
MEASURED = {"ema": AverageSettings(0.9, start_after=2), "noise_scale_every": 2}
ARMS: dict[str, dict[str, Any]] = {
    "fp32": {
        "optimizer": OptimizerSettings("muon", weight_decay=0.1, groups=GROUPS, watch_every=5),
        "schedule": Schedule("infinite", 4, 0.25, 0.0, "sqrt", 0.3, 9, 0.5),
        "adaptive_clip": AdaptiveClipSettings("tensor", limit=1.1, warmup=4),
        **MEASURED,
    },
    "bf16": {
        "optimizer": OptimizerSettings("sgd", momentum=0.9, nesterov=True, groups=GROUPS),
        "schedule": Schedule("wsd", 0.1, 0.3, 0.0, "sqrt", 0.2),
        "adaptive_clip": AdaptiveClipSettings("z_score", limit=1.0, warmup=4),
        **MEASURED,
    },
    "fp16": {
        "optimizer": OptimizerSettings("adam_l2", weight_decay=0.1, groups=GROUPS, watch_every=5),
        "schedule": Schedule("cosine", 4, initial=0.3),
        "adaptive_clip": AdaptiveClipSettings("tensor", limit=1.05, warmup=4),
        "loss_scale": LossScaleSettings(2.0**24, growth_interval=3),
        "ema": AverageSettings(0.9, warmup=False, buffers="average"),
    },
    "fp8": {
        "optimizer": OptimizerSettings(weight_decay=0.1, groups=GROUPS, watch_every=5),
        "schedule": Schedule("linear", 4, initial=0.3),
        "adaptive_clip": AdaptiveClipSettings("tensor", limit=1.1, warmup=4),
        "fp8": FP8,
        **MEASURED,
    },
    "pure_bf16": {
        "optimizer": OptimizerSettings(weight_decay=0.1, groups=GROUPS, watch_every=5),
        "schedule": Schedule("linear", 4, initial=0.3),
        "adaptive_clip": AdaptiveClipSettings("tensor", limit=1.1, warmup=4),
        "stochastic_rounding": True,
        "noise_scale_every": 2,
    },
}


class WithZLoss(NextToken):
    """Cross-entropy and c log² Z; the guard sees log Z."""

    def loss(self, model: Any, pack: Any) -> Loss:
        found = super().loss(model, pack)
        log_z = model(pack.ids)[pack.predict_from].float().logsumexp(-1)
        total = found.total + 1e-2 * log_z.square().sum()
        return Loss(total, {**found.metrics, "log_z": (log_z.detach().sum(), len(log_z))})


def engine_of(folder: Path, arm: str, observers: Any) -> Any:
    model = Small(dropout=0.1, batch_norm=True)
    if arm == "pure_bf16":
        model = model.bfloat16()

    def evaluate(update: int) -> dict[str, float]:
        objective, packs = NextToken(), rows(4)
        total = sum(float(objective.loss(model, pack).total.detach()) for pack in packs)
        return {"loss": total / sum(objective.weight(pack) for pack in packs)}

    values = COMMON | ARMS[arm] | {"precision": arm}
    return make_engine(
        folder, UPDATES, model=model, objective=WithZLoss(), batches=Cycle(rows(13), 4),
        evaluate=evaluate, observers=observers, **values,
    )  # fmt: skip


def bits(model: torch.nn.Module) -> str:
    return weights_hash(model.float())


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_with_every_option_resumes_to_the_same_bits(tmp_path, arm):
    straight = tmp_path / "straight"
    happened: list[str] = []

    def copy(event: events.Event) -> None:
        happened.append(type(event).__name__)
        if isinstance(event, events.CheckpointWritten) and event.update in STOPS:
            shutil.copytree(straight, tmp_path / f"at-{event.update}", dirs_exist_ok=True)

    engine = engine_of(straight, arm, [copy])
    engine.run()
    expected = lines_of(straight)
    assert any(row["skipped"] for row in expected)
    assert any(row.get("clipped", 0) > 0 for row in expected)
    assert ("ScaleLowered" if arm == "fp16" else "UpdateUnusual") in happened
    for at in STOPS:
        seen: list[events.Event] = []
        folder = tmp_path / f"at-{at}"
        resumed = engine_of(folder, arm, [seen.append])
        assert resumed.run().resumed_from == at
        assert lines_of(folder) == expected, at
        assert bits(resumed.model) == bits(engine.model), at
        assert not any(isinstance(event, events.ResumeInexact) for event in seen)


def test_no_option_of_the_engine_is_forgotten_here() -> None:
    """A new setting of the engine must join an arm, or be named as one that changes nothing."""
    elsewhere = {
        "updates", "clip", "micro_batch", "stage",  # of every small run
        "quarantine",  # of runs that go back: test_guard_runs
    }  # fmt: skip
    used = {"precision", *COMMON, *(key for arm in ARMS.values() for key in arm)}
    assert used | elsewhere == set(EngineSettings.__dataclass_fields__)
