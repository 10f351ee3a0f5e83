"""Gates: a limit on a paired difference, and one of three verdicts.

*passed*: the whole interval inside the limit; *refused*: the whole interval outside; else
*undetermined*, with the number of items that would decide. An improve gate asks for an
interval that excludes 0 on the good side; a protect gate bounds the change for the worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lehr.evaluation.power import items_to_decide, items_to_decide_share
from lehr.evaluation.statistics import Interval, mcnemar
from lehr.evaluation.suites import Direction, ItemScore, compare, paired, summary

GateKind = Literal["improve", "protect"]
VerdictWord = Literal["passed", "refused", "undetermined"]
Against = Literal["parent", "base"]
LEVEL = 0.95
MAXIMUM_LOOKS = 4


@dataclass(frozen=True)
class Gate:
    """A limit on how one measure of one suite may change.

    limit      protect: largest allowed change for the worse, >= 0, in the measure's unit;
               improve: smallest wanted change for the better, usually 0
    direction  which way of the measure is better
    """

    name: str
    suite: str
    measure: str
    kind: GateKind
    limit: float
    against: Against
    direction: Direction
    unit: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.limit) and self.limit >= 0):
            raise ValueError(f"gate {self.name}: a limit is a finite number >= 0, not {self.limit}")

    @property
    def signed_limit(self) -> float:
        """The limit as a difference (tuned - against) of the measure itself."""
        good = 1.0 if self.direction == "higher" else -1.0
        signed = good * self.limit if self.kind == "improve" else -good * self.limit
        return signed + 0.0  # JSON and people know no negative zero


@dataclass(frozen=True)
class Verdict:
    """What a gate found. Differences are tuned - against, in the measure's unit.

    n           items compared; gained, lost: items that changed side, for right / wrong items
    n_to_decide items with which the gate would decide if the estimate is the truth;
                None where it is decided, or where no number would
    level       of the interval: above 0.95 where several looks were planned
    """

    gate: Gate
    verdict: VerdictWord
    base: float
    tuned: float
    difference: float
    low: float
    high: float
    n: int
    n_to_decide: int | None = None
    gained: int | None = None
    lost: int | None = None
    p_value: float | None = None
    level: float = LEVEL
    looks: int = 1
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """One flat mapping, as evaluation.json and the ledger store it."""
        row = asdict(self)
        gate = row.pop("gate")
        gate["limit"] = self.gate.signed_limit
        # JSON has neither infinity nor NaN: what does not exist is null.
        for name in ("base", "tuned", "difference", "low", "high"):
            row[name] = row[name] if math.isfinite(row[name]) else None
        return {**gate, **row}


def verdict_of(gate: Gate, interval: Interval) -> VerdictWord:
    """The three-way decision for an interval of tuned - against."""
    if gate.direction == "higher":
        low, high = interval.low, interval.high
    else:
        low, high = -interval.high, -interval.low
    # From here on, higher is better.
    if gate.kind == "improve":
        if low > gate.limit:
            return "passed"
        return "refused" if high <= gate.limit else "undetermined"
    if low >= -gate.limit:
        return "passed"
    return "refused" if high < -gate.limit else "undetermined"


def decide(
    gate: Gate,
    before: Sequence[ItemScore],
    after: Sequence[ItemScore],
    *,
    level: float = LEVEL,
    seed: int = 0,
    count_needed: bool = True,
) -> Verdict:
    """Judge one gate on the same items before (parent or base) and after.

    Raises ValueError where the two sides hold different items or another measure. No
    items at all is *undetermined*: an absent bound is never a pass. count_needed False
    leaves the number of items that would decide out (where more are taken anyway).
    """
    for scores in (before, after):
        for score in scores:
            if (score.suite, score.measure) != (gate.suite, gate.measure):
                raise ValueError(
                    f"gate {gate.name} judges {gate.suite}.{gate.measure}, "
                    f"not {score.suite}.{score.measure}"
                )
    if not before and not after:
        return _undetermined(gate, "no items")
    interval = compare(before, after, level, seed)
    if interval.n == 0:
        return _undetermined(gate, "undefined for one side: nothing has a weight")
    word = verdict_of(gate, interval)
    needed = None
    if word == "undetermined" and count_needed:
        needed = _items_needed(gate, interval, before, after)
    gained, lost = _changed_sides(before, after)
    return Verdict(
        gate=gate,
        verdict=word,
        base=summary(before, level, seed).value,
        tuned=summary(after, level, seed).value,
        difference=interval.value,
        low=interval.low,
        high=interval.high,
        n=len(before),
        n_to_decide=needed,
        gained=gained,
        lost=lost,
        p_value=None if gained is None or lost is None else mcnemar(gained, lost),
        level=level,
    )


def look_levels(looks: Sequence[int], level: float = LEVEL) -> list[float]:
    """Interval level of each planned look, so that all of them together err at 1 - level.

    looks: items seen at each look, rising. The error is spent as the square of the share
    of items seen (a power family, Kim and DeMets 1987), each look by Bonferroni: early
    looks are strict, the last one keeps most of the error.

    >>> [round(one, 4) for one in look_levels([100, 200, 400])]
    [0.9969, 0.9906, 0.9625]
    """
    if not looks or any(b <= a for a, b in zip([0, *looks], looks, strict=False)):
        raise ValueError(f"looks are rising numbers of items, not {list(looks)}")
    spent = [(n / looks[-1]) ** 2 for n in looks]
    shares = [now - before for before, now in zip([0.0, *spent], spent, strict=False)]
    return [1 - (1 - level) * share for share in shares]


def plan_looks(budget: int, looks: int = MAXIMUM_LOOKS, first: int = 50) -> list[int]:
    """Items at each look: halving back from the budget, none below `first`.

    >>> plan_looks(400), plan_looks(60), plan_looks(10)
    ([50, 100, 200, 400], [60], [10])
    """
    if budget < 1:
        raise ValueError(f"a gate's budget is at least one item, not {budget}")
    plan = [budget]
    while len(plan) < min(looks, MAXIMUM_LOOKS) and plan[0] // 2 >= first:
        plan.insert(0, plan[0] // 2)
    return plan


Scored = tuple[Sequence[ItemScore], Sequence[ItemScore]]


def decide_sequentially(
    gate: Gate,
    score_more: Callable[[int], Scored],
    budget: int,
    *,
    looks: int = MAXIMUM_LOOKS,
    level: float = LEVEL,
    seed: int = 0,
) -> Verdict:
    """Take more items until the gate decides or its budget of items is spent.

    score_more(n) returns the scores (before, after) of the first n items; earlier items
    must be among them. budget: at most the items there are. Looking several times is paid
    for by stricter early intervals. Items must come in an order that has nothing to do
    with their scores.
    """
    plan = plan_looks(budget, looks)
    levels = look_levels(plan, level)
    verdict: Verdict | None = None
    for number, (n, look_level) in enumerate(zip(plan, levels, strict=True), start=1):
        before, after = score_more(n)
        last = number == len(plan)
        verdict = decide(gate, before, after, level=look_level, seed=seed, count_needed=last)
        verdict = replace(verdict, looks=number)
        if verdict.verdict != "undetermined":
            break
    assert verdict is not None
    return verdict


def _undetermined(gate: Gate, why: str) -> Verdict:
    nothing = math.nan
    return Verdict(
        gate, "undetermined", nothing, nothing, nothing, -math.inf, math.inf, 0, note=why
    )


def _items_needed(
    gate: Gate, interval: Interval, before: Sequence[ItemScore], after: Sequence[ItemScore]
) -> int | None:
    """Items with which the gate would decide with 80 % power if the estimate is the truth."""
    n, limit, level = len(before), gate.signed_limit, interval.level
    if interval.effective is None:
        return items_to_decide(
            interval.low, interval.high, n, limit, estimate=interval.value, level=level
        )
    worth = interval.effective / n
    changes = [other.value - one.value for one, other in paired(before, after)]
    gained, lost = sum(c > 0 for c in changes) * worth, sum(c < 0 for c in changes) * worth
    needed = items_to_decide_share(gained, lost, interval.effective, limit, level=level)
    return None if needed is None else max(n + 1, math.ceil(needed / worth))


def _changed_sides(
    before: Sequence[ItemScore], after: Sequence[ItemScore]
) -> tuple[int | None, int | None]:
    pairs = [(one.passed, other.passed) for one, other in paired(before, after)]
    if all(one is None and other is None for one, other in pairs):
        return None, None
    gained = sum(one is not True and other is True for one, other in pairs)
    lost = sum(one is True and other is not True for one, other in pairs)
    return gained, lost
