"""Geometry of the dot-and-interval plot: gates in, positions in percent out.

The drawing itself is SVG in the templates, coloured by CSS variables, so that it
follows light, dark and print. Nothing here knows about HTML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lehr.report.curves import round_ticks
from lehr.report.reading import number, text
from lehr.report.wording import (
    change,
    gate_name,
    interval,
    is_share,
    meaning,
    plain,
    signed_limit,
)

COST_AXIS_LEFT, COST_AXIS_LEAST, COST_AXIS_MOST = -1.5, 1.6, 6.0  # in multiples of the limit


@dataclass(frozen=True)
class Dot:
    """One row of the dot-and-interval plot; positions are percent of the track's width."""

    name: str
    meaning: str
    shown: str  # the difference in its own unit
    bounds: str
    limit: str
    verdict: str
    n: str
    x: float
    low: float
    high: float
    cut_left: bool  # the interval or the dot leaves the track
    cut_right: bool
    note: str = ""


@dataclass(frozen=True)
class Axis:
    """The line that counts (no change, or the limit) and the ticks, in percent of the width."""

    line: float
    zero: float
    ticks: list[tuple[float, str]]
    harm_from: float  # from here on the track is the harmful side
    harm_to: float


@dataclass(frozen=True)
class Panel:
    """Rows that share one axis."""

    title: str
    caption: str
    axis: Axis
    dots: list[Dot]


def gained_panel(gates: Sequence[Mapping[str, Any]]) -> Panel | None:
    """Improvements: right is better; points for shares, percent of the base for losses."""
    rows = [row for gate in gates if (row := _gain(gate)) is not None]
    if not rows:
        return None
    seen = [0.0, *_finite(rows)]
    reach_low, reach_high = min(seen), max(seen)
    span = max(reach_high - reach_low, 1e-9)
    start, end = reach_low - 0.08 * span, reach_high + 0.08 * span
    place = _placer(start, end)
    ticks = [(place(tick), _tick(tick)) for tick in round_ticks(start, end, 5)]
    dots = [_dot(gate, figures, place) for gate, figures in rows]
    axis = Axis(line=place(0.0), zero=place(0.0), ticks=ticks, harm_from=0.0, harm_to=place(0.0))
    caption = f"{_against(gates)} · points, or % for losses · right is better"
    return Panel("What was gained", caption, axis, dots)


def cost_panel(gates: Sequence[Mapping[str, Any]], title: str = "What it cost") -> Panel | None:
    """Protected measures: harm as a multiple of its limit, so one line is every limit."""
    rows = [row for gate in gates if (row := _cost(gate)) is not None]
    if not rows:
        return None
    seen = _finite(rows)
    end = min(COST_AXIS_MOST, max(COST_AXIS_LEAST, max(seen) * 1.08))
    start = max(COST_AXIS_LEFT, min(-0.35, min(seen) * 1.15))
    place = _placer(start, end)
    # Two words need room; where the limit is near, the tick that needs no word gives way.
    roomy = place(1.0) - place(0.0) > 30
    ticks = [(place(0.0), "no change" if roomy else "0"), (place(1.0), "limit")]
    axis = Axis(line=place(1.0), zero=place(0.0), ticks=ticks, harm_from=place(1.0), harm_to=100.0)
    dots = [_dot(gate, figures, place) for gate, figures in rows]
    caption = f"{_against(gates)} · share of what the limit allows · left is better"
    return Panel(title, caption, axis, dots)


def _against(gates: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({text(gate.get("against")) or "parent" for gate in gates})
    return f"against {' and '.join(names[:2])}"


Figures = tuple[float, float, float]  # value, low, high in the units of a panel's axis


def _finite(rows: Sequence[tuple[Mapping[str, Any], Figures]]) -> list[float]:
    return [figure for _, figures in rows for figure in figures if math.isfinite(figure)]


def _gain(gate: Mapping[str, Any]) -> tuple[Mapping[str, Any], Figures] | None:
    sign = 1.0 if text(gate.get("direction")) == "higher" else -1.0
    if is_share(text(gate.get("unit"))):
        scale = 100.0 * sign
    else:
        base = number(gate.get("base"))
        if not base:
            return None
        scale = 100.0 * sign / abs(base)
    figures = _figures(gate, scale)
    return None if figures is None else (gate, figures)


def _cost(gate: Mapping[str, Any]) -> tuple[Mapping[str, Any], Figures] | None:
    limit = number(gate.get("limit"))
    if not limit:
        return None
    sign = -1.0 if text(gate.get("direction")) == "higher" else 1.0
    figures = _figures(gate, sign / abs(limit))
    return None if figures is None else (gate, figures)


def _figures(gate: Mapping[str, Any], scale: float) -> Figures | None:
    value = number(gate.get("difference"))
    if value is None:
        return None
    low, high = number(gate.get("low")), number(gate.get("high"))
    # A bound that does not exist is null in the file: the interval is open on that side.
    ends = sorted(
        (
            (-math.inf if low is None else low) * scale,
            (math.inf if high is None else high) * scale,
        )
    )
    return value * scale, ends[0], ends[1]


def _dot(gate: Mapping[str, Any], figures: Figures, place: Any) -> Dot:
    value, low, high = figures
    positions = [place(figure) for figure in (value, low, high)]
    unit = text(gate.get("unit"))
    limit = signed_limit(gate)
    return Dot(
        name=gate_name(gate),
        meaning=meaning(gate),
        shown=change(gate.get("difference"), unit),
        bounds=interval(gate),
        limit="" if not limit else change(limit, unit, with_unit=False),
        verdict=text(gate.get("verdict")) or "undetermined",
        n=plain(gate.get("n"), 0),
        x=_inside(positions[0]),
        low=_inside(positions[1]),
        high=_inside(positions[2]),
        cut_left=positions[1] < 0,
        cut_right=positions[2] > 100,
        note=text(gate.get("note")),
    )


def _placer(start: float, end: float) -> Any:
    span = end - start

    def place(figure: float) -> float:
        if math.isinf(figure):
            return math.copysign(1e6, figure)
        return round(100 * (figure - start) / span, 2)

    return place


def _inside(position: float) -> float:
    return min(99.0, max(1.0, position))


def _tick(figure: float) -> str:
    return "0" if figure == 0 else f"{figure:+g}".replace("-", "−")
