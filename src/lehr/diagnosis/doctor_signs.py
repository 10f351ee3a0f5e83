"""Signatures of a loss curve: each a pure function from features to a sign, or none.

A sign has a strength: the measured statistic over its limit, so 1 is where it begins. The limits
stand in `LIMITS`; `python -m benchmarks.doctor fit` shows the strengths that they were set by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lehr.diagnosis.doctor_curve import Curve
from lehr.diagnosis.doctor_features import (
    Departure,
    Floats,
    Series,
    at,
    correlation_at,
    departures,
    level,
    levels,
    noise,
    regular,
    series,
    step_at,
)

FEWEST_POINTS = 12  # below that only what one point can say is said

LIMITS: dict[str, float] = {
    "flat": 0.02,  # of the chance level: how far a flat curve may move
    "still": 0.004,  # of the level, where that is no chance level
    "unigram": 0.026,  # of the unigram entropy: how far from it
    "start_above": 0.12,  # of the chance level
    "spike": 6.5,  # standard deviations of the noise
    "spike_share": 0.12,  # of what the run has fallen by then
    "stays": 0.35,  # share of a spike's height that is there at the end
    "resume": 3.5,  # standard errors
    "sawtooth": 0.45,  # correlation one epoch apart
    "bumps": 0.7,  # share of regular gaps
    "too_low": 0.25,  # of the unigram entropy, or of the start
    "eval_below": 0.04,  # of the loss
    "eval_apart": 0.5,  # share of the training progress that the evaluation lacks
    "apart_fall": 5.0,  # of the noise: what must have been learnt before a share of it says much
    "eval_up": 0.04,  # of the evaluation's fall
    "gap_noise": 3.0,  # of the noise: how far a gap must open
    "gap_share": 0.15,  # of the fall
    "climb": 0.22,  # share of the fall that is lost again
    "creep": 0.04,
    "uncleared": 10.0,  # last gradient norm over the first
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
        return departures(self.loss, 0.7 * self.least_spike) if self.enough else []

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


def not_finite(look: Look) -> Sign | None:
    """NaN or infinity in the loss or its gradient: at the first step, or later."""
    flags = look.curve.nonfinite
    name = next((one for one in ("loss", "grad_norm") if one in flags), None)
    if name is None:
        return None
    places = np.flatnonzero(flags[name])
    first = int(places[0])
    finite_before = np.isfinite(look.curve.columns["loss"][:first]).sum()
    steps = look.curve.steps
    share = len(places) / max(1, len(flags[name]) - first)
    how = "from there on" if share > 0.9 and len(places) > 1 else f"in {len(places)} rows"
    title = "nan_at_first_step" if not finite_before else "nan_at_step"
    seen = f"{name} is not finite at step {steps[first]:g}, {how}"
    return look.sign(title, 50.0, seen, steps[first], steps[places[-1]], name)


# -- levels -------------------------------------------------------------------


def start_above_chance(look: Look) -> Sign | None:
    """The first loss is well above that of guessing."""
    guess, multiple = look.context.guess, look.context.accumulation
    if guess is None or not len(look.loss) or scales(look) is not None:
        return None
    first = float(look.loss.value[0])
    excess = first / guess - 1.0
    if multiple and multiple > 1 and abs(first / guess / multiple - 1.0) < 0.1:
        return None
    seen = f"the first loss is {first:.3g}, guessing would give {guess:.3g}"
    return _if(look, "start_above_chance", excess / LIMITS["start_above"], seen, last_index=0)


def scales(look: Look) -> Sign | None:
    """The loss is a multiple of what it should be, all along: a sum where a mean belongs."""
    factor, against = None, ""
    guess, multiple = look.context.guess, look.context.accumulation
    steps, values = look.evaluation
    if guess and multiple and multiple > 1 and len(look.loss):
        factor = look.start / guess
        against = f"{factor:.2f} times the loss of guessing"
        off = abs(math.log(max(factor, 1e-9) / multiple))
        if len(values):
            ratio = float(np.median(at(look.loss.steps, look.loss.value, steps) / values))
            off = min(off, abs(math.log(max(ratio, 1e-9) / multiple)))
    elif len(values) >= 3 and look.enough:
        ratios = at(look.loss.steps, look.loss.value, steps) / np.maximum(values, 1e-9)
        factor, multiple = float(np.median(ratios)), round(float(np.median(ratios)))
        if multiple < 2 or float(np.ptp(ratios)) > 0.3 * factor:
            return None
        off = abs(math.log(factor / multiple)) * 3.0
        against = f"{factor:.2f} times the evaluation's loss, at every evaluation"
    if factor is None or multiple is None:
        return None
    seen = f"the training loss is {against}"
    return _if(look, "scales_with_accumulation", LIMITS["accumulation"] / max(off, 1e-3), seen)


def flat(look: Look) -> Sign | None:
    """The loss does not move: at chance, or where it began."""
    if not look.enough:
        return None
    values, guess = look.loss.value, look.context.guess
    begin = level(values, 0.0, 0.15)
    moved = max(abs(level(values, a, a + 0.25) - begin) for a in (0.25, 0.5, 0.75))
    moved = max(0.0, moved - 1.5 * look.noise / math.sqrt(len(values) / 8))
    height = max(abs(begin), 1e-9)
    at_chance = guess is not None and abs(begin / guess - 1.0) < 0.04
    # Elsewhere a model has learnt before: a small gain may be all that there is to gain.
    limit = LIMITS["flat"] * height if at_chance else LIMITS["still"] * height
    _, evaluated = look.evaluation
    if len(evaluated) > 2:
        moved = max(moved, 0.7 * float(np.ptp(evaluated)))
    name = "flat_at_chance" if at_chance else "flat_from_start"
    if not moved < limit or (not at_chance and look.noise > 5.0 * limit and len(evaluated) < 3):
        return None
    seen = f"the loss stays at {begin:.3g} (it moved by {moved:.2g})"
    return _if(look, name, min(limit / max(moved, 0.1 * limit), 10.0), seen)


def flat_at_unigram(look: Look) -> Sign | None:
    """The loss falls to the entropy of the token frequencies and stays there."""
    entropy, guess = look.context.unigram_entropy, look.context.guess
    if entropy is None or guess is None or not look.enough or entropy > 0.97 * guess:
        return None
    if look.start < entropy + 0.5 * (guess - entropy):
        return None  # it did not come from guessing
    values = look.loss.value
    middle, end = level(values, 0.4, 0.7), level(values, 0.7, 1.0)
    if end < (1.0 - 2.0 * LIMITS["unigram"]) * entropy:
        return None  # the training rows are learnt, whatever the evaluation says
    _, evaluated = look.evaluation
    if len(evaluated) >= 4:
        half = evaluated[len(evaluated) // 2 :]
        middle, end = float(half[0]), float(np.median(half[-2:]))
    distance = max(abs(end - entropy), abs(middle - entropy) * 0.7, abs(end - middle))
    strength = LIMITS["unigram"] * entropy / max(distance, 1e-3 * entropy)
    seen = f"the loss stays at {end:.3g}; the token frequencies alone give {entropy:.3g}"
    return _if(look, "flat_at_unigram", strength, seen)


def too_low_too_soon(look: Look) -> Sign | None:
    """Almost no loss within the first pass over the data, on held-out text too."""
    if not look.enough:
        return None
    end = level(look.loss.value, 0.85, 1.0)
    whole = look.context.unigram_entropy or look.context.guess or look.start
    _, evaluated = look.evaluation
    _, epochs = look.curve.points("epoch")
    if len(evaluated):
        end = max(end, float(np.median(evaluated[-2:])))
    elif len(epochs) and epochs[-1] > 1.5:
        return None  # repeated data is learned by heart: no leak is needed
    if look.context.chance is not None or "margin" in look.curve.columns:
        return None  # a preference loss may go to 0
    if look.start < 0.5 * whole and look.context.guess is not None:
        whole = look.start
    seen = f"the loss ends at {end:.3g}, from {look.start:.3g}"
    return _if(look, "too_low_too_soon", LIMITS["too_low"] * whole / max(end, 1e-6), seen)


# -- evaluation ---------------------------------------------------------------


def _beside(look: Look) -> tuple[Floats, Floats, Floats]:
    """(steps, local training loss, evaluation) at the evaluations."""
    steps, values = look.evaluation
    return steps, at(look.loss.steps, look.loss.value, steps, points=15), values


def train_down_eval_up(look: Look) -> Sign | None:
    """The evaluation rises again, or gains no more, while the training loss goes on falling."""
    steps, train, values = _beside(look)
    if len(values) < 4:
        return None
    opened = _gap_opens(look)
    if opened is not None:
        return opened
    low = int(np.argmin(values))
    if low == len(values) - 1:
        return None
    rise = float(np.median(values[-2:]) - values[low])
    fallen = float(train[low] - np.median(train[-2:]))
    spread = noise(values)
    least = max(LIMITS["eval_up"] * max(values[0] - values[low], 0.1 * values[0]), 3.0 * spread)
    down = max(fallen, 0.0) / max(0.02 * abs(float(train[low])), 1.5 * look.noise / 4.0)
    seen = (
        f"evaluation {values[low]:.3g} to {values[-1]:.3g}, "
        f"training {train[low]:.3g} to {train[-1]:.3g}"
    )
    strength = min(rise / max(least, 1e-9), down)
    return _if(look, "train_down_eval_up", strength, seen, steps[low], steps[-1], "evaluation.loss")


def _gap_opens(look: Look) -> Sign | None:
    """Repeated data: the training loss leaves an evaluation that has stopped to gain."""
    steps, train, values = _beside(look)
    _, epochs = look.curve.points("epoch")
    if not len(epochs) or epochs[-1] < 3.0 or scales(look) is not None:
        return None
    half = len(values) // 2
    learnt = float(np.median(train[half - 1 : half + 1]) - np.median(train[-2:]))
    gained = float(np.median(values[half - 1 : half + 1]) - np.median(values[-2:]))
    gap = values - train
    opened = float(np.median(gap[-2:]) - np.median(gap[:2]))
    if gained > 0.25 * learnt or learnt <= 0.0:
        return None
    least = max(LIMITS["gap_noise"] * look.noise, LIMITS["gap_share"] * look.fall)
    seen = (
        f"over {epochs[-1]:.0f} epochs the training loss leaves the evaluation by {opened:.3g} "
        f"(at last {train[-1]:.3g} and {values[-1]:.3g})"
    )
    strength = opened / least
    return _if(look, "train_down_eval_up", strength, seen, steps[0], steps[-1], "evaluation.loss")


def eval_below_train(look: Look) -> Sign | None:
    """The evaluation stays below the training loss by more than sets differ."""
    _, train, values = _beside(look)
    if len(values) < 4 or scales(look) is not None:
        return None
    gaps = (train - values) / np.maximum(np.abs(train), 1e-9)
    late = gaps[len(gaps) // 3 :]
    gap = float(np.median(late))
    error = look.noise / max(abs(float(np.median(train))), 1e-9) / math.sqrt(5.0 * len(late))
    if float(np.mean(late > 0)) < 0.75:
        return None
    seen = f"evaluation {np.median(values[-2:]):.3g}, training {np.median(train[-2:]):.3g}"
    strength = gap / max(LIMITS["eval_below"], 3.0 * error)
    return _if(look, "eval_below_train", strength, seen, column="evaluation.loss")


def eval_apart_from_start(look: Look) -> Sign | None:
    """The evaluation hardly follows what the training loss gains, from the beginning on."""
    _, train, values = _beside(look)
    if len(values) < 3 or scales(look) is not None:
        return None
    if look.fall < LIMITS["apart_fall"] * look.noise:
        return None
    progress = look.start - train
    early = [
        1.0 - float(look.start - value) / gained
        for value, gained in zip(values, progress.tolist(), strict=True)
        if gained > 0.15 * look.fall
    ][: max(2, len(values) // 2)]
    if not early:
        return None
    lacks = min(early[:3])
    if values[-1] - train[-1] < 0.15 * look.fall:
        return None
    seen = f"training {train[-1]:.3g}, evaluation {values[-1]:.3g}"
    return _if(
        look, "eval_apart_from_start", lacks / LIMITS["eval_apart"], seen, column="evaluation.loss"
    )


# -- the learning rate's column -----------------------------------------------


def never_left_warmup(look: Look) -> Sign | None:
    """The learning rate still rises at the end."""
    _, rates = look.rate
    if len(rates) < FEWEST_POINTS or rates.max() <= 0:
        return None
    rising = float(np.mean(np.diff(rates) > 0))
    begin = float(rates[0]) / float(rates[-1]) if rates[-1] > 0 else 1.0
    if rising < 0.95 or begin > 0.5:
        return None
    seen = f"the rate rises from {rates[0]:.2g} to {rates[-1]:.2g}, its highest, at the last step"
    return look.sign("never_left_warmup", 5.0, seen, column="learning_rate")


def rate_ran_out(look: Look) -> Sign | None:
    """The learning rate is 0 for the rest of the run."""
    steps, rates = look.rate
    if len(rates) < FEWEST_POINTS or rates.max() <= 0:
        return None
    alive = np.flatnonzero(rates > 1e-3 * np.median(rates[rates > 0]))
    share = (len(rates) - 1 - int(alive[-1])) / len(rates)
    seen = f"the rate is 0 for the last {share:.0%} of the run"
    return _if(
        look, "rate_ran_out", share / LIMITS["tail"], seen, steps[alive[-1]], column="learning_rate"
    )


# -- shapes -------------------------------------------------------------------


def plateau_then_drop(look: Look) -> Sign | None:
    """Nothing for a while, then most of the fall at once."""
    if len(look.loss) < 2 * FEWEST_POINTS or look.fall < 6.0 * look.noise:
        return None
    values = look.loss.value
    smooth = levels(values, min(60, len(values) // 3))
    still = smooth > look.start - max(0.06 * look.fall, 0.8 * look.noise)
    length = int(np.argmin(still)) if not still.all() else len(still)
    if length >= len(smooth):
        return None
    later = smooth[min(len(smooth) - 1, length + max(2, len(smooth) // 8))]
    sudden = (look.start - later) / look.fall
    share = length / len(smooth)
    if sudden < 0.5:
        return None
    last = look.loss.steps[min(len(values) - 1, int(share * len(values)))]
    seen = (
        f"the loss stays at {look.start:.3g} for {share:.0%} of the run, then falls to {later:.3g}"
    )
    return _if(look, "plateau_then_drop", share / LIMITS["plateau"], seen, None, last)


def spike(look: Look) -> Sign | None:
    """A sudden rise that heals, or that leaves the run on a higher level."""
    if not look.spikes:
        return None
    # After several it is no single event; above its lowest level the loss rose before.
    stays = [
        one
        for number, one in enumerate(look.spikes)
        if one.end is None
        and len(look.loss) - one.start >= 6
        and number <= 2
        and one.base - look.lowest < 0.5 * one.lasting
    ]
    if stays and not _rate_rises(look, float(look.loss.steps[stays[0].start])):
        one = stays[0]
        share = one.lasting / max(one.height, 1e-9)
        seen = (
            f"the loss jumps from {one.base:.3g} by {one.height:.3g} and is {one.lasting:.3g} "
            "above that level at the end"
        )
        strength = min(share / LIMITS["stays"], one.height / look.least_spike)
        found = _if(look, "spike_that_stays", strength, seen, look.loss.steps[one.start])
        if found is not None:
            return found
    one = max(look.spikes, key=lambda each: each.height)
    last = None if one.end is None else look.loss.steps[min(one.end, len(look.loss) - 1)]
    more = f", and {len(look.spikes) - 1} more" if len(look.spikes) > 1 else ""
    seen = f"the loss jumps from {one.base:.3g} by {one.height:.3g} and comes back{more}"
    strength = one.height / look.least_spike
    return _if(look, "spike_that_heals", strength, seen, look.loss.steps[one.start], last)


def _rate_rises(look: Look, step: float) -> bool:
    """Whether the rate goes on rising after a step until the end of the run."""
    steps, rates = look.rate
    if len(rates) < FEWEST_POINTS:
        return False
    then = float(rates[min(len(rates) - 1, int(np.searchsorted(steps, step)))])
    late = float(rates[(3 * len(rates)) // 4])
    return float(rates[-1]) > 1.05 * max(late, then)


def jump_at_resume(look: Look) -> Sign | None:
    """The loss stands on another level right after a resume."""
    best: Sign | None = None
    for resume in (*look.context.resumes, *look.curve.restarts):
        index = int(np.searchsorted(look.loss.steps, resume))
        height, strength = 0.0, 0.0
        for width in (6, 12, 24):
            one, error = step_at(look.loss.value, index, width)
            trend, _ = step_at(look.loss.value, index - 20, 20)
            if one < 0:  # the loss falls anyway
                one = min(0.0, one - min(trend, 0.0))
            if abs(one) / error / LIMITS["resume"] > strength:
                height, strength = one, abs(one) / error / LIMITS["resume"]
        seen = f"the loss changes by {height:+.3g} at the resume after step {resume:g}"
        found = _if(look, "jump_at_resume", strength, seen, resume, resume)
        if found is not None and (best is None or found.strength > best.strength):
            best = found
    return best


def epoch_sawtooth(look: Look) -> Sign | None:
    """The same rise and fall in every epoch."""
    _, epochs = look.curve.points("epoch")
    if not look.enough or len(epochs) < 20 or epochs[-1] - epochs[0] < 2.4:
        return None
    per_epoch = (len(look.loss) - 1) / (epochs[-1] - epochs[0])
    lag = round(per_epoch)
    if lag < 6:
        return None
    later = look.loss.value[min(lag // 2, len(look.loss) // 8) :]
    found, pairs = correlation_at(later, lag)
    if found * math.sqrt(max(pairs, 1)) < 4.0:
        return None
    seen = f"the loss of an epoch repeats that of the one before (correlation {found:.2f})"
    return _if(look, "epoch_sawtooth", found / LIMITS["sawtooth"], seen)


def periodic_bumps(look: Look) -> Sign | None:
    """Bumps at a fixed distance in steps that is no epoch; swings where each is higher."""
    heights = [one.height for one in look.spikes]
    growth = heights[-1] / heights[0] if len(heights) >= 3 else 0.0
    if growth > LIMITS["swings"] and float(np.mean(np.diff(heights) > 0)) > 0.6:
        seen = f"{len(heights)} swings, the last {growth:.1f} times the first"
        first = look.loss.steps[look.spikes[0].start]
        return _if(look, "growing_oscillation", growth / LIMITS["swings"], seen, first)
    # Regular ones may be lower than what a single spike must be: chance is not regular.
    starts = np.array([look.loss.steps[one.start] for one in look.bumps])
    if len(starts) < 5:
        return None
    period, share = regular(starts)
    seen = f"{len(starts)} bumps, one every {period:g} steps"
    return _if(look, "periodic_bumps", share / LIMITS["bumps"], seen, starts[0], starts[-1])


def _climb(look: Look) -> tuple[float, float, float, str]:
    """(share of the fall that is lost again, first step, strength of significance, column)."""
    values = look.loss.value
    parts = levels(values, min(20, len(values) // 4))
    low = int(np.argmin(parts))
    error = 1.25 * look.noise / math.sqrt(len(values) / len(parts))
    rise = float(np.median(parts[-2:]) - parts[low])
    share, sure = rise / look.fall, rise / max(4.0 * error, 1e-9)
    step = float(look.loss.steps[min(len(values) - 1, int((low + 0.5) / len(parts) * len(values)))])
    steps, evaluated = look.evaluation
    if len(evaluated) >= 5:
        bottom = int(np.argmin(evaluated))
        up = float(np.median(evaluated[-2:]) - evaluated[bottom])
        spread = max(noise(evaluated), 1e-9)
        by_eval = up / max(look.start - float(evaluated[bottom]), 1e-9)
        return by_eval, float(steps[bottom]), up / (3.0 * spread), "evaluation.loss"
    return share, step, sure, "loss"


def _wavering(look: Look) -> float:
    """How much the smoothed second half goes up and down, over what it rises in all."""
    half = levels(look.loss.value[len(look.loss) // 2 :], 16)
    error = 1.25 * look.noise / math.sqrt(max(1.0, len(look.loss) / 32))
    moves = np.diff(half)
    real = np.abs(moves)[np.abs(moves) > 2.5 * error].sum()
    return float(real / max(half.max() - half[0], 4.0 * error, 1e-9))


def _gradient_growth(look: Look) -> float:
    """How many times the gradient norm is its first value at the end; 0 where it is unknown."""
    _, norms = look.curve.points("grad_norm")
    if len(norms) < FEWEST_POINTS:
        return 0.0
    return level(norms, 0.75, 1.0) / max(float(norms[0]), 1e-12)


def uncleared(look: Look) -> Sign | None:
    """The gradient norm grows and grows, and the loss leaves its lowest level."""
    if len(look.loss) < 2 * FEWEST_POINTS:
        return None
    growth = _gradient_growth(look)
    parts = levels(look.loss.value, 12)
    low = int(np.argmin(parts[:-1]))
    hump = float(parts[low:].max() - parts[low]) / look.fall
    strength = min(growth / LIMITS["uncleared"], hump / LIMITS["creep"])
    seen = (
        f"the gradient norm grows to {growth:.0f} times its first value, and the loss rises by "
        f"{hump:.0%} of its fall"
    )
    return _if(look, "growing_oscillation", strength, seen)


def climbs(look: Look) -> Sign | None:
    """The loss rises again: at once, as a slow creep, as a climb, or in growing swings."""
    if len(look.loss) < 2 * FEWEST_POINTS:
        return None
    share, first, sure, column = _climb(look)
    if sure < 1.0 or share < LIMITS["creep"]:
        return None
    values = look.loss.value
    third = len(values) // 3
    swings = noise(values[-third:]) / max(noise(values[third // 2 : third // 2 + third]), 1e-9)
    swings = max(swings, LIMITS["swings"] * _wavering(look) / 2.0)
    seen = f"the loss loses {share:.0%} of its fall again, from step {first:g} on"
    jump, where = _sudden(look)
    if jump > 0.6 * share * look.fall and not _rate_rises(look, where):
        seen = f"the loss jumps by {jump:.3g} at step {where:g} and stays there"
        return _if(look, "spike_that_stays", jump / (0.6 * share * look.fall), seen, where)
    steps, rates = look.rate
    raised = False
    if len(rates) >= FEWEST_POINTS:
        then = float(rates[min(len(rates) - 1, int(np.searchsorted(steps, first)))])
        raised = float(rates[-1]) > 1.5 * then
        if raised:
            seen += f"; the rate rises from {then:.2g} to {rates[-1]:.2g} meanwhile"
    if share < LIMITS["climb"] and not raised:
        strength = min(share / LIMITS["creep"], sure)
        return _if(look, "late_creep", strength, seen, first, column=column)
    if swings >= LIMITS["swings"] and not raised:
        seen += f", and its swings grow {swings:.1f} times"
        return _if(look, "growing_oscillation", swings / LIMITS["swings"], seen, first)
    strength = max(share / LIMITS["climb"], 1.0) if raised else share / LIMITS["climb"]
    return _if(look, "falls_then_climbs", strength, seen, first, column=column)


def _sudden(look: Look) -> tuple[float, float]:
    """(height, step) of the largest rise within a few points that stands out of the noise."""
    values, width = look.loss.value, 8
    if len(values) < 4 * width:
        return 0.0, 0.0
    means = np.convolve(values, np.full(width, 1.0 / width), mode="valid")
    rises = means[width + 2 :] - means[: -width - 2]  # two points between both stretches
    place = int(np.argmax(rises))
    height = float(rises[place])
    if height < 6.0 * look.noise * math.sqrt(2.0 / width):
        return 0.0, 0.0
    return height, float(look.loss.steps[place + width])


def _if(
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


LOSS_SIGNATURES: Sequence[Signature] = (
    *(not_finite, scales, start_above_chance, flat, flat_at_unigram, too_low_too_soon),
    *(train_down_eval_up, eval_below_train, eval_apart_from_start),
    *(never_left_warmup, rate_ran_out, plateau_then_drop),
    *(spike, jump_at_resume, epoch_sawtooth, periodic_bumps, climbs, uncleared),
)
