"""Learning rates: pure functions of the index of the applied update.

Convention: update `i` (from 0) of a warmup of `w` has (i + 1) / w of the peak, as if
the rate had been 0 one update before the first; the decay reaches `final` one update
after the last. So no update is spent at a rate of 0, the peak of `cosine` and `linear`
is reached exactly once, at update max(w − 1, 0), and an index past the run never
returns to the peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lehr.errors import Problem, RecipeError

KINDS = ("cosine", "linear", "wsd", "constant", "infinite")
SHAPES = ("linear", "sqrt")


@dataclass(frozen=True)
class Schedule:
    """Shape of the learning rate over a run.

    kind      cosine | linear | wsd (warmup, stable, decay) | constant | infinite (warmup,
              cooldown to `hold`, hold; decay only where one is asked)
    warmup    below 1 a share of the run, else a number of updates
    decay     the same; length of the last decay of `wsd` and `infinite` (here too 0.2 where none
              is given: say 0 for none)
    final     share of the peak that the decay ends at; `constant` has no decay
    shape     of that last decay: linear, or sqrt (1 - sqrt(x), steeper at first)
    initial   share of the peak that the warmup begins from: above 0 to go on from the rate
              at which an earlier run ended (re-warming)
    cooldown  infinite: updates of a half cosine from the peak to `hold`
    hold      infinite: share of the peak that is held

    Before its decay, an `infinite` schedule does not depend on the length of the run: the
    run can be prolonged, and a branch annealed from any point (a run that begins from the
    held weights, with the held rate as its peak and no warmup).
    """

    kind: str = "cosine"
    warmup: float = 0.03
    decay: float = 0.2
    final: float = 0.1
    shape: str = "linear"
    initial: float = 0.0
    cooldown: float = 0.0
    hold: float = 1.0

    def rate(self, index: int, peak: float, updates: int) -> float:
        """Learning rate of applied update `index` of a run of `updates`."""
        return learning_rate(
            index,
            kind=self.kind,
            peak=peak,
            warmup=self.warmup,
            decay=self.decay,
            final=self.final,
            updates=updates,
            shape=self.shape,
            initial=self.initial,
            cooldown=self.cooldown,
            hold=self.hold,
        )

    def curve(self, peak: float, updates: int) -> list[float]:
        """Every rate of the run, for plans and pictures."""
        raise_problems(schedule_problems(self, updates))
        return [self.rate(index, peak, updates) for index in range(updates)]


def as_updates(length: float, updates: int) -> int:
    """A length in updates: below 1 it is a share of the run, rounded half up."""
    return math.floor(length * updates + 0.5) if length < 1 else int(length)


def learning_rate(
    index: int,
    *,
    kind: str,
    peak: float,
    warmup: float,
    decay: float,
    final: float,
    updates: int,
    shape: str = "linear",
    initial: float = 0.0,
    cooldown: float = 0.0,
    hold: float = 1.0,
) -> float:
    """Learning rate of applied update `index`; see `Schedule` for the arguments.

    >>> shape = dict(kind="linear", peak=1.0, warmup=2, decay=0, final=0.0, updates=6)
    >>> [round(learning_rate(i, **shape), 3) for i in range(7)]
    [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
    """
    warmup_updates = as_updates(warmup, updates)
    if index < warmup_updates:
        return peak * (initial + (1.0 - initial) * ((index + 1) / warmup_updates))
    if kind == "constant":
        return peak
    last_at_peak = max(warmup_updates - 1, 0)
    if kind == "infinite":
        # Where no decay is asked, the run has no end that its rates could depend on.
        held = _held(index - last_at_peak, cooldown, hold)
        decay_updates = as_updates(decay, updates)
        last_held = max(last_at_peak + int(cooldown), updates - decay_updates - 1)
        if not decay_updates or index <= last_held:
            return peak * held
        share = _falling(shape, (index - last_held) / (updates - last_held))
        return peak * (final + (hold - final) * share)
    if kind == "wsd":
        last_at_peak = max(last_at_peak, updates - as_updates(decay, updates) - 1)
    progress = (index - last_at_peak) / (updates - last_at_peak)
    progress = min(max(progress, 0.0), 1.0)
    if kind == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif kind == "linear":
        share = 1.0 - progress
    elif kind == "wsd":
        share = _falling(shape, progress)
    else:
        raise RecipeError(Problem("schedule.kind", "one of " + ", ".join(KINDS), kind))
    return peak * (final + (1.0 - final) * share)


def _held(updates: int, cooldown: float, hold: float) -> float:
    """Share of the peak `updates` after it: a half cosine down to `hold`, then `hold`."""
    if updates >= cooldown:
        return hold
    return hold + (1.0 - hold) * 0.5 * (1.0 + math.cos(math.pi * updates / cooldown))


def _falling(shape: str, progress: float) -> float:
    """From 1 to 0 over the decay."""
    progress = min(max(progress, 0.0), 1.0)
    if shape not in SHAPES:
        raise RecipeError(Problem("schedule.shape", "one of " + ", ".join(SHAPES), shape))
    return 1.0 - (math.sqrt(progress) if shape == "sqrt" else progress)


def schedule_problems(schedule: Schedule, updates: int) -> list[Problem]:
    """Everything that is wrong with a schedule for a run of `updates`."""
    problems = []
    if schedule.kind not in KINDS:
        expected = "one of " + ", ".join(KINDS)
        problems.append(Problem("schedule.kind", expected, schedule.kind))
    if schedule.shape not in SHAPES:
        expected = "one of " + ", ".join(SHAPES)
        problems.append(Problem("schedule.shape", expected, schedule.shape))
    lengths = {"warmup": schedule.warmup, "decay": schedule.decay, "cooldown": schedule.cooldown}
    for name, length in lengths.items():
        where = f"schedule.{name}"
        if not is_number(length) or length < 0:
            expected = "a share of the run below 1, or a whole number of updates"
            problems.append(Problem(where, expected, length))
        elif length >= 1 and length != int(length):
            problems.append(Problem(where, "a whole number of updates from 1 on", length))
    for name in ("final", "initial", "hold"):
        share = getattr(schedule, name)
        if not is_number(share) or not 0 <= share <= 1:
            problems.append(Problem(f"schedule.{name}", "a share of the peak, 0 to 1", share))
    if problems:
        return problems
    if schedule.kind == "infinite":
        return _infinite_problems(schedule, updates)
    warmup = as_updates(schedule.warmup, updates)
    if warmup > updates:
        expected = f"no more than the {updates} updates of the run"
        return [Problem("schedule.warmup", expected, schedule.warmup)]
    decay = as_updates(schedule.decay, updates)
    if schedule.kind == "wsd" and warmup + decay > updates:
        expected = f"warmup and decay together within the {updates} updates of the run"
        return [Problem("schedule.decay", expected, f"{warmup} + {decay} updates")]
    return []


def _infinite_problems(schedule: Schedule, updates: int) -> list[Problem]:
    """Its first parts are counted in updates: a share of a run without an end says nothing."""
    problems = [
        Problem(
            f"schedule.{name}", "a number of updates, or 0: an infinite run has no shares", value
        )
        for name, value in (("warmup", schedule.warmup), ("cooldown", schedule.cooldown))
        if 0 < value < 1
    ]
    if problems:
        return problems
    if schedule.warmup > updates:
        expected = f"no more than the {updates} updates of the run"
        return [Problem("schedule.warmup", expected, schedule.warmup)]
    decay = as_updates(schedule.decay, updates)
    parts = int(schedule.warmup), int(schedule.cooldown), decay
    if decay and sum(parts) > updates:
        expected = f"warmup, cooldown and decay together within the {updates} updates of the run"
        return [Problem("schedule.decay", expected, f"{' + '.join(map(str, parts))} updates")]
    if schedule.final > schedule.hold and decay:
        expected = f"no more than hold ({schedule.hold:g}), or the decay would rise"
        return [Problem("schedule.final", expected, schedule.final)]
    return []


def is_number(value: object) -> bool:
    """A finite int or float; True and False are no numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def raise_problems(problems: list[Problem]) -> None:
    """Raise RecipeError with all of `problems`, if there are any."""
    if problems:
        raise RecipeError(problems)
