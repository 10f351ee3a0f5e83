"""Muon: hidden matrices move along an orthogonal direction, everything else by AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, steepest at small singular values
ITERATIONS = 5
SMALLEST_NORM = 1e-7  # a gradient of 0 gives an update of 0


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T of U S V^T by five Newton-Schulz steps, computed in `dtype`.

    Singular values from 0.01 to 1 of the norm come out between 0.68 and 1.14.
    """
    first, second, third = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(Optimizer):
    """Momentum, made orthogonal, with decoupled decay: torch's Muon in arithmetic that fits.

    torch.optim.Muon computes in bf16 everywhere. Without bf16 units a CPU took 28
    times as long for it as for fp32 (the page `muon` has the numbers), so this one uses
    bf16 on accelerators and fp32 on CPUs; a test holds it to torch's.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every matrix that has a gradient; takes no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return None

    def _move(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        gradient, momentum = parameter.grad, group["momentum"]
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        on_cpu = parameter.device.type == "cpu"
        update = orthogonal(direction, torch.float32 if on_cpu else torch.bfloat16)
        rows, columns = parameter.shape
        factor = math.sqrt(max(1.0, rows / columns))
        if group["match_rms"]:
            factor = 0.2 * math.sqrt(max(rows, columns))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * factor)


class MuonAndAdamW(Optimizer):
    """Muon over `hidden` and torch's AdamW over `rest`, as one optimizer.

    Both parts share this object's groups and state, so that rates, checkpoints and resume
    see one optimizer.

    hidden, rest  parameter groups with `names` and `learning_rate_scale`; `rest` may be empty
    match_rms     scale updates by 0.2 sqrt(larger side): about the size of an AdamW update
                  (arXiv:2502.16982), so that both parts can share one learning rate. False
                  scales by sqrt(max(1, rows / columns)), which wants a larger rate: give the
                  hidden matrices a group with a learning_rate_scale
    adam          arguments of AdamW for `rest`
    """

    def __init__(
        self,
        hidden: Sequence[dict[str, Any]],
        rest: Sequence[dict[str, Any]],
        *,
        momentum: float,
        nesterov: bool,
        match_rms: bool,
        adam: Mapping[str, Any],
    ) -> None:
        own = {"lr": 0.0, "momentum": momentum, "nesterov": nesterov, "match_rms": match_rms}
        parts: list[Optimizer] = [Muon(list(hidden), own)]
        if rest:
            parts.append(torch.optim.AdamW(list(rest), **adam))
        # The same group objects: a rate that is set here is the one that a part reads.
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every group; takes no closure."""
        for part in self._parts:
            part.step()
        return None
