"""What the decisive tests of the doctor share: the desk they work on, and what they answer.

A test asks about one fault. `confirms`: it is there; `withdraws`: it is not; `cannot tell`: this
stage or model gives the test nothing to decide with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lehr.data.shapes import Pack
from lehr.diagnosis.left_alone import left_alone
from lehr.objectives.base import Objective
from lehr.training import gradients
from lehr.training.batch import Merge, cut
from lehr.training.optimizers import make_optimizer, set_rate
from lehr.training.settings import EngineSettings
from lehr.training.state import trained_parameters
from lehr.training.update import Accumulated, accumulate, denominator_of

CONFIRMS, WITHDRAWS, CANNOT_TELL = "confirms", "withdraws", "cannot tell"


@dataclass(frozen=True)
class Answer:
    """What one test says of one fault.

    name      of the test; fault: what it confirms or withdraws, in words
    what      it does; expected: in a healthy training; seen: the numbers
    """

    name: str
    fault: str
    what: str
    expected: str
    seen: str
    verdict: str
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Desk:
    """A stage made ready as for training.

    updates    packs of the first updates; examples: the first updates' packs, one example each
    heldout    packs that are not trained on; chance: loss of guessing, in nats
    untrained  the weights are random; new_objective: the loss must be ln 2 before any update
    """

    model: Any
    objective: Objective
    settings: EngineSettings
    seed_names: tuple[object, ...]
    merge: Merge
    updates: Sequence[Sequence[Pack]]
    examples: Sequence[Pack]
    heldout: Sequence[Pack]
    chance: float
    untrained: bool
    pairs: bool = False

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self.model, self.settings.precision)


Test = Callable[[Desk], Answer]


def timed(test: Test, desk: Desk) -> Answer:
    """The test's answer with its seconds; the desk is bit for bit as before."""
    began = time.perf_counter()
    with left_alone(desk.model, desk.settings.precision):
        answer = test(desk)
    return Answer(**(asdict(answer) | {"seconds": time.perf_counter() - began}))


def backward(
    desk: Desk, packs: Sequence[Pack], names: tuple[object, ...], micro_batch: int = 0
) -> Accumulated:
    """Gradients of an update into the parameters, as the engine computes them."""
    parts = cut(list(packs), micro_batch or desk.settings.micro_batch, desk.merge)
    weights = [float(desk.objective.weight(part)) for part in parts]
    total = denominator_of(weights, parts, 1)
    seeds = (*desk.seed_names, *names)
    return accumulate(
        desk.model, desk.objective, parts, weights, total, seeds, desk.settings.precision
    )


def step(
    desk: Desk, optimizer: Optimizer, packs: Sequence[Pack], rate: float, number: int
) -> float:
    """One update at `rate`; returns the loss before it."""
    done = backward(desk, packs, ("test", number))
    norm = gradients.measure(desk.trained).norm
    gradients.clip_to(desk.trained, norm, desk.settings.clip)
    set_rate(optimizer, rate)
    optimizer.step()
    gradients.clear(desk.trained)
    return done.loss


def optimizer_of(desk: Desk) -> Optimizer:
    return make_optimizer(desk.trained, desk.settings.optimizer)


def peak_rate(desk: Desk) -> float:
    """The highest rate that the stage will use."""
    settings = desk.settings
    return max(settings.rate(index) for index in range(settings.updates))


def log_probabilities(desk: Desk, pack: Pack) -> Tensor:
    """Of the targets [R], in evaluation mode and without a graph."""
    training = desk.model.training
    desk.model.eval()
    with torch.no_grad():
        hidden = desk.model.hidden(pack)
        stats = desk.model.token_stats(hidden, pack.predict_from, pack.targets)
    desk.model.train(training)
    found: Tensor = stats.log_probability.double().cpu()
    return found


def mean_loss(desk: Desk, packs: Sequence[Pack]) -> float:
    """The objective's loss of packs, in the mode that the model is in, without a graph."""
    total = weight = 0.0
    torch.manual_seed(0)
    with torch.no_grad():
        for pack in packs:
            total += float(desk.objective.loss(desk.model, pack).total)
            weight += float(desk.objective.weight(pack))
    return total / weight if weight else float("nan")
