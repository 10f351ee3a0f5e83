"""Gradients of one update: summed over ranks, measured in one pass, clipped."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lehr import ranks
from lehr.errors import Problem, RecipeError


@dataclass(frozen=True)
class Measured:
    """The gradient of an update before clipping.

    norm       L2 norm over all trained tensors, fp32; not finite where any gradient is not
    nonfinite  names of the tensors whose own norm is not finite
    norms      of each tensor that has a gradient
    """

    norm: float
    nonfinite: tuple[str, ...]
    norms: Mapping[str, float] = field(default_factory=dict, compare=False)


def clear(trained: Mapping[str, Parameter]) -> None:
    """Forget all gradients."""
    for parameter in trained.values():
        parameter.grad = None


def sum_over_ranks(trained: Mapping[str, Parameter]) -> None:
    """Add up the gradients of all ranks; each was divided by the weight of the whole update."""
    if ranks.world_size() == 1:
        return
    for parameter in trained.values():
        if parameter.grad is None:  # this rank's packs did not reach the tensor
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def measure(trained: Mapping[str, Parameter]) -> Measured:
    """Norm of the gradient and the names of what is not finite; changes nothing.

    torch's own clipping multiplies every gradient by a coefficient that one NaN turns
    into NaN; here the verdict comes first and the gradients stay as they are.
    """
    named = [(name, value.grad) for name, value in trained.items() if value.grad is not None]
    if not named:
        return Measured(norm=0.0, nonfinite=())
    norms = [torch.linalg.vector_norm(gradient, dtype=_wide(gradient)) for _, gradient in named]
    values = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()  # the one sync
    nonfinite = tuple(
        name for (name, _), value in zip(named, values, strict=True) if not math.isfinite(value)
    )
    # math.hypot scales, so that squares of large norms do not overflow.
    norms_of = {name: value for (name, _), value in zip(named, values, strict=True)}
    return Measured(norm=math.hypot(*values), nonfinite=nonfinite, norms=norms_of)


def squared(tensor: Tensor) -> float:
    """Σ x² in float64: one pass, without a copy in that type."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def clip_to(trained: Mapping[str, Parameter], norm: float, limit: float | None) -> float:
    """Scale all gradients so that their norm is min(norm, limit); returns the factor."""
    if limit is None or norm <= limit:
        return 1.0
    factor = limit / norm
    for parameter in trained.values():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return factor


def _wide(gradient: Tensor) -> torch.dtype:
    """fp32 for everything narrower; a float64 gradient keeps its own arithmetic."""
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


def require_equal_start(trained: Mapping[str, Parameter]) -> None:
    """Raise RecipeError where the ranks do not begin with the same weights."""
    if ranks.world_size() == 1:
        return
    digest = hashlib.sha256()
    for value in trained.values():
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    # 40 bits: exact in float64 also as a sum over thousands of ranks
    mine = float(int(digest.hexdigest()[:10], 16))
    if not ranks.all_true(ranks.all_sum(mine) == mine * ranks.world_size()):
        raise RecipeError(Problem("weights", "the same weights on every rank before training"))
