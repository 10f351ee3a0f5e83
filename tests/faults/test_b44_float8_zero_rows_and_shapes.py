"""B44: zero rows, amax 1e-38, an infinity, odd shapes, and LoRA's B at its start."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lehr.errors import RecipeError
from lehr.models.adapter_layers import AdapterSpec, LoraLinear
from lehr.streams import generator_for
from lehr.training.float8_convert import convert
from lehr.training.float8_formats import E4M3
from lehr.training.float8_recipe import Float8Settings, select
from lehr.training.float8_scaling import health, quantize, quantize_blocks

EVERYWHERE = {"keep_first_blocks": 0, "keep_last_blocks": 0, "smallest_features": 1}


def both_ways(values: torch.Tensor):
    """One scale for the tensor, and one per row (a block that is as long as the row)."""
    return quantize(values, E4M3), quantize_blocks(values, E4M3, block=values.shape[-1])


def test_zeros_stay_zeros_with_a_finite_scale() -> None:
    values = torch.randn(4, 8, generator=generator_for("b44"))
    values[1] = 0
    for given in (values, torch.zeros(4, 8)):
        for quantized in both_ways(given):
            assert bool(quantized.scale.isfinite().all()) and bool((quantized.scale > 0).all())
            assert bool(quantized.values().isfinite().all())
            assert bool((quantized.values()[given == 0] == 0).all())


def test_tiny_amax_is_clamped_and_not_lost() -> None:
    values = torch.tensor([[1e-38, -5e-39, 0.0, 1e-38]])
    for quantized in both_ways(values):
        assert bool(quantized.scale.isfinite().all())
        assert torch.allclose(quantized.values(), values, rtol=0.07, atol=0)


def test_an_infinity_is_flagged_and_does_not_spoil_its_neighbours() -> None:
    values = torch.randn(4, 8, generator=generator_for("b44"))
    values[2, 5] = math.inf
    for quantized in both_ways(values):
        back = quantized.values()
        assert not math.isfinite(float(back[2, 5])), "the infinity was hidden"
        back[2, 5] = values[2, 5] = 0.0
        assert float((back - values).norm() / values.norm()) < 0.05
        values[2, 5] = math.inf
        assert health(values, quantized, E4M3).nonfinite == 1


@pytest.mark.parametrize("shape", [(30, 8), (7, 3), (1, 130)])
def test_odd_shapes_compute_on_the_cpu_and_are_listed_or_refused_for_a_gpu(shape) -> None:
    inputs, outputs = shape
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(outputs, 16), nn.Linear(16, 16))
    gpu = Float8Settings(backend="scaled_mm", **EVERYWHERE)
    layers = {name: module for name, module in model.named_modules() if name}
    choices = {choice.name: choice for choice in select(model, gpu, layers, "cuda")}
    assert not choices["0"].converted and "multiples of 16" in str(choices["0"])
    assert choices["2"].converted
    named = Float8Settings(backend="scaled_mm", convert=("0",))
    with pytest.raises(RecipeError, match="multiples of 16 on cuda"):
        select(model, named, layers, "cuda")
    for backend in ("emulated", "scaled_mm"):
        fp8 = convert(model, Float8Settings(backend=backend, **EVERYWHERE))
        loss = model(torch.randn(5, inputs, generator=generator_for(shape))).square().mean()
        loss.backward()
        assert math.isfinite(float(loss.detach())) and len(fp8.layers) == 3
        fp8.restore()


@pytest.mark.parametrize("scaling", ["current", "delayed", "block"])
def test_lora_starting_at_zero_has_bf16s_first_loss(scaling) -> None:
    spec = AdapterSpec(rank=4, alpha=8.0, dropout=0.0, targets=("0", "2"))
    layers = []
    for index in range(2):
        base = nn.Linear(32, 32)
        with torch.no_grad():
            base.weight.copy_(torch.randn(32, 32, generator=generator_for("w", index)) / 32**0.5)
            base.weight[3] = 0  # a zero row of the base too
            base.bias.zero_()
        layers.append(LoraLinear(base.requires_grad_(False), spec, generator_for("a", index)))
    model = nn.Sequential(layers[0], nn.SiLU(), layers[1])
    x = torch.randn(16, 32, generator=generator_for("x"))
    x[5] = 0  # and a zero row of the input
    narrow = copy.deepcopy(model).bfloat16()
    reference = float(narrow(x.bfloat16()).float().logsumexp(-1).mean().detach())
    fp8 = convert(model, Float8Settings(scaling=scaling, measure_every=1, **EVERYWHERE))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for update in range(1, 4):
        loss = model(x).logsumexp(-1).mean()
        if update == 1:
            assert float(loss.detach()) == pytest.approx(reference, rel=0.05)
        optimizer.zero_grad()
        loss.backward()
        assert fp8.flagged() == () and math.isfinite(float(loss.detach()))
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)
        optimizer.step()
        assert fp8.applied(update) == ()
    assert float(layers[0].lora_b.detach().abs().max()) > 0
