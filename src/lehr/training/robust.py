"""Robust statistics of a training signal: median, spread, and the limit of what is usual.

A window of past *accepted* values has median m, spread s = 1.4826 MAD (the standard
deviation of a normal distribution) and largest value x_max. A new value x is unusual where

    x > m + max( L (1 + w / n) s,  2 (x_max - m) )

L is the limit in spreads, n the number of values so far, w widens it while they are few. The
second term says that half of the jump would have been new already: heavy tails and a few
values of another kind are usual once the window holds one of them. Only jumps upwards count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAD_TO_SPREAD = 1.4826
FEWEST = 8  # values before anything is judged
WARM = 8.0  # so many values double the limit
TAIL = 2.0


def median(values: Sequence[float]) -> float:
    """The middle one of the ordered values; the mean of two for an even number.

    >>> median([3.0, 1.0, 10.0, 2.0])
    2.5
    """
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def spread(values: Sequence[float], centre: float) -> float:
    """1.4826 x the median distance from `centre`.

    >>> round(spread([1.0, 2.0, 3.0, 4.0, 100.0], 3.0), 4)
    1.4826
    """
    return MAD_TO_SPREAD * median([abs(value - centre) for value in values])


@dataclass(frozen=True)
class Kind:
    """How a signal is judged.

    logarithm  compare logarithms: the signal is positive and its noise is a factor
    absolute, relative  smallest spread, in the signal's unit and as a share of the median: a
                        window without noise must not make everything unusual
    """

    logarithm: bool
    absolute: float
    relative: float = 0.0


@dataclass(frozen=True)
class Unusual:
    """A value above its limit; all in the signal's own unit."""

    value: float
    limit: float
    usual: float


class Window:
    """The last accepted values of one signal.

    Nothing that was judged unusual enters it, so one spike neither moves the limit nor hides
    the next one.
    """

    def __init__(self, kind: Kind, length: int, values: Iterable[float] = ()) -> None:
        self.kind = kind
        self._values: deque[float] = deque(values, maxlen=length)

    @property
    def values(self) -> list[float]:
        """Accepted values, oldest first, as they are compared."""
        return list(self._values)

    def judge(self, value: float, spreads: float) -> Unusual | None:
        """Whether `value` is unusual; `spreads` is L. Changes nothing."""
        compared = self._compared(value)
        # Below the largest accepted value nothing is unusual: no window is sorted for it.
        if compared is None or len(self._values) < FEWEST or compared <= max(self._values):
            return None
        centre = median(self._values)
        limit = centre + self._allowed(centre, spreads)
        if compared <= limit:
            return None
        return Unusual(value, self._own_unit(limit), self._own_unit(centre))

    def accept(self, value: float) -> None:
        """Take the value in. One without a logarithm, or not finite, is left out."""
        compared = self._compared(value)
        if compared is not None and math.isfinite(compared):
            self._values.append(compared)

    def _allowed(self, centre: float, spreads: float) -> float:
        least = max(self.kind.absolute, self.kind.relative * abs(centre))
        noise = max(spread(self._values, centre), least)
        count = len(self._values)
        return max(spreads * (1 + WARM / count) * noise, TAIL * (max(self._values) - centre))

    def _compared(self, value: float) -> float | None:
        if not self.kind.logarithm:
            return value
        return math.log(value) if value > 0 else None

    def _own_unit(self, compared: float) -> float:
        return math.exp(compared) if self.kind.logarithm else compared
