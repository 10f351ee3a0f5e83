"""Geometry of curves over updates: series of numbers in, SVG path data and ticks out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lehr.report.wording import plain

CURVE_POINTS = 420  # more than a screen can show


def round_ticks(start: float, end: float, wanted: int) -> list[float]:
    """At most `wanted` + 1 round numbers between `start` and `end`.

    >>> round_ticks(-4.0, 61.0, 4)
    [0.0, 20.0, 40.0, 60.0]
    """
    span = end - start
    if not math.isfinite(span) or span <= 0:
        return []
    raw = span / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(start / step - 1e-9)
    last = math.floor(end / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


@dataclass(frozen=True)
class Line:
    """One curve: SVG path data in the view box of its chart, and what it is."""

    name: str
    path: str
    style: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Curves over updates. `x_ticks` and `y_ticks` are (position, label)."""

    title: str
    width: int
    height: int
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[float]  # x positions of skipped updates
    summary: str  # the curve in words, for those who do not see it


Series = Sequence[tuple[float, float]]


def chart(
    title: str,
    series: Mapping[str, Series],
    *,
    logarithmic: bool = False,
    marks: Sequence[float] = (),
    width: int = 640,
    height: int = 240,
) -> Chart | None:
    """A chart of named series of (x, y); None where no series has a finite point.

    In a logarithmic chart the points that are not positive are left out.
    """
    kept = {
        name: [(x, y) for x, y in points if not logarithmic or y > 0]
        for name, points in series.items()
    }
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return None

    def scaled(figure: float) -> float:
        return math.log10(figure) if logarithmic else figure

    xs = [x for points in kept.values() for x, _ in points]
    ys = [scaled(y) for points in kept.values() for _, y in points]
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = min(ys), max(ys)
    # Of equal values a share of their size: beside 1e30, a half is nothing.
    margin = 0.06 * (y_high - y_low) or 0.5 * max(1.0, abs(y_high))
    y_low, y_high = y_low - margin, y_high + margin
    x_span = (x_high - x_low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            round(width * (x - x_low) / x_span, 1),
            round(height * (y_high - scaled(y)) / (y_high - y_low), 1),
        )

    lines = []
    for index, (name, points) in enumerate(kept.items()):
        places = [at(x, y) for x, y in thinned(points, CURVE_POINTS)]
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in places)
        lines.append(Line(name, path, f"line-{index}", places if len(places) <= 24 else []))
    first_name, first = next(iter(kept.items()))
    lowest = plain(min(y for _, y in first))
    summary = (
        f"{first_name}: {plain(first[0][1])} at update {first[0][0]:g}, "
        f"{plain(first[-1][1])} at update {first[-1][0]:g}, lowest {lowest}"
    )
    x_ticks = [(at(x, 1.0)[0], f"{x:,g}") for x in round_ticks(x_low, x_high, 5)]
    return Chart(
        title=title,
        width=width,
        height=height,
        lines=lines,
        x_ticks=x_ticks,
        y_ticks=[
            (round(height * (y_high - scaled(y)) / (y_high - y_low), 1), _short(y))
            for y in _y_ticks(y_low, y_high, logarithmic)
        ],
        marks=[at(mark, 1.0)[0] for mark in marks if x_low <= mark <= x_high],
        summary=summary,
    )


def _y_ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    if not logarithmic:
        return round_ticks(low, high, 4)
    figures = [
        10.0**power * factor
        for power in range(math.floor(low), math.ceil(high) + 1)
        for factor in (1, 2, 5)
    ]
    inside = [figure for figure in figures if low <= math.log10(figure) <= high]
    if len(inside) > 6:
        inside = [figure for figure in inside if math.log10(figure).is_integer()]
    return inside if len(inside) >= 2 else [10.0**low, 10.0 ** ((low + high) / 2), 10.0**high]


def _short(figure: float) -> str:
    return f"{figure:.3g}".replace("-", "−")


def thinned(points: Series, most: int) -> list[tuple[float, float]]:
    """At most about `most` points that keep every peak: the extremes of equal stretches.

    >>> thinned([(x, float(x == 7)) for x in range(1000)], 10)[1]
    (7, 1.0)
    """
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most / 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        extremes = {
            min(range(len(part)), key=lambda index: part[index][1]),
            max(range(len(part)), key=lambda index: part[index][1]),
        }
        kept += [part[index] for index in sorted(extremes)]
    return kept
