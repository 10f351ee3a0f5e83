"""Robust numbers of a curve: what signatures are made of. Pure functions over arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_POINTS = 2000  # longer columns are cut into this many bins
BASE_POINTS = 16  # before a point: what it is compared with
SPREAD_OF_MAD = 1.4826  # standard deviation of a normal distribution over its MAD


@dataclass(frozen=True)
class Series:
    """A column in at most MOST_POINTS bins: median, highest and lowest value of each [n].

    spread  noise of the points before they were put into bins
    """

    steps: Floats
    value: Floats
    high: Floats
    low: Floats
    spread: float = 0.0

    def __len__(self) -> int:
        return len(self.value)


def series(steps: Floats, values: Floats) -> Series:
    """Bins of equal numbers of points; a short column stays as it is.

    >>> len(series(np.arange(9000.0), np.zeros(9000)))
    1800
    """
    count = len(values)
    if count <= MOST_POINTS:
        return Series(steps, values, values, values, noise(values))
    width = math.ceil(count / MOST_POINTS)
    whole = count - count % width
    parts = values[:whole].reshape(-1, width)
    return Series(
        steps[:whole].reshape(-1, width)[:, width // 2],
        np.median(parts, axis=1),
        parts.max(axis=1),
        parts.min(axis=1),
        noise(values),
    )


def noise(values: Floats) -> float:
    """Standard deviation of what changes from point to point, whatever the trend.

    Of the second difference, whose spread is √6 times that of independent noise.
    """
    if len(values) < 4:
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        second = (values[2:] - values[1:-1]) - (values[1:-1] - values[:-2])
        middle = float(np.median(second))
        spread = SPREAD_OF_MAD * float(np.median(np.abs(second - middle))) / math.sqrt(6.0)
    return spread if math.isfinite(spread) else float(np.max(np.abs(values)))


def level(values: Floats, begin: float, end: float) -> float:
    """Median of the stretch between two shares of the run.

    >>> level(np.arange(100.0), 0.9, 1.0)
    94.5
    """
    count = len(values)
    first = min(int(begin * count), count - 1)
    return float(np.median(values[first : max(first + 1, math.ceil(end * count))]))


def levels(values: Floats, parts: int) -> Floats:
    """Median of each of `parts` equal stretches."""
    return np.array([level(values, i / parts, (i + 1) / parts) for i in range(parts)])


def before(values: Floats) -> Floats:
    """Median of the BASE_POINTS points before each point [n]; NaN where they are not there."""
    result = np.full(len(values), np.nan)
    if len(values) > BASE_POINTS:
        windows = sliding_window_view(values[:-1], BASE_POINTS)
        result[BASE_POINTS:] = np.median(windows, axis=1)
    return result


@dataclass(frozen=True)
class Departure:
    """A point from which on the curve stands far above what went before.

    start, end  indices; end is None where the curve does not come back
    height      of the peak above the level before
    base        that level
    lasting     what remains of the height at the end of the run, or 0 where it healed
    """

    start: int
    end: int | None
    height: float
    base: float
    lasting: float


def departures(one: Series, least: float) -> list[Departure]:
    """Sudden rises by at least `least` above the median of the points before."""
    base = before(one.value)
    with np.errstate(invalid="ignore"):
        above = one.high - base > least
    found: list[Departure] = []
    index, count = 0, len(one)
    spread = noise(one.value)
    while index < count:
        if not above[index]:
            index += 1
            continue
        start = index
        calm = base[start] + max(0.25 * least, 2.0 * spread)
        end = _first_calm(one.value, start + 1, calm)
        stop = count if end is None else end
        peak = float(one.high[start:stop].max())
        lasting = 0.0
        if end is None:
            tail = one.value[max(start + 1, count - max(4, (count - start) // 3)) :]
            lasting = float(np.median(tail) - base[start]) if len(tail) else 0.0
        found.append(Departure(start, end, peak - float(base[start]), float(base[start]), lasting))
        index = stop + 1
    return found


def _first_calm(values: Floats, begin: int, calm: float) -> int | None:
    """First index from which three points have a median at the level of before."""
    for index in range(begin, len(values)):
        if float(np.median(values[index : index + 3])) <= calm:
            return index
    return None


def step_at(values: Floats, index: int, width: int) -> tuple[float, float]:
    """(height, its standard error) of the step from the mean before `index` to the mean after."""
    first, second = values[max(0, index - max(width, 16)) : index], values[index : index + width]
    if len(first) < 4 or len(second) < 4:
        return 0.0, math.inf
    error = max(noise(values), 1e-12) * math.sqrt(1.0 / len(first) + 1.0 / len(second))
    return float(second.mean() - first.mean()), error


def correlation_at(values: Floats, lag: int) -> tuple[float, int]:
    """(correlation of the series with itself `lag` points earlier, number of pairs).

    The trend over one period is taken out first: a mean over a window of `lag` points.
    """
    if lag < 2 or len(values) < 2 * lag + lag // 2:
        return 0.0, 0
    half = lag // 2
    padded = np.concatenate([np.full(half, values[0]), values, np.full(lag - half, values[-1])])
    sums = np.concatenate([[0.0], np.cumsum(padded)])
    mean = (sums[lag:] - sums[:-lag])[: len(values)] / lag
    rest = (values - mean)[half:-half]
    first, second = rest[:-lag], rest[lag:]
    if len(first) < 6 or first.std() == 0 or second.std() == 0:
        return 0.0, 0
    return float(np.corrcoef(first, second)[0, 1]), len(first)


def regular(positions: Floats) -> tuple[float, float]:
    """(period, share of the gaps that are within 15 % of it) of events at `positions`."""
    gaps = np.diff(positions)
    if len(gaps) < 2:
        return 0.0, 0.0
    period = float(np.median(gaps))
    if period <= 0:
        return 0.0, 0.0
    return period, float(np.mean(np.abs(gaps - period) <= max(0.15 * period, 1.0)))


def at(steps: Floats, values: Floats, wanted: Floats, points: int = 9) -> Floats:
    """Local median of a series around each wanted step [m]."""
    places = np.searchsorted(steps, wanted)
    half = points // 2
    return np.array(
        [float(np.median(values[max(0, p - half) : max(p + half + 1, 1)])) for p in places]
    )
