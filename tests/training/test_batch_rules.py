"""The rules for another batch size, and where they hold: the noisy quadratic (1907.04164)."""

import pytest
import torch

from lehr.training.batch_rules import scaled_rate
from lehr.training.schedules import Schedule


def test_values_of_both_rules():
    assert scaled_rate(0.1, 256, 8192, "sgd")[0] == pytest.approx(3.2)
    assert scaled_rate(1e-3, 16, 64, "adamw")[0] == pytest.approx(2e-3)
    assert scaled_rate(1e-3, 16, 64, "adamw", "linear")[0] == pytest.approx(4e-3)
    assert scaled_rate(1e-3, 16, 4, "sgd", "sqrt")[0] == pytest.approx(5e-4)
    assert scaled_rate(1e-3, 16, 16, "muon")[0] == 1e-3
    assert "as the recipe says" in scaled_rate(1e-3, 16, 64, "adamw", "linear")[1]
    with pytest.raises(ValueError, match="auto, linear or sqrt"):
        scaled_rate(1e-3, 16, 64, "adamw", "cubic")


RATES = torch.logspace(-3, 0.28, 80, dtype=torch.float64)


def updates_to_a_tenth(batch_size, rates=RATES, limit=8000):
    """(fewest updates, their rate) until the expected loss is a tenth: 500 curvatures 1 / i,
    gradient noise c / B. E w² follows m' = (1 - r c)² m + r² c / B exactly."""
    c = 1 / torch.arange(1, 501, dtype=torch.float64)
    square = torch.ones(len(rates), 500, dtype=torch.float64)
    start = float(c.sum())
    r = rates[:, None]
    keep, add = (1 - r * c).square(), r.square() * c / batch_size
    for update in range(1, limit + 1):
        square = keep * square + add
        reached = (c * square).sum(1) < 0.1 * start
        if reached.any():
            return update, float(rates[int(reached.nonzero()[0])])
    raise AssertionError(limit)


def test_the_linear_rule_holds_for_small_batches_and_not_for_large_ones():
    updates = {b: updates_to_a_tenth(b) for b in (1, 8, 64, 4096)}
    for size, (count, rate) in updates.items():
        print(f"batch {size}: {count} updates, examples x {count * size / updates[1][0]:.2f}, "
              f"rate {rate:.4f}")  # fmt: skip
    (one, rate_one), (eight, rate_eight) = updates[1], updates[8]
    assert eight * 8 / one < 1.3, "almost perfect scaling: eight times fewer updates"
    assert 5 < rate_eight / rate_one < 9, "and the best rate is about eight times as large"
    by_rule, _ = scaled_rate(rate_one, 1, 8, "sgd")
    with_rule, _ = updates_to_a_tenth(8, torch.tensor([by_rule], dtype=torch.float64))
    assert with_rule < 1.15 * eight
    assert updates[4096][0] * 4096 / one > 50, "past the knee: examples are wasted"
    assert updates[4096][1] / updates[64][1] < 3, "and the rate no longer grows"


def test_a_schedule_in_shares_is_the_same_in_tokens():
    """At half the tokens both runs have the same share of the peak, whatever the batch."""
    schedule = Schedule("cosine", warmup=0.1, final=0.1)
    few, many = schedule.curve(1.0, 100), schedule.curve(1.0, 400)
    for index in range(20, 100):
        assert few[index] == pytest.approx(many[4 * index], abs=0.03)
