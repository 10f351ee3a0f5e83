"""Closed forms, coverage by simulation, and the cases where intervals usually lie."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lehr.evaluation.power import items_to_decide, resolves, resolves_share
from lehr.evaluation.statistics import (
    effective_items,
    mcnemar,
    paired_difference,
    single_interval,
    tango,
    wilson,
)


def test_wilson_known_values() -> None:
    # Rule of three's honest relative: 0 of 100 leaves 3.7 %, 0 of 400 leaves 1.0 %.
    assert wilson(0, 100).high == pytest.approx(0.0370, abs=1e-4)
    assert wilson(0, 400).high == pytest.approx(0.0095, abs=1e-4)
    middle = wilson(5, 100)
    assert (middle.low, middle.high) == pytest.approx((0.0215, 0.1118), abs=1e-4)
    assert wilson(100, 100).high == 1.0


def test_tango_is_the_root_of_its_score() -> None:
    # b = 12 gained, c = 4 lost of 200: the published statistic equals z at both bounds.
    n, b, c, z = 200, 12, 4, 1.959963985
    low, high = (float(x) for x in tango(b, c, n, 0.95))
    for delta, sign in ((low, 1), (high, -1)):
        linear = (2 * n - b + c) * delta - (b + c)
        q = (math.sqrt(linear**2 + 8 * n * c * delta * (1 - delta)) - linear) / (4 * n)
        score = (b - c - n * delta) / math.sqrt(n * (2 * q + delta * (1 - delta)))
        assert score == pytest.approx(sign * z, abs=1e-5)
    assert low < 0.04 < high


def test_tango_without_discordant_pairs_is_not_a_point() -> None:
    z_square = 1.959963985**2
    low, high = tango(0, 0, 200, 0.95)
    assert float(high) == pytest.approx(z_square / (200 + z_square), abs=1e-9)
    assert float(low) == pytest.approx(-float(high), abs=1e-9)
    assert float(tango(200, 0, 200, 0.95)[1]) == pytest.approx(1.0)


def test_tango_is_antisymmetric() -> None:
    low, high = tango(9, 3, 120, 0.9)
    other_low, other_high = tango(3, 9, 120, 0.9)
    assert (float(low), float(high)) == pytest.approx((-float(other_high), -float(other_low)))


@pytest.mark.parametrize(
    ("discordance", "shift", "n"), [(0.05, 0.0, 100), (0.05, 0.03, 200), (0.2, 0.05, 50)]
)
def test_tango_covers(discordance: float, shift: float, n: int) -> None:
    rng = np.random.default_rng(0)
    gain, loss = (discordance + shift) / 2, (discordance - shift) / 2
    counts = rng.multinomial(n, [gain, loss, 1 - gain - loss], size=4000)
    low, high = tango(counts[:, 0], counts[:, 1], n, 0.95)
    assert np.mean((low <= shift) & (shift <= high)) >= 0.935


def test_bootstrap_of_a_ratio_covers_at_small_n() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for repeat in range(300):
        weight = rng.integers(5, 60, 30).astype(float)
        before = rng.gamma(2.0, 1.0, 30) * weight
        after = before + (0.1 + rng.normal(0.0, 0.5, 30) * rng.gamma(2.0, 0.5, 30)) * weight
        found = paired_difference(before, after, weight, weight, seed=repeat)
        hits += found.low <= 0.1 <= found.high
    assert 0.915 <= hits / 300 <= 0.99


def test_paired_difference_is_a_difference_of_ratios() -> None:
    found = paired_difference([2.0, 9.0], [4.0, 9.0], [1.0, 3.0], [1.0, 3.0])
    assert found.value == pytest.approx(0.5)
    uneven = paired_difference([2.0, 9.0], [4.0, 9.0], [1.0, 3.0], [2.0, 3.0])
    assert uneven.value == pytest.approx(13 / 5 - 11 / 4)


def test_pairing_uses_the_pairs() -> None:
    rng = np.random.default_rng(2)
    before = rng.normal(5.0, 2.0, 200)
    after = before + 0.1 + rng.normal(0.0, 0.1, 200)
    paired = paired_difference(before, after)
    assert paired.low > 0 and paired.high - paired.low < 0.05
    assert paired == paired_difference(before, after), "seeded"


@pytest.mark.parametrize("binary", [True, False])
def test_identical_scores_leave_width(binary: bool) -> None:
    values = [0.0, 1.0] * 50 if binary else list(np.linspace(2.0, 3.0, 100))
    found = paired_difference(values, values)
    assert found.value == 0.0
    assert found.high >= (0.03 if binary else 1e-4) and found.low <= -1e-4
    shares = [0.25, 0.5] * 50
    averaged = paired_difference(shares, shares)
    assert averaged.high == pytest.approx(1.96**2 / (100 + 1.96**2), abs=1e-3)


def test_one_item_has_no_interval() -> None:
    found = paired_difference([1.5], [2.5])
    assert found.low == -math.inf and found.high == math.inf


def test_clusters_widen_and_never_narrow_below_independence() -> None:
    rng = np.random.default_rng(3)
    clusters = [str(i // 8) for i in range(160)]
    flipped = np.repeat(rng.random(20) < 0.3, 8).astype(float)
    zeros = np.zeros(160)
    alone = paired_difference(zeros, flipped)
    together = paired_difference(zeros, flipped, clusters=clusters)
    assert together.high - together.low > 1.8 * (alone.high - alone.low)
    # Cluster names that are all different change nothing.
    names = [str(i) for i in range(160)]
    assert paired_difference(zeros, flipped, clusters=names) == alone
    # Whole clusters that move together are worth about one item each.
    assert effective_items(flipped - flipped.mean(), clusters) < 40
    assert effective_items(zeros, clusters) == pytest.approx(160 / (1 + 7 * 0.25))


def test_clustered_tango_covers() -> None:
    rng = np.random.default_rng(4)
    clusters = [i // 5 for i in range(200)]
    hits = 0
    for _ in range(400):
        # P(flip) varies by cluster: gains and losses alike, correlated within a cluster.
        lean = np.repeat(rng.choice([-0.3, 0.0, 0.0, 0.0, 0.3], 40), 5)
        move = rng.random(200) < np.abs(lean) + 0.02
        side = np.where(lean == 0, rng.random(200) < 0.5, lean > 0)
        before = np.where(side, 0.0, 1.0)
        after = np.where(move, 1.0 - before, before)
        found = paired_difference(before, after, clusters=clusters)
        hits += found.low <= 0.0 <= found.high
    assert hits / 400 >= 0.93


def test_mcnemar_is_exact() -> None:
    assert mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 512)


def test_bad_scores_are_refused() -> None:
    for values, weights in (([], None), ([math.nan], None), ([1.0], [-1.0]), ([1.0], [0.0])):
        with pytest.raises(ValueError):
            single_interval(values, weights)
    with pytest.raises(ValueError, match="same items"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="cluster"):
        single_interval([1.0, 0.0], clusters=["a"])
    with pytest.raises(ValueError, match="level"):
        wilson(1, 2, level=1.0)


def test_resolves_is_what_a_null_stage_passes() -> None:
    rng = np.random.default_rng(5)
    n, discordance = 150, 0.06
    limit = resolves_share(n, discordance)
    p = discordance / 2
    counts = rng.multinomial(n, [p, p, 1 - 2 * p], size=6000)
    _, high = tango(counts[:, 0], counts[:, 1], n, 0.95)
    passed = float(np.mean(high <= limit))
    assert 0.94 <= passed <= 0.995
    assert float(np.mean(high <= limit - 0.012)) < 0.95, "a clearly smaller limit is not passed"


def test_resolves_of_means() -> None:
    rng = np.random.default_rng(6)
    limit = resolves(60, 0.2)
    passed = 0
    for repeat in range(300):
        change = rng.normal(0.0, 0.2, 60)
        passed += paired_difference(np.zeros(60), change * 3, seed=repeat).high <= 3 * limit
    assert 0.92 <= passed / 300 <= 0.985


def test_items_to_decide_follows_the_root_law() -> None:
    assert items_to_decide(0.05, 0.09, 100, 0.04) == 100, "decided already"
    needed = items_to_decide(-0.02, 0.06, 100, 0.04)
    assert needed is not None
    # At that n the expected half width is (z / (z + z_0.8)) of the distance 0.02.
    half = 0.04 * math.sqrt(100 / needed)
    assert half == pytest.approx(0.02 * 1.96 / (1.96 + 0.8416), rel=0.01)
    assert items_to_decide(-0.02, 0.10, 100, 0.04) is None, "the estimate is the limit"
    assert items_to_decide(-math.inf, math.inf, 1, 0.04, estimate=0.0) is None
