"""Scales by hand: current, delayed, blocks; zero, tiny, huge and infinite amax; INT8 beside."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lehr.errors import RecipeError
from lehr.training.float8_formats import E4M3, E5M2
from lehr.training.float8_scaling import (
    LARGEST_SCALE,
    AmaxHistory,
    Health,
    finite_amax,
    health,
    health_sums,
    quantize,
    quantize_blocks,
    quantize_int8,
    scale_for,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scale_by_hand() -> None:
    assert float(scale_for(torch.tensor(3.5), 448.0)) == 128.0
    assert float(scale_for(torch.tensor(3.5), 448.0, margin=2)) == 32.0
    assert float(scale_for(torch.tensor(7.0), 57344.0)) == 8192.0
    for amax in (0.0, 1e-45, 1e-38, 1.0, 3e38):
        scale = float(scale_for(torch.tensor(amax), 448.0, margin=4))
        assert 0 < scale <= LARGEST_SCALE and math.isfinite(1 / scale)


def test_finite_amax_ignores_what_is_not_finite() -> None:
    assert float(finite_amax(torch.tensor([1.0, -3.0, math.inf, math.nan]))) == 3.0
    assert float(finite_amax(torch.tensor([math.inf]))) == 0.0
    assert float(finite_amax(torch.empty(0, 4))) == 0.0


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e20])
def test_current_scaling_does_not_depend_on_size(form, size) -> None:
    """Relative error of normal values is the format's, whatever the tensor's magnitude."""
    values = normal(64, 64) * size
    quantized = quantize(values, form)
    assert float(quantized.codes.float().abs().max()) == form.largest
    error = (quantized.values() - values).abs() / values.abs()
    normals = (values * quantized.scale).abs() >= 2.0 ** (1 - form.bias)
    assert float(error[normals].max()) <= form.relative_error * (1 + 1e-5)


def test_unscaled_small_gradients_vanish_and_scaled_ones_do_not() -> None:
    gradients = normal(64, 64) * 1e-6
    for form in (E4M3, E5M2):
        bare = quantize(gradients, form, torch.tensor(1.0))
        assert health(gradients, bare, form).underflow > 0.999
        assert health(gradients, quantize(gradients, form), form).underflow < 0.001


def test_blocks_have_their_own_scales_and_a_short_tail() -> None:
    values = normal(3, 300)
    values[0, :128] *= 1e-6
    values[1, 128:256] = 0
    quantized = quantize_blocks(values, E4M3)
    assert quantized.scale.shape == (3, 3) and quantized.codes.shape == (3, 300)
    for row in range(3):
        for block, (low, high) in enumerate([(0, 128), (128, 256), (256, 300)]):
            part = quantize(values[row, low:high], E4M3)
            assert torch.equal(part.values(), quantized.values()[row, low:high])
            assert part.scale == quantized.scale[row, block]
    assert health(values, quantized, E4M3).underflow == 0


def test_floating_formats_keep_dynamic_range_where_int8_does_not() -> None:
    """One outlier of k standard deviations among 64 × 4096 normal values."""
    decibels = {}
    for outlier in (0.0, 1e2, 1e5):
        values = normal(64, 4096)
        if outlier:
            values[0, 0] = outlier
        rest = values.clone()
        rest[0, 0] = 0  # the outlier itself would fill the signal
        for name, quantized, form in (
            ("e4m3", quantize(values, E4M3), E4M3),
            ("e5m2", quantize(values, E5M2), E5M2),
            ("block", quantize_blocks(values, E4M3), E4M3),
            ("int8", quantize_int8(values), None),
        ):
            quantized.codes.view(torch.uint8)[0, 0] = 0
            decibels[name, outlier] = health(rest, quantized, form).sqnr_db
    assert decibels["e4m3", 0.0] == pytest.approx(31.5, abs=0.3)
    assert decibels["e5m2", 0.0] == pytest.approx(25.6, abs=0.3)
    assert decibels["int8", 0.0] > 38
    # 100 standard deviations: nothing for a floating format, ruin for equal steps.
    assert abs(decibels["e4m3", 1e2] - decibels["e4m3", 0.0]) < 0.2
    assert decibels["int8", 1e2] < 15
    # 100 000: E4M3 with one scale suffers, with blocks it does not, INT8 keeps nothing.
    assert 15 < decibels["e4m3", 1e5] < 21 and decibels["block", 1e5] > 31
    assert decibels["int8", 1e5] <= 0.01


def test_int8_refuses_what_it_cannot_show() -> None:
    with pytest.raises(ValueError, match="infinities"):
        quantize_int8(torch.tensor([1.0, math.inf]))
    assert quantize_int8(torch.tensor([0.5, -1.0, 0.0])).codes.tolist() == [64, -127, 0]


def test_health_by_hand_and_adding_up() -> None:
    values = torch.tensor([[448.0, 500.0, 2.0**-12, 0.0, math.inf]])
    quantized = quantize(values, E4M3, torch.tensor(1.0))
    seen = health(values, quantized, E4M3)
    assert (seen.underflow, seen.saturation, seen.nonfinite) == (1 / 3, 1 / 4, 1)
    noise = 52.0**2 + 2.0**-24
    signal = 448.0**2 + 500.0**2 + 2.0**-24
    assert seen.sqnr_db == pytest.approx(10 * math.log10(signal / noise))
    a, b = normal(4, 8), normal(6, 8, seed=1)
    one = torch.tensor(50.0)
    parts = [health_sums(part, quantize(part, E4M3, one), 448.0) for part in (a, b)]
    both = torch.cat([a, b])
    whole = health_sums(both, quantize(both, E4M3, one), 448.0)
    assert torch.allclose(parts[0] + parts[1], whole, rtol=1e-12)
    empty = torch.zeros(2, 2)
    assert health(empty, quantize(empty, E4M3), E4M3) == Health(0.0, 0.0, math.inf, 0)


def test_current_scaling_never_reports_saturation() -> None:
    for seed in range(50):
        values = normal(16, 16, seed=seed) * 10.0 ** (seed - 25)
        assert health(values, quantize(values, E4M3), E4M3).saturation == 0


def step(history: AmaxHistory, amax: float) -> float:
    """One applied update whose tensor has this amax; the scale it was cast with."""
    values = torch.tensor([amax, -amax / 2])
    scale = float(history.scale(values, E4M3))
    history.note(values)
    history.advance(history.pending())
    return scale


def test_delayed_scaling_by_hand_with_first_step_and_spike_ageing_out() -> None:
    history = AmaxHistory(window=3)
    scales = [step(history, amax) for amax in (1.0, 1.0, 64.0, 1.0, 1.0, 1.0, 1.0)]
    # First: its own amax. The spike meets the old scale, holds for three updates, leaves.
    assert scales == [448.0, 448.0, 448.0, 7.0, 7.0, 7.0, 448.0]
    spike = torch.tensor([64.0, 1.0])
    assert health(spike, quantize(spike, E4M3, torch.tensor(448.0)), E4M3).saturation == 0.5
    margin = AmaxHistory(window=3, margin=1)
    assert [step(margin, 1.0), step(margin, 1.0)] == [224.0, 224.0]
    window_of_one = AmaxHistory(window=1)
    assert [step(window_of_one, amax) for amax in (1.0, 2.0, 4.0)] == [448.0, 448.0, 224.0]


def test_a_history_of_zeros_knows_nothing() -> None:
    """LoRA's B starts at zero: scale 1 would flush its first real gradients."""
    history = AmaxHistory(window=4)
    assert step(history, 0.0) == 1.0
    assert step(history, 1e-6) == pytest.approx(448e6, rel=1e-6)
    assert history.amax[0] == 0.0


def test_micro_batches_of_an_update_share_one_scale() -> None:
    history = AmaxHistory(window=4)
    step(history, 2.0)
    parts = [torch.tensor([1.0]), torch.tensor([8.0]), torch.tensor([4.0])]
    scales = []
    for part in parts:
        scales.append(float(history.scale(part, E4M3)))
        history.note(part)
        history.note(part)  # a recomputed forward pass
    assert scales == [224.0] * 3
    history.advance(history.pending())
    assert history.amax == [2.0, 8.0]


def test_a_skipped_update_and_an_infinity_leave_the_history_alone() -> None:
    history = AmaxHistory(window=4)
    step(history, 2.0)
    history.note(torch.tensor([1e30]))
    history.forget()
    assert history.pending() is None and history.amax == [2.0]
    history.note(torch.tensor([math.inf, 4.0]))
    history.advance(history.pending())
    assert history.amax == [2.0, 4.0]
    history.advance(None)  # a layer that this update did not reach
    assert history.amax == [2.0, 4.0]


def test_state_goes_through_json_and_the_scale_follows() -> None:
    history = AmaxHistory(window=3, margin=1)
    for amax in (0.1, 0.3, 1 / 3):
        step(history, amax)
    again = AmaxHistory(window=3, margin=1)
    again.load(json.loads(json.dumps(history.state())))
    probe = torch.tensor([5.0])
    assert torch.equal(again.scale(probe, E4M3), history.scale(probe, E4M3))
    assert [step(again, a) for a in (0.2, 7.0)] == [step(history, a) for a in (0.2, 7.0)]
    assert "scale" not in history.state()


@pytest.mark.parametrize("amax", [None, [1.0] * 4, [math.inf], [-1.0], ["1"], [math.nan]])
def test_a_state_that_cannot_be_one_is_refused(amax) -> None:
    with pytest.raises(RecipeError, match="at most 3 finite amax"):
        AmaxHistory(window=3).load({"amax": amax})


def test_bad_windows_are_refused() -> None:
    for bad in ({"window": 0}, {"margin": -1}):
        with pytest.raises(ValueError):
            AmaxHistory(**bad)
