"""What an evaluation is: items, a scorer, named measures and their stamp.

A suite scores items one by one; intervals, pairing and flips live in `statistics`,
`gates` and `flips`, once for all suites.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lehr.evaluation.statistics import Interval, paired_difference, single_interval
from lehr.streams import content_hash

Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Measure:
    """A number that a suite reports: sum of values / sum of weights over its items.

    unit       of the ratio: "nats/token", "bits/byte", "share"
    direction  which way is better
    version    of the scorer: scores of unlike versions are never compared
    """

    unit: str
    direction: Direction
    version: str = "1"


@dataclass(frozen=True)
class ItemScore:
    """One item's score under one measure, with the texts that explain it.

    passed     for items that are right or wrong; None where neither can be said (a tie)
    answer     what the model wrote or preferred; "" where nothing was written
    reference  what was wanted
    cluster    items that share it are not independent; "" where the item stands alone
    """

    id: str
    suite: str
    measure: str
    value: float
    weight: float = 1.0
    passed: bool | None = None
    prompt: str = ""
    answer: str = ""
    reference: str = ""
    cluster: str = ""


class Suite(Protocol):
    """Items and their scorer. `items` are ids; a part of them may be scored at a time."""

    @property
    def name(self) -> str: ...

    @property
    def items(self) -> Sequence[str]: ...

    @property
    def measures(self) -> Mapping[str, Measure]: ...

    @property
    def data_hash(self) -> str: ...

    def score(self, model: Any, items: Sequence[str], encoder: Any) -> list[ItemScore]: ...


UNDEFINED = Interval(math.nan, -math.inf, math.inf, 0, method="undefined")


@dataclass(frozen=True)
class Stamp:
    """All that makes two scores comparable: data, scorer versions and template."""

    suite: str
    data_hash: str
    measures: tuple[tuple[str, str, str, str], ...]  # name, unit, direction, version
    template_hash: str

    @property
    def key(self) -> str:
        return content_hash([self.suite, self.data_hash, self.measures, self.template_hash])

    def differences(self, other: Stamp) -> list[str]:
        """Names of the fields in which two stamps differ."""
        names = ("suite", "data_hash", "measures", "template_hash")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def stamp_of(suite: Suite, encoder: Any) -> Stamp:
    """The stamp of scores that `suite` gives under `encoder`."""
    measures = tuple(
        (name, measure.unit, measure.direction, measure.version)
        for name, measure in sorted(suite.measures.items())
    )
    return Stamp(suite.name, suite.data_hash, measures, encoder.fingerprint)


def of_measure(scores: Sequence[ItemScore], measure: str) -> list[ItemScore]:
    """The scores under one measure, in their order."""
    return [score for score in scores if score.measure == measure]


def summary(scores: Sequence[ItemScore], level: float = 0.95, seed: int = 0) -> Interval:
    """Value and interval of one measure's scores; NaN of n = 0 where nothing has a weight."""
    if not any(score.weight for score in scores):
        return UNDEFINED
    return single_interval(
        [score.value for score in scores],
        [score.weight for score in scores],
        clusters=_clusters(scores),
        level=level,
        seed=seed,
    )


def paired(
    before: Sequence[ItemScore], after: Sequence[ItemScore]
) -> list[tuple[ItemScore, ItemScore]]:
    """Scores of the same items side by side.

    Raises ValueError where an item is missing on one side or stands twice: a difference
    over different items is not a paired difference.
    """
    sides = []
    for scores in (before, after):
        by_id = {score.id: score for score in scores}
        if len(by_id) != len(scores):
            counts = Counter(score.id for score in scores)
            twice = next(name for name, count in counts.items() if count > 1)
            raise ValueError(f"item {twice!r} is scored twice")
        sides.append(by_id)
    first, second = sides
    if first.keys() != second.keys():
        missing = sorted(first.keys() ^ second.keys())
        raise ValueError(f"{len(missing)} items are scored on one side only, first {missing[0]!r}")
    return [(score, second[name]) for name, score in first.items()]


def compare(
    before: Sequence[ItemScore],
    after: Sequence[ItemScore],
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Paired difference after - before of one measure, in the measure's unit.

    Undefined (NaN, n = 0) where one side has no weight at all, as the share of right first
    answers that were given up has for a model without right first answers.
    """
    pairs = paired(before, after)
    if not any(one.weight for one, _ in pairs) or not any(other.weight for _, other in pairs):
        return UNDEFINED
    return paired_difference(
        [one.value for one, _ in pairs],
        [other.value for _, other in pairs],
        [one.weight for one, _ in pairs],
        [other.weight for _, other in pairs],
        clusters=_clusters([one for one, _ in pairs]),
        level=level,
        seed=seed,
    )


def _clusters(scores: Sequence[ItemScore]) -> list[str] | None:
    if not any(score.cluster for score in scores):
        return None
    return [score.cluster or f"item/{score.id}" for score in scores]
