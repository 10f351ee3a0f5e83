"""Small pictures made of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = " ▁▂▃▄▅▆▇█"


def schedule_picture(curve: Sequence[float], width: int = 60, height: int = 4) -> str:
    """A curve of non-negative numbers as `height` lines of bars, the peak named.

    >>> print(schedule_picture([0.5, 1.0, 0.5], width=3, height=1))
      ▄█▄  peak 1
    """
    if not curve:
        return "  (no updates)"
    count = min(width, len(curve))
    columns = [curve[round(i * (len(curve) - 1) / max(1, count - 1))] for i in range(count)]
    peak = max(columns) or 1.0
    lines = []
    for row in range(height, 0, -1):
        cells = []
        for value in columns:
            filled = value / peak * height - (row - 1)
            cells.append(BARS[max(0, min(8, int(filled * 8)))])
        lines.append("  " + "".join(cells).rstrip())
    lines[0] += f"  peak {max(curve):g}"
    return "\n".join(lines)


def range_picture(
    rates: Sequence[float],
    changes: Sequence[float],
    recommended: float | None = None,
    width: int = 66,
    height: int = 12,
) -> str:
    """A curve over the logarithm of the rate, in at most 80 columns; the mark below is the rate.

    >>> print(range_picture([0.01, 0.1, 1.0, 10.0], [0.0, -1.0, -2.0, 1.0], 0.1, 7, 4))
            +1 |      *
             0 |*
            -1 |  *
            -2 |    *
               +-------
                  ^
          learning rate 0.01 to 10, ^ 0.1
    """
    if len(rates) < 2:
        return "  (too few points)"
    top, bottom = max(*changes, 0.0), min(*changes, 0.0)
    span = (top - bottom) or 1.0
    reach = math.log(rates[-1] / rates[0])

    def column(rate: float) -> int:
        place = round(math.log(rate / rates[0]) / reach * (width - 1))
        return max(0, min(width - 1, place))

    cells = [[" "] * width for _ in range(height)]
    for rate, change in zip(rates, changes, strict=True):
        cells[round((top - change) / span * (height - 1))][column(rate)] = "*"
    lines = []
    for row, line in enumerate(cells):
        value = top - row / max(1, height - 1) * span
        label = f"{value:+.3g}" if abs(value) > 1e-9 * span else "0"
        lines.append(f"{label:>10} |" + "".join(line).rstrip())
    lines.append(" " * 11 + "+" + "-" * width)
    caption = f"learning rate {rates[0]:.2g} to {rates[-1]:.2g}"
    if recommended is not None:
        lines.append(" " * 12 + " " * column(recommended) + "^")
        caption += f", ^ {recommended:.2g}"
    return "\n".join([*lines, f"      {caption}"])
