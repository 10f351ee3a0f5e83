"""What the items at hand can show: the power of a gate, before anything is trained.

A protect gate passes when the whole interval of a paired difference lies inside its limit.
What n items *resolve* is the smallest limit that a stage which changes nothing keeps with
95 % probability (the arithmetic stands in `lehr.evaluation.power`); turned round, about

    n = ((z_97.5 + z_95) * s / limit)^2

items are needed, where s is the standard deviation of one item's paired difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from lehr.evaluation.power import resolves, resolves_share

LEVEL, POWER = 0.95, 0.95
SHARES = frozenset({"share", "rate", "fraction"})
DISCORDANCE = 0.05  # share of items that change side between two models, where none is known


@dataclass(frozen=True)
class GatePower:
    """Whether a gate can pass with the items at hand. `limit` None: an improve gate."""

    name: str
    limit: float | None
    resolves: float
    n: int
    can_pass: bool
    n_needed: int | None
    note: str

    def as_json(self) -> dict[str, Any]:
        """One entry of `gates` in plan.json."""
        return {
            "name": self.name,
            "limit": self.limit,
            "resolves": self.resolves if math.isfinite(self.resolves) else None,
            "n": self.n,
            "n_needed": self.n_needed,
            "can_pass": self.can_pass,
            "note": self.note,
        }


def share_deviation(discordance: float = DISCORDANCE) -> float:
    """Standard deviation of a paired difference of passes and failures (-1, 0 or 1).

    `discordance` is the share of items on which the two models differ; with no true
    difference the variance is exactly that share.
    """
    if not 0 <= discordance <= 1:
        raise ValueError(f"a discordance is a share between 0 and 1, not {discordance}")
    return math.sqrt(discordance)


def resolved(n: int, deviation: float, unit: str = "share") -> float:
    """What `n` items resolve, in the unit of the measure; infinite below two items.

    deviation  standard deviation of one item's paired difference; of shares `share_deviation`

    >>> 0.04 < resolved(250, share_deviation(0.05)) < 0.07
    True
    """
    if deviation < 0 or not math.isfinite(deviation):
        raise ValueError(f"a standard deviation is a finite number >= 0, not {deviation}")
    if n < 2:
        return math.inf
    if unit in SHARES:
        return float(resolves_share(n, min(1.0, deviation**2), POWER, LEVEL))
    return float(resolves(n, deviation, POWER, LEVEL))


def items_needed(limit: float, deviation: float) -> int | None:
    """About how many items resolve `limit`; None where no number does (limit 0).

    >>> items_needed(0.04, share_deviation(0.05))
    407
    """
    if limit <= 0 or not math.isfinite(limit):
        return None
    normal = NormalDist()
    reach = normal.inv_cdf(0.5 + LEVEL / 2) + normal.inv_cdf(POWER)
    return max(2, math.ceil((reach * deviation / limit) ** 2 - 1e-9))


def default_limit(figure: float, n: int, deviation: float, unit: str = "share") -> float:
    """The limit of a default gate: its figure, or what the items resolve where that is larger."""
    return max(figure, resolved(n, deviation, unit))


def gate_power(
    name: str,
    limit: float | None,
    n: int,
    deviation: float,
    unit: str = "share",
    budget: int | None = None,
) -> GatePower:
    """The power of one gate.

    limit      in the measure's unit, of either sign; None for an improve gate, which can
               always pass: `resolves` is then the gain that it sees
    n          items at hand; `budget` the most of them that are taken
    deviation  standard deviation of one item's paired difference
    """
    most = n if budget is None else min(n, budget)
    if most < 1:
        return GatePower(name, limit, math.inf, 0, False, None, "there are no items")
    figure = resolved(most, deviation, unit)
    shown = _shown(figure, unit)
    if limit is None:
        note = f"{most} items see a gain of {shown} with {POWER:.0%} power"
        return GatePower(name, None, figure, most, True, None, note)
    size = abs(limit)
    # A limit at its own default was rounded on its way through files: no false alarm from that.
    can_pass = figure <= size * (1 + 1e-9)
    needed = items_needed(size, deviation)
    note = f"{most} items resolve {shown}; the limit is {_shown(size, unit)}"
    if not can_pass and needed is not None:
        note += f"; about {max(needed, most + 1)} items would be enough"
    return GatePower(name, limit, figure, most, can_pass, needed, note)


def _shown(figure: float, unit: str) -> str:
    if not math.isfinite(figure):
        return "nothing"
    if unit in SHARES:
        return f"{figure * 100:.1f} points"
    return f"{figure:.3g} {unit.replace('_', ' ')}"
