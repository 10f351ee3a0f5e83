"""Gradient noise scale: how many examples an update can use (arXiv 1812.06162, appendix A).

The gradient of b examples has E|g_b|² = |G|² + S / b: the true gradient's square and the
trace S of an example's covariance over b. Two sizes in one update give both without bias.
With micro-batches i of b_i examples and share p_i of the update's weight, and

    A = mean_i 1 / b_i        C = Σ_i p_i² / b_i        (1 / b and 1 / B for equal parts)
    S   = (mean_i |g_i|² - |g|²) / (A - C)
    |G|² = (A |g|² - C mean_i |g_i|²) / (A - C)

B_simple = S / |G|² is the batch size at which noise and signal are equal. Each update's pair
is noisy and |G|² is often negative, so both are averaged over updates *before* the division:
the mean of ratios is biased. Each interval is Fieller's for a ratio of means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIGNAL, NOISE = "noise.gradient_squared", "noise.variance"  # columns of metrics.jsonl
WINDOW = 100  # newest measurements: the scale grows while a model learns
FEWEST = 5  # measurements before anything is said


@dataclass(frozen=True)
class NoisePair:
    """One update's unbiased estimates: |G|² (may be negative) and S, per example."""

    signal: float
    noise: float


@dataclass(frozen=True)
class NoiseScale:
    """B_simple in examples with its 95 % interval, over `n` measured updates.

    `high` is infinite and `scale` may be too where the gradient is not told from noise.
    """

    scale: float
    low: float
    high: float
    n: int

    def advice(self, batch_size: float) -> str:
        """What it says about an update of `batch_size` examples."""
        high = f"{self.high:.0f}" if math.isfinite(self.high) else "unknown"
        said = f"noise scale {self.scale:.0f} examples (95 %: {self.low:.0f} to {high}, n {self.n})"
        if not math.isfinite(self.scale):
            said = f"noise scale above {self.low:.0f} examples (95 %, n {self.n})"
        if batch_size < self.low / 2:
            return (
                f"{said}: {batch_size:.0f} an update is mostly noise; a larger batch_size needs "
                "nearly proportionally fewer updates"
            )
        if batch_size > 2 * self.high:
            return (
                f"{said}: {batch_size:.0f} an update is more than it can use; a smaller "
                "batch_size takes hardly more updates and less compute"
            )
        if self.low / 2 <= batch_size <= 2 * self.high and self.high <= 8 * max(self.low, 1e-9):
            return f"{said}: {batch_size:.0f} an update is about right"
        return f"{said}: not certain enough to judge {batch_size:.0f} an update; measure longer"


def pair_of(
    whole: float, parts: Sequence[float], sizes: Sequence[float], shares: Sequence[float]
) -> NoisePair:
    """The unbiased pair of one update.

    whole   |g|² of the update; parts: |g_i|² of each micro-batch's own mean gradient
    sizes   examples b_i; shares: p_i of the weight, summing to 1
    Raises ValueError for fewer than two micro-batches.

    >>> pair_of(2.0, [3.0, 5.0], [1, 1], [0.5, 0.5])      # S = (4 - 2) / (1 - 1/2)
    NoisePair(signal=0.0, noise=4.0)
    """
    if len(parts) < 2:
        raise ValueError("a noise scale needs two micro-batches in an update")
    small = sum(parts) / len(parts)
    a = sum(1 / size for size in sizes) / len(sizes)
    c = sum(share**2 / size for share, size in zip(shares, sizes, strict=True))
    return NoisePair((a * whole - c * small) / (a - c), (small - whole) / (a - c))


def noise_scale(pairs: Sequence[NoisePair]) -> NoiseScale | None:
    """Ratio of the means with Fieller's 95 % interval; None for fewer than FEWEST pairs."""
    n = len(pairs)
    if n < FEWEST:
        return None
    from scipy.special import stdtrit  # `stats` takes most of a second to import

    signal, noise = sum(p.signal for p in pairs) / n, sum(p.noise for p in pairs) / n
    centred = [(p.signal - signal, p.noise - noise) for p in pairs]
    per = n * (n - 1)
    v_s = sum(s * s for s, _ in centred) / per
    v_n = sum(z * z for _, z in centred) / per
    cov = sum(s * z for s, z in centred) / per
    t2 = float(stdtrit(n - 1, 0.975)) ** 2
    # r with (noise - r signal)² <= t² var(noise - r signal): a r² - 2 b r + c <= 0
    a, b, c = signal**2 - t2 * v_s, noise * signal - t2 * cov, noise**2 - t2 * v_n
    scale = noise / signal if signal > 0 else math.inf
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0 and signal > 0:
        return NoiseScale(max(0.0, scale), max(0.0, (b - root) / a), max(0.0, (b + root) / a), n)
    # The gradient is not told from 0: only a lower bound, where there is one.
    low = (b - root) / a if a < 0 < c else 0.0
    return NoiseScale(scale, max(0.0, low), math.inf, n)


def pairs_of(rows: Iterable[Mapping[str, Any]]) -> list[NoisePair]:
    """The newest measured pairs in lines of metrics.jsonl."""
    found = [
        NoisePair(float(row[SIGNAL]), float(row[NOISE]))
        for row in rows
        if row.get(SIGNAL) is not None and row.get(NOISE) is not None
    ]
    return found[-WINDOW:]
