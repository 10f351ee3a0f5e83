"""Intervals, paired differences and power: the only place where lehr does inference.

Binary scores use score intervals (Wilson for one rate, Tango for a paired difference),
which stay honest at 0 of n, with an effective n where items come in clusters; everything
else is a ratio of sums, resampled by cluster.
All functions are pure; random numbers come from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

FloatArray = NDArray[np.float64]

RESAMPLES = 2000
MOST_RESAMPLES = 20_000
# Scores are only promised to 1e-4 across batch sizes and packings: no interval of a
# continuous measure claims to be narrower than that.
SCORE_RESOLUTION = 1e-4
# Correlation of the items of one cluster that is assumed until the data speak, and the
# number of clusters with something to say after which the data weigh as much as that.
PRIOR_CORRELATION = 0.25
PRIOR_CLUSTERS = 4.0


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided interval.

    n          items (clusters, where a mean was resampled by cluster)
    effective  independent items that they are worth, for yes/no scores
    """

    value: float
    low: float
    high: float
    n: int
    level: float = 0.95
    method: str = ""
    effective: float | None = None


def wilson(successes: float, n: float, level: float = 0.95) -> Interval:
    """Wilson's score interval for one rate (Wilson 1927); an effective n may be fractional.

    >>> result = wilson(0, 100)
    >>> result.low, round(result.high, 3)
    (0.0, 0.037)
    """
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n > 0, not {successes} of {n}")
    z = _normal_quantile(level)
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(rate, low, high, max(1, round(n)), level, "wilson")


def tango(
    gained: ArrayLike, lost: ArrayLike, items: ArrayLike, level: float
) -> tuple[FloatArray, FloatArray]:
    """Score interval for a paired difference of rates (Tango 1998, Stat. Med. 17:891).

    gained: items wrong before and right after; lost: the reverse; of `items`; all broadcast
    to [...]. Returns low and high of (gained - lost) / items. With no discordant pair at all
    the bounds are -/+ z^2 / (n + z^2): nothing seen in n items is not the same as nothing there.
    """
    b, c, n = (np.asarray(x, dtype=np.float64) for x in np.broadcast_arrays(gained, lost, items))
    z = _normal_quantile(level)

    def statistic(delta: FloatArray) -> FloatArray:
        # q: maximum likelihood of P(lost) given the difference delta (Tango's eq. 4).
        linear = (2 * n - b + c) * delta - (b + c)
        constant = -c * delta * (1 - delta)
        root = np.sqrt(np.maximum(linear * linear - 8 * n * constant, 0.0))
        q = (root - linear) / (4 * n)
        variance = n * (2 * q + delta * (1 - delta))
        score = b - c - n * delta
        scaled: FloatArray = score / np.sqrt(np.maximum(variance, 1e-300))
        return np.where(score == 0, 0.0, scaled)

    estimate = (b - c) / n
    high = _bisect(lambda delta: statistic(delta) > -z, estimate, np.ones_like(estimate))
    low = -_bisect(lambda delta: statistic(-delta) < z, -estimate, np.ones_like(estimate))
    return low, high


@lru_cache(maxsize=4096)
def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value that gains and losses are equally likely (McNemar 1947).

    >>> mcnemar(0, 0), round(mcnemar(6, 0), 5)
    (1.0, 0.03125)
    """
    if gained + lost == 0:
        return 1.0
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue)


def single_interval(
    values: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    clusters: Sequence[object] | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Sum of values / sum of weights, with its interval.

    values, weights [n]; clusters [n] name the unit of resampling (default: each item).
    """
    value, weight = _pairs(values, weights)
    if _is_binary(value, weight):
        n = value.size
        share = effective_items(value - value.mean(), clusters) / n
        found = wilson(float(value.sum()) * share, n * share, level)
        return Interval(found.value, found.low, found.high, n, level, found.method)
    floor = SCORE_RESOLUTION
    if _is_bounded(value, weight):
        floor = _open_share(effective_items(value - value.mean(), clusters), level)
    value, weight = _by_cluster(value, weight, clusters)
    return _ratio_interval(value, weight, level, seed, floor)


def paired_difference(
    before: ArrayLike,
    after: ArrayLike,
    before_weights: ArrayLike | None = None,
    after_weights: ArrayLike | None = None,
    *,
    clusters: Sequence[object] | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """(sum after / its weight) - (sum before / its weight) on the same items, with interval.

    All arrays [n], item i of one beside item i of the other. Scores that are 0 or 1 with
    weight 1 use Tango's interval; others an expanded percentile bootstrap over clusters.
    Raises ValueError for unequal lengths, no items, non-finite numbers or no weight.
    """
    value_0, weight_0 = _pairs(before, before_weights)
    value_1, weight_1 = _pairs(after, after_weights)
    if value_0.size != value_1.size:
        raise ValueError(f"paired scores need the same items: {value_0.size} and {value_1.size}")
    if _is_binary(value_0, weight_0) and _is_binary(value_1, weight_1):
        n = value_0.size
        gained = int(((value_0 == 0) & (value_1 == 1)).sum())
        lost = int(((value_0 == 1) & (value_1 == 0)).sum())
        change = value_1 - value_0
        share = effective_items(change - change.mean(), clusters) / n
        low, high = tango(gained * share, lost * share, n * share, level)
        return Interval((gained - lost) / n, float(low), float(high), n, level, "tango", n * share)
    floor = SCORE_RESOLUTION
    if _is_bounded(value_0, weight_0) and _is_bounded(value_1, weight_1):
        change = value_1 - value_0
        floor = _open_share(effective_items(change - change.mean(), clusters), level)
    value_0, weight_0 = _by_cluster(value_0, weight_0, clusters)
    value_1, weight_1 = _by_cluster(value_1, weight_1, clusters)
    if np.array_equal(weight_0, weight_1):
        return _ratio_interval(value_1 - value_0, weight_0, level, seed, floor)
    return _ratio_interval(value_1, weight_1, level, seed, floor, value_0, weight_0)


def effective_items(residuals: ArrayLike, clusters: Sequence[object] | None) -> float:
    """Independent items that n clustered ones are worth: n / (1 + (m - 1) * correlation).

    residuals [n]: scores minus their mean. m is the size of the cluster of a typical item
    (Kish 1965). The correlation within clusters is estimated, drawn towards a prior of
    0.25 as long as few clusters vary: with no variation at all nothing can be estimated,
    and neither independence nor perfect correlation would be honest.
    """
    residual = np.asarray(residuals, dtype=np.float64)
    index = _cluster_index(residual.size, clusters)
    if index is None:
        return float(residual.size)
    sizes = np.bincount(index).astype(np.float64)
    typical_size = float((sizes**2).sum() / sizes.sum())
    if typical_size <= 1.0:
        return float(residual.size)
    squares = np.bincount(index, weights=residual**2)
    total = float(squares.sum())
    correlation, varying = PRIOR_CORRELATION, 0.0
    if total > 0:
        effect = float((np.bincount(index, weights=residual) ** 2).sum()) / total
        correlation = min(1.0, max(0.0, (effect - 1) / (typical_size - 1)))
        varying = total**2 / float((squares**2).sum())
    weight = varying / (varying + PRIOR_CLUSTERS)
    correlation = weight * correlation + (1 - weight) * PRIOR_CORRELATION
    return residual.size / (1 + (typical_size - 1) * correlation)


def _ratio_interval(
    value: FloatArray,
    weight: FloatArray,
    level: float,
    seed: int,
    smallest_half_width: float,
    minus_value: FloatArray | None = None,
    minus_weight: FloatArray | None = None,
) -> Interval:
    """Expanded percentile bootstrap of a ratio of sums, or of the difference of two."""
    n = value.size
    columns = [value, weight]
    if minus_value is not None and minus_weight is not None:
        columns += [minus_value, minus_weight]
    estimate = float(_ratio(np.stack([column.sum() for column in columns], axis=-1)))
    if n < 2:
        return Interval(estimate, -math.inf, math.inf, n, level, "one unit: no interval")
    totals = np.stack([column.sum() for column in columns], axis=-1)
    student = stats.t.ppf((1 + level) / 2, n - 1)
    # Hesterberg 2015 (arXiv 1411.5279): widen the tail probability so that the percentile
    # interval of a mean has the width of Student's t, which plain percentiles lack at small n.
    tail = float(stats.norm.cdf(-math.sqrt(n / (n - 1)) * student))
    if tail < 25 / MOST_RESAMPLES:
        # Too few units, or too far out, for quantiles of a bootstrap: linearise instead.
        half_width = student * _standard_error(np.stack(columns, axis=-1), totals)
        low, high, method = estimate - half_width, estimate + half_width, "student"
    else:
        resamples = max(RESAMPLES, math.ceil(25 / tail))
        draws = _ratio(_bootstrap_sums(np.stack(columns, axis=-1), resamples, seed))
        low, high = np.quantile(draws[np.isfinite(draws)], [tail, 1 - tail])
        method = "bootstrap"
    low = min(float(low), estimate - smallest_half_width)
    high = max(float(high), estimate + smallest_half_width)
    return Interval(estimate, low, high, n, level, method)


def _standard_error(columns: FloatArray, totals: FloatArray) -> float:
    """Of a ratio of sums, or of the difference of two, by the delta method."""
    n = columns.shape[0]
    residual = np.zeros(n)
    for sign, k in ((1.0, 0), (-1.0, 2))[: columns.shape[1] // 2]:
        ratio = totals[k] / totals[k + 1]
        residual += sign * (columns[:, k] - ratio * columns[:, k + 1]) / totals[k + 1]
    return float(np.sqrt(n / (n - 1) * (residual**2).sum()))


def _bootstrap_sums(columns: FloatArray, resamples: int, seed: int) -> FloatArray:
    """Sums [resamples, k] of columns [n, k] over units drawn with replacement."""
    n = columns.shape[0]
    rng = np.random.default_rng(seed)
    sums = np.empty((resamples, columns.shape[1]))
    step = max(1, 4_000_000 // n)
    for start in range(0, resamples, step):
        stop = min(resamples, start + step)
        picks = rng.integers(0, n, size=(stop - start, n))
        for column in range(columns.shape[1]):
            sums[start:stop, column] = columns[:, column][picks].sum(axis=1)
    return sums


def _ratio(sums: FloatArray) -> FloatArray:
    """sums [..., 2] -> ratio; [..., 4] -> difference of two ratios."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: FloatArray = sums[..., 0] / sums[..., 1]
        if sums.shape[-1] == 4:
            ratio = ratio - sums[..., 2] / sums[..., 3]
    return ratio


def _open_share(n: float, level: float) -> float:
    """Share of items that `n` of them, all without a change, still leave open."""
    z_square = _normal_quantile(level) ** 2
    return z_square / (n + z_square)


def _bisect(inside: object, start: FloatArray, end: FloatArray) -> FloatArray:
    """Largest point of [start, end] for which `inside` (true at start) still holds."""
    low, high = start.astype(np.float64), end.astype(np.float64)
    for _ in range(52):
        middle = (low + high) / 2
        holds = inside(middle)  # type: ignore[operator]
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return np.asarray((low + high) / 2)


def _pairs(values: ArrayLike, weights: ArrayLike | None) -> tuple[FloatArray, FloatArray]:
    value = np.asarray(values, dtype=np.float64)
    weight = np.ones_like(value) if weights is None else np.asarray(weights, dtype=np.float64)
    if value.ndim != 1 or value.shape != weight.shape:
        raise ValueError(f"values {value.shape} and weights {weight.shape} must be equal vectors")
    if value.size == 0:
        raise ValueError("no items: a score needs at least one")
    if not (np.isfinite(value).all() and np.isfinite(weight).all()):
        raise ValueError("scores and weights must be finite")
    if (weight < 0).any() or weight.sum() <= 0:
        raise ValueError("weights must not be negative, and some must be positive")
    return value, weight


def _by_cluster(
    value: FloatArray, weight: FloatArray, clusters: Sequence[object] | None
) -> tuple[FloatArray, FloatArray]:
    index = _cluster_index(value.size, clusters)
    if index is None:
        return value, weight
    sums = (np.bincount(index, weights=column) for column in (value, weight))
    clustered_value, clustered_weight = (np.asarray(one, dtype=np.float64) for one in sums)
    return clustered_value, clustered_weight


def _cluster_index(n: int, clusters: Sequence[object] | None) -> NDArray[np.int64] | None:
    """Number of each item's cluster, in order of appearance; None where items stand alone."""
    if clusters is None:
        return None
    if len(clusters) != n:
        raise ValueError(f"{len(clusters)} cluster names for {n} items")
    index_of: dict[object, int] = {}
    index = np.array([index_of.setdefault(name, len(index_of)) for name in clusters])
    return None if len(index_of) == n else index


def _is_binary(value: FloatArray, weight: FloatArray) -> bool:
    return bool((weight == 1).all() and np.isin(value, (0.0, 1.0)).all())


def _is_bounded(value: FloatArray, weight: FloatArray) -> bool:
    """Values within [-1, 1] per item: averages or differences of yes/no scores."""
    return bool((weight == 1).all() and (np.abs(value) <= 1).all())


@lru_cache(maxsize=256)
def _normal_quantile(level: float) -> float:
    if not 0.0 < level < 1.0:
        raise ValueError(f"an interval's level is in (0, 1), not {level}")
    return float(stats.norm.ppf((1 + level) / 2))
