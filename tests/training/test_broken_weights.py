"""A step that is far too large: it stays a finding, nothing of it is kept, nothing crashes."""

import math

import pytest
import torch
from small_runs import Cycle, lines_of, make_engine, rows
from torch import nn

from lehr.errors import Diverged
from lehr.objectives.base import Loss
from lehr.report.curves import chart
from lehr.training import events
from lehr.training.checkpoint import newest
from lehr.training.engine import Engine
from lehr.training.guard import STEP, Guard, GuardSettings
from lehr.training.optimizers import OptimizerSettings
from lehr.training.robust import Kind, Window
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings
from lehr.training.step_norm import StepNorm

SGD = OptimizerSettings("sgd")


def test_the_norm_of_a_large_change_is_finite():
    """Four changes of 1e30: the norm is 2e30, though a square of it does not exist in fp32."""
    parameter = nn.Parameter(torch.zeros(4))
    norm = StepNorm({"w": parameter})
    norm.begin()
    with torch.no_grad():
        parameter.fill_(1e30)
    assert norm.end() == pytest.approx(2e30)


def test_a_step_that_is_not_finite_is_unusual_among_few_and_leaves_json():
    guard = Guard(GuardSettings())
    for step in (math.inf, math.nan):
        alarm = guard.moved(1, step)
        assert alarm.signal == STEP and str(alarm) == "update norm is not finite"
    guard.accept(1, {})
    assert guard.to_blame(0) == [1]
    assert all(map(math.isfinite, dict(guard.state()["suspects"]).values()))
    window = Window(Kind(logarithm=True, absolute=0.1), 8)
    window.accept(math.inf)
    assert window.values == []


def test_a_huge_step_is_written_and_trained_past(tmp_path):
    """1e20 is a finite step: its update is done, its norm in the metrics, its state saved."""
    engine = make_engine(
        tmp_path, updates=1, learning_rate=1e20, optimizer=SGD, clip=1.0, guard=GuardSettings()
    )
    engine.run()
    assert 1e18 < lines_of(tmp_path)[0]["update_norm"] < 1e21


class Falls(nn.Module):
    """A loss that is linear: its gradient is the same wherever the weight is."""

    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.full((2,), 3e38))


class Slope:
    def weight(self, pack):
        return 1.0

    def loss(self, model, pack):  # finite, also where the weights are not
        pull = model.at - model.at.detach()
        return Loss(pull.nan_to_num(0.0, 0.0, 0.0).sum() * -1.0)


@pytest.mark.parametrize("guard", [None, GuardSettings("skip"), GuardSettings("rewind")])
def test_infinite_weights_are_never_a_checkpoint(tmp_path, guard):
    """3e38 and 3e38 again: the checkpoint that stands is one from before."""
    told = []
    settings = EngineSettings(
        updates=3, learning_rate=3e38, schedule=Schedule("constant", warmup=0), optimizer=SGD,
        clip=None, guard=guard, checkpoint_every=1,
    )  # fmt: skip
    engine = Engine(Falls(), Slope(), Cycle(rows(3), 1), settings, tmp_path, (0,), [told.append])
    with pytest.raises(Diverged, match=r"(?s)finite weights; at is not.*lower learning_rate"):
        engine.run()
    found = newest(tmp_path / "checkpoints", engine._store._key).checkpoint
    if found is not None:
        weights = found.tensors("weights")["parameter.at"]
        assert bool(weights.isfinite().all())
    written = [one for one in told if isinstance(one, events.CheckpointWritten)]
    assert all(one.update == 0 for one in written)


@pytest.mark.parametrize("values", [[1e30, 1e30], [-1e300], [5.0, 5.0]])
def test_equal_values_of_any_size_are_drawn(values):
    drawn = chart("step", {"a": list(enumerate(values))})
    assert all(0 < y < drawn.height for _, y in drawn.lines[0].points)
