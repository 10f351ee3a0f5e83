"""How many items decide, and what the items at hand can tell."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import stats

from lehr.evaluation.statistics import tango


def resolves(n: int, spread: float, power: float = 0.95, level: float = 0.95) -> float:
    """Smallest limit that a stage which changes nothing passes with probability `power`.

    spread: standard deviation of one item's paired difference (per unit of mean weight),
    in the measure's unit. The upper bound of the interval must lie below the limit.

    >>> round(resolves(100, 0.2), 4)
    0.0726
    """
    _check(n, power, level)
    if n < 2:
        return math.inf
    quantile = stats.t.ppf((1 + level) / 2, n - 1) + stats.norm.ppf(power)
    return float(quantile * spread / math.sqrt(n))


@lru_cache(maxsize=512)
def resolves_share(n: float, discordance: float, power: float = 0.95, level: float = 0.95) -> float:
    """The same for yes/no items, exactly: `discordance` is the share that changes side.

    Enumerates all (gained, lost) counts of a stage that moves items both ways alike, and
    returns the `power` quantile of Tango's upper bound. A fractional n (an effective number
    of clustered items) is rounded down.

    >>> round(resolves_share(200, 0.0), 4)      # nothing moves: z^2 / (n + z^2)
    0.0188
    """
    n = math.floor(n)
    _check(n, power, level)
    if not 0.0 <= discordance <= 1.0:
        raise ValueError(f"discordance is a share of the items, not {discordance}")
    largest = int(stats.binom.ppf(1 - 1e-6, n, discordance)) if discordance > 0 else 0
    changed, lost = np.meshgrid(np.arange(largest + 1), np.arange(largest + 1), indexing="ij")
    possible = lost <= changed
    changed, lost = changed[possible], lost[possible]
    probability = stats.binom.pmf(changed, n, discordance) * stats.binom.pmf(lost, changed, 0.5)
    _, high = tango(changed - lost, lost, n, level)
    order = np.argsort(high, kind="stable")
    reached = np.cumsum(probability[order]) >= power * probability.sum() - 1e-12
    return float(high[order][int(np.argmax(reached))])


def items_to_decide(
    low: float,
    high: float,
    n: int,
    limit: float,
    *,
    estimate: float | None = None,
    level: float = 0.95,
    power: float = 0.8,
) -> int | None:
    """Items with which the interval [low, high] of `n` items would leave `limit` outside.

    If the true difference is what was estimated, that many items decide with probability
    `power`. An interval's width falls with the root of n. Returns `n` where the interval
    decides already, None where no number would (the estimate is the limit, or no interval).
    """
    if n < 1:
        raise ValueError(f"an interval of {n} items cannot be scaled")
    if high <= limit or low >= limit:
        return n
    centre = (low + high) / 2 if estimate is None else estimate
    gap = abs(centre - limit)
    if gap == 0.0 or not math.isfinite(low) or not math.isfinite(high):
        return None
    half_width = high - centre if centre < limit else centre - low
    z = stats.norm.ppf((1 + level) / 2)
    needed = n * (half_width / gap * (z + stats.norm.ppf(power)) / z) ** 2
    return max(n + 1, math.ceil(needed)) if needed < 1e9 else None


def items_to_decide_share(
    gained: float,
    lost: float,
    n: float,
    limit: float,
    *,
    level: float = 0.95,
    power: float = 0.8,
) -> int | None:
    """The same for yes/no items, through Tango's interval at the rates that were seen.

    With few changes its width falls faster than the root law says.

    >>> items_to_decide_share(0, 0, 20, 0.04)
    189
    """
    z = stats.norm.ppf((1 + level) / 2) + stats.norm.ppf(power)
    wide_level = float(2 * stats.norm.cdf(z) - 1)
    # Every half-doubling from n on, then the exact number between the last two.
    growth = 2.0 ** np.arange(0.0, 18.5, 0.5)
    low, high = tango(gained * growth, lost * growth, n * growth, wide_level)
    decided = (high < limit) | (low > limit)
    if not decided.any():
        return None
    step = int(np.argmax(decided))
    if step == 0:
        return math.ceil(n)
    sizes = np.unique(np.linspace(growth[step - 1] * n, growth[step] * n, 400).round())
    low, high = tango(gained * sizes / n, lost * sizes / n, sizes, wide_level)
    decided = (high < limit) | (low > limit)
    return int(sizes[int(np.argmax(decided))]) if decided.any() else int(sizes[-1])


def _check(n: int, power: float, level: float) -> None:
    if n < 1:
        raise ValueError(f"power needs at least one item, not {n}")
    for name, value in (("power", power), ("level", level)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name} is a probability in (0, 1), not {value}")
