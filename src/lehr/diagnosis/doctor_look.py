"""What a signature looks at, and the sign that it gives.

A sign has a strength: the measured statistic over its limit, so 1 is where it begins. The limits
stand in `LIMITS`; `python -m benchmarks.doctor fit` shows the strengths that they were set by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lehr.diagnosis.doctor_curve import Curve
from lehr.diagnosis.doctor_features import (
    Departure,
    Floats,
    Series,
    departures,
    levels,
    noise,
    series,
)

FEWEST_POINTS = 12  # below that only what one point can say is said

LIMITS: dict[str, float] = {
    "flat": 0.02,  # of the chance level: how far a flat curve may move
    "still": 0.004,  # of the level, where that is no chance level
    "still_eval": 0.002,  # the same for an evaluation, whose rows are the same each time
    "unigram": 0.026,  # of the unigram entropy: how far from it
    "shelf_low": 0.6,  # of ln V: where that entropy lies where it is not known
    "shelf_high": 0.85,
    "start_above": 0.12,  # of the chance level
    "spike": 9.0,  # standard deviations of the noise
    "spike_share": 0.12,  # of what the run has fallen by then
    "stays": 0.35,  # share of a spike's height that is there at the end
    "resume": 3.5,  # standard errors
    "sawtooth": 0.45,  # correlation one epoch apart
    "bumps": 0.7,  # share of regular gaps
    "too_low": 0.25,  # of the unigram entropy, or of the start
    "soon": 0.15,  # more of it where a model from scratch has had a tenth of these updates
    "soon_updates": 5000.0,
    "eval_below": 0.04,  # of the loss
    "eval_apart": 0.5,  # share of the training progress that the evaluation lacks
    "apart_fall": 5.0,  # of the noise: what must have been learnt before a share of it says much
    "eval_up": 0.04,  # of the evaluation's fall
    "gap_noise": 3.0,  # of the noise: how far a gap must open
    "gap_share": 0.15,  # of the fall
    "climb": 0.22,  # share of the fall that is lost again
    "creep": 0.04,
    "least_rise": 0.01,  # of the level: what a climb must be beside the share of a small fall
    "resume_eval": 0.01,  # of the evaluation: its rise over a resume
    "uncleared": 10.0,  # last gradient norm over the first
    "summed": 3.0,  # the same, where the norm has hardly any noise:
    "batch_noise": 0.008,  # of the norm; gradients of single batches differ by 0.013 and more
    "swings": 2.5,  # late spread over early spread
    "plateau": 0.17,  # share of the run
    "tail": 0.08,  # share of the run at a rate of 0
    "accumulation": 0.2,  # of the logarithm of the factor
}


@dataclass(frozen=True)
class Context:
    """What is known beside the curve; None or empty where it is not.

    chance           loss of guessing: ln V, or ln 2 for preferences
    unigram_entropy  of the targets, in nats
    accumulation     micro-batches of an update
    resumes          steps after which the run was resumed
    unended          share of the answers whose end is not trained
    """

    vocabulary: int | None = None
    chance: float | None = None
    unigram_entropy: float | None = None
    accumulation: int | None = None
    resumes: tuple[float, ...] = ()
    unended: float | None = None

    @property
    def guess(self) -> float | None:
        """The loss of guessing, where it is known."""
        if self.chance is not None:
            return self.chance
        return math.log(self.vocabulary) if self.vocabulary and self.vocabulary > 1 else None


@dataclass(frozen=True)
class Sign:
    """A signature that was seen: `strength` 1 is the limit; `first`, `last` are steps."""

    name: str
    strength: float
    column: str
    first: float
    last: float
    seen: str  # the numbers, in words


@dataclass(frozen=True)
class Look:
    """A curve with the features that several signatures share."""

    curve: Curve
    context: Context = field(default_factory=Context)

    @cached_property
    def loss(self) -> Series:
        return series(*self.curve.points("loss"))

    @cached_property
    def evaluation(self) -> tuple[Floats, Floats]:
        return self.curve.points("evaluation.loss")

    @cached_property
    def rate(self) -> tuple[Floats, Floats]:
        return self.curve.points("learning_rate")

    @cached_property
    def noise(self) -> float:
        return noise(self.loss.value)

    @cached_property
    def worst_noise(self) -> float:
        """Of the noisiest quarter of the run."""
        values = self.loss.value
        cut = max(8, len(values) // 4)
        return max(noise(values[i : i + cut]) for i in range(0, max(1, len(values) - 7), cut))

    @cached_property
    def start(self) -> float:
        return float(np.median(self.loss.value[:3]))

    @cached_property
    def lowest(self) -> float:
        return float(levels(self.loss.value, min(20, max(1, len(self.loss) // 4))).min())

    @property
    def fall(self) -> float:
        return max(self.start - self.lowest, 1e-9)

    @property
    def enough(self) -> bool:
        return len(self.loss) >= FEWEST_POINTS

    @cached_property
    def spikes(self) -> list[Departure]:
        if not self.enough:
            return []
        return departures(self.loss, self.least_spike)

    @cached_property
    def bumps(self) -> list[Departure]:
        return departures(self.loss, 0.5 * self.least_spike) if self.enough else []

    @property
    def least_spike(self) -> float:
        spread = max(self.worst_noise, self.loss.spread)
        return max(LIMITS["spike"] * spread, LIMITS["spike_share"] * self.fall, 1e-9)

    def sign(
        self, name: str, strength: float, seen: str, first: float | None = None,
        last: float | None = None, column: str = "loss",
    ) -> Sign:  # fmt: skip
        steps = self.curve.steps
        return Sign(
            name,
            float(strength),
            column,
            float(steps[0] if first is None else first),
            float(steps[-1] if last is None else last),
            seen,
        )


Signature = Callable[[Look], Sign | None]


# -- not finite ---------------------------------------------------------------


def sign_if(
    look: Look,
    name: str,
    strength: float,
    seen: str,
    first: float | None = None,
    last: float | None = None,
    column: str = "loss",
    last_index: int | None = None,
) -> Sign | None:
    if not strength >= 1.0:
        return None
    if last_index is not None:
        last = float(look.curve.steps[last_index])
    return look.sign(name, strength, seen, first, last, column)
