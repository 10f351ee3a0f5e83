"""Small pictures made of characters."""

from __future__ import annotations

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
