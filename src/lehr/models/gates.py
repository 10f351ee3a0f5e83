"""Gated feed-forward layers whose backward pass keeps the gate and the other input, nothing else.

y = silu(g) · u (SwiGLU, Shazeer 2020, eq. 5). Op by op, autograd would keep silu(g) as well: as
much again as a layer's gate. It is computed a second time instead, a small part of a step.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedSilu(torch.autograd.Function):
    """gate, up [..., f] -> silu(gate) · up [..., f]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        by_up = F.silu(gate).mul_(grad)
        by_gate = grad * up
        return torch.ops.aten.silu_backward.grad_input(by_gate, gate, grad_input=by_gate), by_up


def use_gated_silu(network: nn.Module) -> int:
    """Let gated layers with SiLU compute by GatedSilu; how many do.

    A class is taken only where its own forward gives the same bits on a trial.
    """
    same: dict[type[nn.Module], bool] = {}
    taken = 0
    for module in network.modules():
        kind = type(module)
        parts = ("gate_proj", "up_proj", "down_proj")
        if not all(isinstance(getattr(module, part, None), nn.Linear) for part in parts):
            continue
        if kind not in same:
            same[kind] = _is_silu(getattr(module, "act_fn", None)) and _gives_the_same(module)
        if same[kind]:
            module.__dict__["forward"] = partial(_forward, module)
            taken += 1
    return taken


def _is_silu(activation: Any) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _forward(module: Any, x: Tensor) -> Tensor:
    out: Tensor = module.down_proj(GatedSilu.apply(module.gate_proj(x), module.up_proj(x)))
    return out


@torch.no_grad()
def _gives_the_same(module: Any) -> bool:
    weight: Tensor = module.gate_proj.weight
    if weight.is_meta:  # no numbers to try: the same module, small
        module = copy(module)
        module._modules = dict(module._modules)
        for name in ("gate_proj", "up_proj", "down_proj"):
            module._modules[name] = nn.Linear(4, 4, dtype=weight.dtype)
        weight = module.gate_proj.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    try:
        return torch.equal(module.forward(x), _forward(module, x))
    except (RuntimeError, TypeError):
        return False
