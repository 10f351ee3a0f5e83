"""Fused RMS norms: the model's own bits forward, exact gradients, less memory."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, model_of, network_of, tree_pack
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import oracle
from lehr.models.norms import RmsNorm, use_fused_norms
from lehr.models.replay import measuring


def _norm(width: int = 24) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, eps=1e-5)
    with torch.no_grad():
        norm.weight.add_(torch.randn(width, generator=torch.Generator().manual_seed(1)))
    return norm


def _some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_closed_form():
    # x = (3, 4): mean of squares 12.5, so h = x / sqrt(12.5).
    x = torch.tensor([[3.0, 4.0]])
    out = RmsNorm.apply(x, torch.tensor([1.0, 2.0]), 0.0)
    assert torch.allclose(out, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_trains", [True, False])
def test_the_gradient_is_that_of_the_formula_in_float64(dtype, weight_trains):
    norm = _norm().to(dtype)
    x = (3 * _some(2, 7, 24)).to(dtype).requires_grad_()
    weight = norm.weight.detach().clone().requires_grad_(weight_trains)
    out = RmsNorm.apply(x, weight, 1e-5)
    assert torch.equal(out, norm(x))
    upstream = _some(2, 7, 24, seed=2).to(dtype)
    inputs = [x, weight] if weight_trains else [x]
    found = torch.autograd.grad(out, inputs, upstream)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    scale = exact[1] if weight_trains else weight.double()
    wide = scale * exact[0] / (exact[0].pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = torch.autograd.grad(wide, exact, upstream.double())
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert oracle.relative_gap(one.double(), two) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_the_gradient_from_above_is_left_alone():
    x, weight = _some(3, 8).requires_grad_(), torch.ones(8)
    upstream = _some(3, 8, seed=3)
    before = upstream.clone()
    torch.autograd.grad(RmsNorm.apply(x, weight, 1e-6), x, upstream)
    assert torch.equal(upstream, before)


def test_a_norm_that_rounds_elsewhere_is_not_taken():
    class OtherRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states.float()).to(hidden_states.dtype)

    other = OtherRMSNorm(24)
    other.weight.data.add_(_some(24))
    holder = torch.nn.ModuleList([other, _norm()])
    assert use_fused_norms(holder) == 1
    assert "forward" not in other.__dict__


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_gives_the_same_bits(family):
    plain, pack = network_of(family), tree_pack()
    model = model_of(family)
    model.train_all()
    hidden = model.hidden(pack)
    for module in model.network.modules():
        module.__dict__.pop("forward", None)
    assert torch.equal(hidden, model.hidden(pack))
    assert type(plain) is type(model.network)


def test_two_thirds_of_what_a_norm_kept_is_kept_no_more():
    norm = _norm(64).bfloat16().requires_grad_(False)
    x = 1.0 * _some(100, 64).bfloat16().requires_grad_()
    with measuring([norm.weight, x]) as before:
        norm(x)
    with measuring([norm.weight, x]) as after:
        RmsNorm.apply(x, norm.weight, 1e-6)
    assert after.kept_bytes < before.kept_bytes / 3
