"""RMS norms whose backward pass keeps their input and one number a token.

y = w · h with h = x / sqrt(mean x² + ε) (Zhang & Sennrich 2019, eq. 4). Op by op, autograd would
keep three more tensors of the size of x, two of them in fp32, and pass over them twice as often.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class RmsNorm(torch.autograd.Function):
    """x [..., d], weight [d] -> [..., d]; the mean is fp32, h is rounded to the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.float32)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x.to(torch.float32) * inverse
        by_weight = None
        if ctx.needs_input_grad[1]:
            products = (grad * normed.to(x.dtype)).flatten(0, -2)
            by_weight = products.sum(0, dtype=torch.float32).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, by_weight, None
        # dx = (g - h mean(g h)) / rms, with g the gradient of h.
        by_normed = (grad * weight).to(x.dtype).to(torch.float32)
        if by_normed.data_ptr() == grad.data_ptr():
            by_normed = by_normed.clone()
        share = (by_normed * normed).mean(-1, keepdim=True)
        by_normed.addcmul_(normed, share, value=-1).mul_(inverse)
        return by_normed.to(x.dtype), by_weight, None


def use_fused_norms(network: nn.Module) -> int:
    """Let the RMS norms of `network` compute by RmsNorm; how many do.

    A class of norms is taken only where its own forward gives the same bits on a trial: a
    variant that rounds elsewhere (Gemma, OLMo-2) stays as it is.
    """
    same: dict[type[nn.Module], bool] = {}
    taken = 0
    for module in network.modules():
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
            continue
        if kind not in same:
            same[kind] = _gives_the_same(module)
        if same[kind]:
            module.__dict__["forward"] = partial(_forward, module)
            taken += 1
    return taken


def _forward(module: Any, hidden_states: Tensor) -> Tensor:
    out: Tensor = RmsNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return out


@torch.no_grad()
def _gives_the_same(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return False
    if weight.is_meta:  # no numbers to try: the same module with some
        module = deepcopy(module).to_empty(device="cpu")
        weight = module.weight.fill_(1)
    generator = torch.Generator().manual_seed(0)
    trial = torch.randn(5, len(weight), generator=generator)
    own: Callable[[Tensor], Tensor] = module.forward
    for dtype in {weight.dtype, torch.float32, torch.bfloat16}:
        x = (3 * trial).to(weight.device, dtype)
        try:
            if not torch.equal(own(x), _forward(module, x)):
                return False
        except (RuntimeError, TypeError):
            return False
    return True
