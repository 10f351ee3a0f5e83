"""How far an update moved the weights, estimated from a fixed sample of each tensor.

    norm ≈ sqrt( Σ_tensors (n / k) Σ_sampled Δw² )

with n parameters and k sampled ones, evenly spaced. A copy of all weights would tell it
exactly and cost a share of the update; a jump of a factor shows in the sample as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

SAMPLE = 512  # parameters of a tensor


class StepNorm:
    """Estimates the L2 norm of one update; `begin` before the step, `end` after it."""

    def __init__(self, trained: Mapping[str, Parameter]) -> None:
        self._trained = list(trained.values())
        self._weights = [
            math.sqrt(value.numel() / max(1, _sample(value).numel())) for value in self._trained
        ]
        self._before: list[Tensor] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the sampled weights."""
        self._before = [_sample(value).clone() for value in self._trained]

    @torch.no_grad()
    def end(self) -> float:
        """Norm of what changed since `begin`; one wait for the device."""
        changes = torch._foreach_sub([_sample(value) for value in self._trained], self._before)
        # In float64: the square of a large change that is finite does not exist in fp32.
        norms = torch.stack(torch._foreach_norm(changes, dtype=torch.float64)).tolist()
        self._before = []
        return math.hypot(*(a * b for a, b in zip(norms, self._weights, strict=True)))


def _sample(parameter: Parameter) -> Tensor:
    """A view of at most `SAMPLE` evenly spaced elements, or a few more."""
    flat = parameter.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)]
