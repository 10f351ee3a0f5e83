"""Range report, lost updates and stochastic rounding, by hand and by their invariants."""

from __future__ import annotations

import math

import pytest
import torch

from lehr.streams import generator_for
from lehr.training.numeric_range import (
    lost_update_share,
    range_of,
    range_report,
    stochastic_round_bf16,
    suggested_loss_scale,
)


def test_shares_by_hand() -> None:
    values = [2.0**-26, 2.0**-25, 2.0**-24, 2.0**-14, 1.0, 65504.0, 65520.0, -1e5]
    seen = range_of("g", torch.tensor([*values, 0.0, 0.0, math.inf, math.nan]))
    assert (seen.values, seen.zeros, seen.nonfinite) == (8, 2, 2)
    assert (seen.smallest, seen.largest) == (2.0**-26, 1e5)
    assert (seen.fp16_underflow, seen.fp16_subnormal, seen.fp16_overflow) == (2 / 8, 1 / 8, 2 / 8)
    assert (seen.bf16_underflow, seen.bf16_overflow) == (0.0, 0.0)
    assert "fp16 loses 50.0%" in str(seen)


def test_bf16_limits() -> None:
    seen = range_of("g", torch.tensor([1e-42, 1e-39, 3.39e38, 3.4e38]))
    assert (seen.bf16_underflow, seen.bf16_overflow) == (0.25, 0.25)


def test_nothing_to_report_is_no_error() -> None:
    for empty in (torch.zeros(3), torch.empty(0), torch.tensor([math.nan])):
        seen = range_of("g", empty)
        assert (seen.values, seen.largest, seen.fp16_underflow) == (0, 0.0, 0.0)
        assert suggested_loss_scale([seen]) == 1.0


def test_the_suggested_scale_saves_what_fp16_would_lose() -> None:
    gradients = {name: size * torch.randn(999, generator=generator_for(name))
                 for name, size in (("a", 1e-8), ("b", 1e-5))}  # fmt: skip
    report = range_report(gradients)
    assert [entry.name for entry in report] == ["a", "b"]
    assert report[0].fp16_underflow > 0.9
    scale = suggested_loss_scale(report)
    assert math.frexp(scale)[0] == 0.5
    after = range_report({name: value * scale for name, value in gradients.items()})
    assert max(entry.fp16_underflow + entry.fp16_overflow for entry in after) == 0.0
    assert suggested_loss_scale(range_report({"g": torch.tensor([1e30])})) == 1.0


def test_bf16_values_of_the_literature() -> None:
    assert float(torch.tensor(1 + 2.0**-9).bfloat16()) == 1.0
    assert float(torch.tensor(1 + 2.0**-7).bfloat16()) == 1.0078125
    share = lost_update_share(torch.ones(3), torch.tensor([2.0**-9, 2.0**-8, 2.0**-7]))
    assert share == 2 / 3  # 1 + 2⁻⁸ is a tie, and 1 is even
    assert lost_update_share(torch.ones(2), torch.zeros(2)) == 0.0
    assert lost_update_share(torch.ones(1), torch.tensor([2.0**-9]), torch.float32) == 0.0


def test_a_thousand_small_updates_stall_in_bf16_and_not_with_stochastic_rounding() -> None:
    nearest = torch.ones(4096, dtype=torch.bfloat16)
    stochastic = nearest.clone()
    master = torch.ones(1)
    stream = generator_for("stall")
    for _ in range(1000):
        nearest = (nearest.float() + 1e-3).bfloat16()
        stochastic = stochastic_round_bf16(stochastic.float() + 1e-3, stream)
        master += 1e-3
    assert bool((nearest == 1.0).all())
    assert float(master) == pytest.approx(2.0, abs=1e-4)
    assert float(stochastic.float().mean()) == pytest.approx(2.0, abs=0.005)


def test_the_mean_is_kept_and_only_neighbours_are_hit() -> None:
    for value in (1 + 2.0**-9, -3.14159, 1e-40, 7e30):
        wanted = torch.full((200_000,), value)
        rounded = stochastic_round_bf16(wanted, generator_for(value)).double()
        choices = rounded.unique()
        assert len(choices) == 2 and choices[0] < value < choices[1]
        step = float(choices[1] - choices[0])
        assert abs(float(rounded.mean()) - float(wanted[0])) < 4 * step / 2 / 200_000**0.5


def test_what_bf16_has_stays_and_ends_stay_ends() -> None:
    stream = generator_for("ends")
    largest = torch.finfo(torch.bfloat16).max
    given = torch.tensor([0.0, -0.0, 1.5, -largest, math.inf, -math.inf, 2.0**-133])
    assert torch.equal(stochastic_round_bf16(given, stream).float(), given)
    past = torch.full((1000,), torch.finfo(torch.float32).max)
    for sign in (1, -1):
        assert bool(stochastic_round_bf16(sign * past, stream).isfinite().all())
    assert bool(stochastic_round_bf16(torch.tensor([math.nan]), stream).isnan().all())
    again = [stochastic_round_bf16(torch.full((99,), 1.001), generator_for(1)) for _ in range(2)]
    assert torch.equal(*again)
    with pytest.raises(ValueError, match="starts from fp32"):
        stochastic_round_bf16(torch.ones(1, dtype=torch.float64), stream)
    assert stochastic_round_bf16(torch.ones(4, 6).T[1:], stream).shape == (5, 4)
