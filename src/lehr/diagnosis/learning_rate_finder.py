"""Learning-rate range test: raise the rate from update to update until the loss blows up.

After Smith 2015 (arXiv 1506.01186), with one difference. The loss of an update depends on
its batch more than on a few updates of training, so each batch is measured beforehand with
the weights as they are, and the curve is the paired change:

    y_t = L(weights after t updates, batch t) - L(weights at the start, batch t)

It begins at exactly 0, and a difficult batch is no rise. The recommendation is the rate of
steepest fall over the logarithm of the rate, at most a third of the rate where the curve is
lowest: from there on it is about to turn. A rate found in the first updates is an upper
guess for a long run; a schedule with warm-up and decay belongs to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lehr import ranks
from lehr.data.shapes import Pack
from lehr.diagnosis.left_alone import left_alone
from lehr.errors import Problem, RecipeError
from lehr.objectives.base import Objective
from lehr.streams import seed_for
from lehr.training import gradients
from lehr.training.batch import Merge, cut
from lehr.training.numerics import Numerics
from lehr.training.optimizers import make_optimizer, set_rate
from lehr.training.settings import EngineSettings
from lehr.training.state import trained_parameters
from lehr.training.store import Batches
from lehr.training.update import accumulate, arithmetic, denominator_of, seed_dropout

STEPS = 60
RANGES = {"sgd": (1e-4, 1e2)}  # by optimizer
USUAL_RANGE = (1e-6, 1.0)  # adaptive optimizers move a weight by about the rate
BLOW_UP = 0.5  # of the first loss: a rise by this much ends the test
WINDOW = 2  # points to each side of a slope: a straight line through five
TURN = 3.0  # the recommendation keeps this factor below the lowest point
FALL = 0.01  # of the first loss: a fall of less is nothing to recommend a rate by


@dataclass(frozen=True)
class RangeTest:
    """The curve of a range test, and what it says.

    rates, changes  y at each rate, in the loss's own unit
    first_loss      before any update, of the first batch
    recommended     None where the curve does not say; `why` tells
    steepest, lowest  rates of steepest fall and of the lowest point
    stopped         why the test ended
    """

    rates: tuple[float, ...]
    changes: tuple[float, ...]
    first_loss: float
    recommended: float | None
    steepest: float | None
    lowest: float | None
    stopped: str
    why: str

    def __str__(self) -> str:
        if self.recommended is None:
            return f"no learning rate to recommend: {self.why}"
        return f"learning rate {self.recommended:.2g}: {self.why}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_learning_rate(
    model: nn.Module,
    objective: Objective,
    batches: Batches,
    settings: EngineSettings,
    seed_names: Sequence[object],
    *,
    merge: Merge | None = None,
    low: float | None = None,
    high: float | None = None,
    steps: int = STEPS,
    progress: Callable[[int, float, float], None] = lambda step, rate, change: None,
) -> RangeTest:
    """Run the test with the settings' optimizer, clipping and precision.

    Model, running statistics, data position and random state are left bitwise as they were.
    progress  called with (step, rate, change)
    Raises RecipeError for a range or number of steps that cannot be tested.
    """
    usual = RANGES.get(settings.optimizer.kind, USUAL_RANGE)
    low, high = low if low is not None else usual[0], high if high is not None else usual[1]
    _check(low, high, steps)
    rates = [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]
    trained = trained_parameters(model, settings.precision)
    names = (*seed_names, "range test")
    # The run's own arithmetic: FP8 layers, a loss scale, bf16 weights.
    numerics = Numerics(model, trained, settings, names)
    optimizer = make_optimizer(numerics.moved, settings.optimizer)

    changes: list[float] = []
    stopped = f"the highest rate, {high:g}, was reached"
    with left_alone(model, settings.precision), _put_back(batches), _converted(numerics):
        taken = []
        for index in range(steps):
            packs = cut(batches.next(), settings.micro_batch, merge)
            weights = [float(objective.weight(pack)) for pack in packs]
            denominator = denominator_of(weights, packs, index + 1)
            total = 0.0
            for micro, (pack, weight) in enumerate(zip(packs, weights, strict=True)):
                if weight:
                    total += _forward(model, objective, pack, settings, (*names, index), micro)
            taken.append((packs, weights, denominator, ranks.all_sum(total) / denominator))
        numerics.abandon()  # what was only looked at is no part of an update
        first = taken[0][3]
        if not math.isfinite(first):
            expected = "a finite loss before any update"
            raise RecipeError(Problem("learning-rate range test", expected, first))
        for index, (packs, weights, denominator, before) in enumerate(taken):
            names_now, precision = (*names, index), settings.precision
            numerics.begin_attempt()
            done = accumulate(
                model, objective, packs, weights, denominator, names_now, precision,
                scaled=numerics.scaled,
            )  # fmt: skip
            change = done.loss - before
            gradients.sum_over_ranks(trained)
            numerics.unscale()
            measured = gradients.measure(trained)
            if numerics.overflowed(done.loss, measured.nonfinite):
                numerics.settle(skipped=True, overflow=measured.nonfinite)
                if numerics.gave_up is None:  # a smaller loss scale, and no update at this rate
                    changes.append(change)
                    gradients.clear(trained)
                    continue
            if not math.isfinite(change) or not math.isfinite(measured.norm):
                stopped = f"the loss or its gradient is not finite at rate {rates[index]:.2g}"
                break
            changes.append(change)
            progress(index, rates[index], change)
            if change > BLOW_UP * abs(first):
                stopped = f"the loss rose by more than half at rate {rates[index]:.2g}"
                break
            gradients.clip_to(trained, measured.norm, settings.clip)
            set_rate(optimizer, rates[index])
            numerics.settle(skipped=False)
            numerics.step(optimizer, index + 1)
            numerics.release()
            numerics.applied(index + 1)
            gradients.clear(trained)
            if numerics.gave_up is not None:
                stopped = f"no layer is healthy in FP8 at rate {rates[index]:.2g}"
                break
    return judged(rates[: len(changes)], changes, first, stopped)


def _forward(
    model: nn.Module,
    objective: Objective,
    pack: Pack,
    settings: EngineSettings,
    names: Sequence[object],
    micro: int,
) -> float:
    """The loss of a micro-batch with the dropout that `accumulate` will draw for it."""
    seed = seed_for(*names, "micro", micro, "rank", ranks.rank())
    seed_dropout(seed, next(model.parameters()).device)
    with torch.no_grad(), arithmetic(model, settings.precision):
        return float(objective.loss(model, pack).total)


def judged(
    rates: Sequence[float], changes: Sequence[float], first_loss: float, stopped: str
) -> RangeTest:
    """What a curve says: `changes` [n] at `rates` [n], evenly spaced in the logarithm.

    `changes[t]` is measured before the update with `rates[t]`: it is owed to the rate before.
    """

    def found(why: str, *three: float) -> RangeTest:
        recommended, steepest, lowest = three or (None, None, None)
        return RangeTest(
            tuple(rates), tuple(changes), first_loss, recommended, steepest, lowest, stopped, why
        )

    if len(changes) < 2 * WINDOW + 2:
        return found(f"too few points below the end ({stopped}); begin lower")
    smooth = [_mean(changes[max(0, i - 1) : i + 2]) for i in range(len(changes))]
    bottom = min(range(len(smooth)), key=smooth.__getitem__)
    if -smooth[bottom] < FALL * abs(first_loss):
        fall = max(0.0, -smooth[bottom])
        return found(
            f"the loss fell by at most {fall:.2g} from {first_loss:.3g}; {stopped}. The model "
            "may have learnt this already, or a range elsewhere or a gradient check is due"
        )
    slopes = {
        i: _slope(smooth[i - WINDOW : i + WINDOW + 1])
        for i in range(WINDOW, min(bottom + 1, len(smooth) - WINDOW))
    }
    steep = min(slopes, key=slopes.__getitem__) if slopes else bottom
    steepest, lowest = rates[max(0, steep - 1)], rates[max(0, bottom - 1)]
    recommended = min(steepest, lowest / TURN)
    if bottom >= len(smooth) - 2 and "highest rate" in stopped:
        why = "the loss still fell at the highest rate tested: a lower bound, test higher rates"
    elif recommended == steepest:
        why = f"where the loss falls most steeply; it is lowest at {lowest:.2g}, and {stopped}"
    else:
        why = (
            f"a third of {lowest:.2g}, where the loss is lowest and about to turn (it falls most "
            f"steeply at {steepest:.2g}); {stopped}"
        )
    return found(why, recommended, steepest, lowest)


def _slope(values: Sequence[float]) -> float:
    """Of a straight line through evenly spaced values, by least squares."""
    middle = (len(values) - 1) / 2
    above = sum((i - middle) * value for i, value in enumerate(values))
    return above / sum((i - middle) ** 2 for i in range(len(values)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _check(low: float, high: float, steps: int) -> None:
    problems = []
    if not (math.isfinite(low) and math.isfinite(high) and 0 < low < high):
        expected = "a lowest rate above 0 and a higher one"
        problems.append(Problem("learning-rate range test", expected, [low, high]))
    if steps < 4 * WINDOW:
        expected = f"at least {4 * WINDOW} steps"
        problems.append(Problem("learning-rate range test", expected, steps))
    if problems:
        raise RecipeError(problems)


@contextmanager
def _converted(numerics: Numerics) -> Iterator[None]:
    """The model's layers in the precision of the run inside, its own outside."""
    numerics.convert()
    try:
        yield
    finally:
        numerics.restore()


@contextmanager
def _put_back(batches: Batches) -> Iterator[None]:
    """The data where it was, afterwards."""
    position = batches.state()
    try:
        yield
    finally:
        batches.load(position)
