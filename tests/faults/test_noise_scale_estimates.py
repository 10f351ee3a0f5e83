"""Known faults of the gradient noise scale (McCandlish et al. 1812.06162, appendix A).

Truth: gradients of known mean G and covariance, B_simple = trace / |G|² = 110.
"""

from __future__ import annotations

import numpy as np
import pytest

from lehr.training.noise_scale import NoisePair, noise_scale, pair_of

DIMENSIONS, PARTS, SIZE, TRUTH = 40, 4, 60, 110.0


def _draws(updates: int, seed: int = 0) -> list[tuple[float, list[float]]]:
    """(|g|², |g_i|² of the parts) of updates of PARTS x SIZE examples."""
    rng = np.random.default_rng(seed)
    mean = np.full(DIMENSIONS, 1 / np.sqrt(DIMENSIONS))  # |G|² = 1
    spread = np.sqrt(TRUTH / DIMENSIONS / SIZE)
    parts = mean + spread * rng.standard_normal((updates, PARTS, DIMENSIONS))
    whole = (parts.mean(1) ** 2).sum(-1)
    return [
        (float(w), [float(x) for x in p]) for w, p in zip(whole, (parts**2).sum(-1), strict=True)
    ]


def _pairs(updates: int) -> list[NoisePair]:
    sizes, shares = [SIZE] * PARTS, [1 / PARTS] * PARTS
    return [pair_of(whole, parts, sizes, shares) for whole, parts in _draws(updates)]


def test_unbiased_pairs_averaged_before_the_division_find_the_truth() -> None:
    found = noise_scale(_pairs(3000))
    assert found is not None and found.low < TRUTH < found.high
    assert found.scale == pytest.approx(TRUTH, rel=0.05)


def test_the_mean_of_ratios_is_the_fault_that_this_guards_against() -> None:
    """Dividing each update by itself is biased; the estimate must not equal it.

    The mean of 1 / x exceeds 1 / mean by about its variance, here 0.06 of the square: +6 %
    at least, which no number of updates averages away.
    """
    pairs = _pairs(3000)
    ratios = float(np.mean([one.noise / one.signal for one in pairs]))
    found = noise_scale(pairs)
    assert found is not None
    assert ratios > TRUTH * 1.06, "the fault shows on these draws"
    assert found.scale < TRUTH * 1.03


def test_the_signal_is_not_the_biased_square() -> None:
    """|g|² of an update is |G|² + S / B: taken for |G|² it makes every scale too small."""
    draws = _draws(3000)
    biased = float(np.mean([whole for whole, _ in draws]))
    signal = float(np.mean([one.signal for one in _pairs(3000)]))
    assert biased == pytest.approx(1 + TRUTH / (PARTS * SIZE), rel=0.05)
    assert signal == pytest.approx(1.0, rel=0.05)


def test_the_size_of_a_part_is_its_examples_not_its_packs() -> None:
    """Counting each micro-batch as one example makes the noise SIZE times too small."""
    whole, parts = _draws(1)[0]
    right = pair_of(whole, parts, [SIZE] * PARTS, [1 / PARTS] * PARTS)
    packs = pair_of(whole, parts, [1] * PARTS, [1 / PARTS] * PARTS)
    assert right.noise == pytest.approx(SIZE * packs.noise)
    assert right.signal == pytest.approx(packs.signal)
