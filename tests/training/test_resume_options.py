"""Resume stays exact with every option on: stopped after k of n is the run without a stop."""

import shutil

import pytest
from small_runs import lines_of, make_engine, weights_hash

from lehr.training import events
from lehr.training.averaging import AverageSettings
from lehr.training.optimizers import GroupRule, OptimizerSettings
from lehr.training.schedules import Schedule

UPDATES = 8
GROUPS = (GroupRule("head.*", 0.2, 2.0), GroupRule("norm.*", learning_rate_scale=0.5))
EMA = AverageSettings(0.9, start_after=1)
OPTIONS = {
    "adam": (
        OptimizerSettings("adam", groups=GROUPS[1:]),
        Schedule("wsd", 2, 3, 0.0, "sqrt"),
        None,
    ),
    "adam_l2": (
        OptimizerSettings("adam_l2", weight_decay=0.1, groups=GROUPS, watch_every=2),
        Schedule("infinite", 2, 0.25, 0.0, "sqrt", 0.3, 2, 0.5),
        EMA,
    ),
    "sgd": (OptimizerSettings("sgd", weight_decay=0.1), Schedule("linear", 2, final=0), EMA),
    "momentum": (
        OptimizerSettings("sgd", momentum=0.9, nesterov=True, groups=GROUPS),
        Schedule("linear", 0.25, initial=0.5),
        AverageSettings(0.9, warmup=False),
    ),
    "muon": (
        OptimizerSettings("muon", weight_decay=0.1, groups=GROUPS, watch_every=3),
        Schedule("wsd", 2, 3, 0.0, "sqrt"),
        EMA,
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_stopped_after_any_update(tmp_path, option):
    optimizer, schedule, ema = OPTIONS[option]
    values = {
        "optimizer": optimizer,
        "schedule": schedule,
        "ema": ema,
        "promote": "best",
        "evaluate_every": 2,
    }
    straight = tmp_path / "straight"

    def copy(event):
        if isinstance(event, events.CheckpointWritten):
            shutil.copytree(straight, tmp_path / f"at-{event.update}")

    engine = make_engine(straight, UPDATES, observers=[copy], **values)
    engine.run()
    for at in range(1, UPDATES):
        seen = []
        folder = tmp_path / f"at-{at}"
        resumed = make_engine(folder, UPDATES, observers=[seen.append], **values)
        assert resumed.run().resumed_from == at
        assert weights_hash(resumed.model) == weights_hash(engine.model), at
        assert lines_of(folder) == lines_of(straight)
        assert not any(isinstance(event, events.ResumeInexact) for event in seen)
