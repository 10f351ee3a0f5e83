"""The range test: a curve with a known answer, what it says otherwise, what it leaves behind."""

import json
import math

import pytest
import torch
from families import model_of, tree_pack
from small_runs import Cycle, NextToken, Small, make_pack, merge_packs, rows, weights_hash
from torch import nn

from lehr.cli.pictures import range_picture
from lehr.diagnosis.learning_rate_finder import find_learning_rate, judged
from lehr.errors import RecipeError
from lehr.objectives.base import Loss
from lehr.objectives.language import Language
from lehr.training.optimizers import OptimizerSettings
from lehr.training.settings import EngineSettings


class Bowl(nn.Module):
    """c w^2 / 2 from w = 1: gradient descent with rate r multiplies w by 1 - r c."""

    def __init__(self, curvature):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.curvature = curvature


class Height:
    """The bowl's height, plus a number that only the batch knows."""

    def __init__(self, noise=0.0):
        self.noise = noise

    def weight(self, pack):
        return 1.0

    def loss(self, model, pack):
        height = (model.curvature * model.weight.square() / 2).sum()
        return Loss(height + self.noise * float(pack.ids.double().mean()), {})


def settings(kind="sgd", **changes):
    values = {"updates": 10, "learning_rate": 0.1, "optimizer": OptimizerSettings(kind)}
    return EngineSettings(**(values | {"clip": None} | changes))


def on_bowl(curvature, noise=0.0, **keys):
    batches = Cycle(rows(13), 1)
    keys = {"low": 1e-4, "high": 1e2, "steps": 61} | keys
    return find_learning_rate(
        Bowl(curvature), Height(noise), batches, settings(), ("test",), **keys
    )


def test_the_curve_is_that_of_gradient_descent():
    found = on_bowl(2.0)
    w, expected = 1.0, []
    for index in range(len(found.rates)):
        expected.append(w * w - 1.0)
        w *= 1 - 2.0 * found.rates[index]
    assert found.changes == pytest.approx(expected)
    assert found.rates[1] / found.rates[0] == pytest.approx(10**0.1)


@pytest.mark.parametrize("curvature", [0.1, 1.0, 10.0])
def test_the_recommendation_follows_the_curvature_and_is_stable(curvature):
    """Rates above 2 / c diverge. On a grid of ten points a decade ten times the curvature is
    the same curve moved by ten points."""
    found = on_bowl(curvature)
    assert 0.02 / curvature < found.recommended < 1 / curvature
    assert found.recommended * curvature == pytest.approx(on_bowl(1.0).recommended)
    assert found.recommended <= found.lowest / 3 * (1 + 1e-9)
    assert found.lowest < 2 / curvature
    if curvature == 10.0:
        assert len(found.rates) < 61 and "rose by more than half" in found.stopped


def test_noise_of_the_batches_does_not_move_it():
    """The loss of a batch differs by far more than training changes it; the change does not."""
    plain, noisy = on_bowl(1.0), on_bowl(1.0, noise=0.01)
    assert noisy.changes == pytest.approx(plain.changes, abs=1e-9)
    assert noisy.recommended == plain.recommended


def test_what_it_says_where_it_cannot_say():
    flat = judged(
        [10.0**i for i in range(-8, 0)], [0.0] * 8, 2.0, "the highest rate, 1, was reached"
    )
    assert flat.recommended is None and "fell by at most 0 from 2" in flat.why
    few = judged([1.0, 2.0], [0.0, 9.0], 1.0, "it rose")
    assert few.recommended is None and "begin lower" in str(few)
    falling = judged(
        [10.0 ** (i / 4) for i in range(12)], [-0.01 * i * i for i in range(12)], 2.0,
        "the highest rate, 560, was reached",
    )  # fmt: skip
    assert falling.recommended is not None and "a lower bound" in falling.why


def test_a_model_that_is_not_finite_stops_it():
    class Breaks(Height):
        def loss(self, model, pack):
            loss = super().loss(model, pack).total
            return Loss(loss if model.weight.item() > 0.999 else loss * math.nan, {})

    found = find_learning_rate(
        Bowl(1.0), Breaks(), Cycle(rows(13), 1), settings(), ("t",), low=1e-4, high=1.0, steps=40
    )
    assert "not finite" in found.stopped and len(found.changes) < 40
    assert found.recommended is None


@pytest.mark.parametrize("batch_norm", [False, True])
def test_everything_is_left_bitwise_as_it_was(batch_norm):
    model = Small(batch_norm=batch_norm)
    model.drop.eval()
    batches = Cycle(rows(13), 4)
    batches.next()
    before = weights_hash(model), batches.state(), torch.get_rng_state()
    found = find_learning_rate(
        model, NextToken(), batches, settings("adamw", micro_batch=2), ("t",), merge=merge_packs
    )
    assert found.recommended is not None
    after = weights_hash(model), batches.state(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    assert model.training and not model.drop.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_is_left_as_it_was_also_where_the_test_fails():
    class Raises(NextToken):
        def loss(self, model, pack):
            if self.calls > 90:
                raise KeyError
            return super().loss(model, pack)

    model, batches = Small(), Cycle(rows(13), 4)
    before = weights_hash(model), batches.state()
    with pytest.raises(KeyError):
        find_learning_rate(model, Raises(), batches, settings("adamw", micro_batch=4),
                           ("t",), merge=merge_packs)  # fmt: skip
    assert before == (weights_hash(model), batches.state())


def test_it_is_the_same_each_time():
    found = [
        find_learning_rate(Small(), NextToken(), Cycle(rows(13), 4),
                           settings("adamw", micro_batch=2), ("t",), merge=merge_packs)
        for _ in range(2)
    ]  # fmt: skip
    assert found[0] == found[1]


def test_the_recommended_rate_trains_better_than_its_tenth_and_its_thirtyfold(tmp_path):
    """On a small network: 40 updates from the same start."""
    from small_runs import make_engine

    from lehr.training.schedules import Schedule

    found = find_learning_rate(
        Small(0.0), NextToken(), Cycle(rows(13), 5), settings("adamw", micro_batch=5), ("t",),
        merge=merge_packs,
    )  # fmt: skip
    loss = {}
    for factor in (0.1, 1.0, 30.0):
        engine = make_engine(
            tmp_path / str(factor), 40, model=Small(0.0), learning_rate=factor * found.recommended,
            schedule=Schedule("constant", warmup=0), micro_batch=5,
        )  # fmt: skip
        engine.run()
        loss[factor] = engine.progress.loss
    assert loss[1.0] < loss[0.1] and loss[1.0] < loss[30.0]


def test_on_a_language_model_with_an_adapter():
    class One:
        epoch = 0.0

        def next(self):
            return [tree_pack(0), tree_pack(1)]

        def state(self):
            return 0

        def load(self, state):
            pass

    model = model_of("Llama")
    model.add_adapter(rank=4)
    before = model.state()
    found = find_learning_rate(model, Language(), One(), settings("adamw"), ("t",))
    assert found.recommended is not None and 1e-4 < found.recommended < 0.3, str(found)
    assert all(torch.equal(before[name], one) for name, one in model.state().items())


@pytest.mark.parametrize("keys", [{"low": 0.0}, {"low": 2.0, "high": 1.0}, {"steps": 3},
                                  {"high": math.inf}])  # fmt: skip
def test_bad_ranges_are_refused(keys):
    with pytest.raises(RecipeError, match="learning-rate range test"):
        on_bowl(1.0, **keys)


def test_a_loss_that_is_not_finite_at_the_start_is_refused():
    class Broken(Height):
        def loss(self, model, pack):
            return Loss(super().loss(model, pack).total * math.inf, {})

    with pytest.raises(RecipeError, match="a finite loss before any update"):
        find_learning_rate(Bowl(1.0), Broken(), Cycle([make_pack([1, 2])], 1), settings(), ("t",))


def test_its_picture_fits_a_terminal_and_its_json_is_strict():
    found = on_bowl(1.0)
    lines = range_picture(found.rates, found.changes, found.recommended).split("\n")
    assert max(map(len, lines)) <= 80 and sum("*" in line for line in lines) > 3
    assert lines[-2].strip() == "^"
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["recommended"]
