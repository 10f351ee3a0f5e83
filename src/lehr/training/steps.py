"""What an optimizer really did: the effective step of each parameter group.

The rate of a schedule is not the rate of a parameter: an adaptive optimizer divides it by
the size of past gradients. Measured from outside, by what moved, so that it means the same
for every optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

SAMPLE = 200_000  # parameters of a group that the percentiles are taken from, or a few more


@dataclass(frozen=True)
class EffectiveStep:
    """One parameter group over one update.

    names         its tensors
    rate          what the schedule said, times the group's scale
    step, weight  root mean square of the change, and of the weights before it
    low, middle, high  |change| / |gradient| of a parameter: the rate that it had. Tenth,
                  fiftieth and ninetieth percentile; equal ones mean that nothing adapts.
                  NaN where no gradient differs from 0
    """

    names: tuple[str, ...]
    rate: float
    step: float
    weight: float
    low: float
    middle: float
    high: float

    @property
    def relative(self) -> float:
        """Change over weight: about 1e-3 where a network trains well."""
        return self.step / self.weight if self.weight else math.inf if self.step else 0.0

    def columns(self, index: int) -> dict[str, float]:
        """As columns of metrics.jsonl."""
        values = ("rate", "step", "relative", "low", "middle", "high")
        return {f"step.{index}.{name}": getattr(self, name) for name in values}


def effective_steps(optimizer: Optimizer, before: Mapping[str, Tensor]) -> list[EffectiveStep]:
    """Measure the update that was just applied; gradients must still be there.

    before  copies of the trained tensors from before the update, by name
    """
    found = []
    for group in optimizer.param_groups:
        count, moved, size, rates = 0, 0.0, 0.0, []
        stride = max(1, sum(parameter.numel() for parameter in group["params"]) // SAMPLE)
        for name, parameter in zip(group["names"], group["params"], strict=True):
            change = parameter.detach() - before[name]
            count += change.numel()
            moved += float(change.double().square().sum())
            size += float(before[name].double().square().sum())
            if parameter.grad is not None:
                rates.append(_rates(change, parameter.grad, stride))
        low, middle, high = _percentiles(torch.cat(rates) if rates else torch.empty(0))
        step, weight = math.sqrt(moved / max(count, 1)), math.sqrt(size / max(count, 1))
        names = tuple(group["names"])
        found.append(EffectiveStep(names, float(group["lr"]), step, weight, low, middle, high))
    return found


def _rates(change: Tensor, gradient: Tensor, stride: int) -> Tensor:
    """|change| / |gradient| of every `stride`-th parameter, where the gradient is not 0."""
    moved, pulled = change.flatten()[::stride].abs(), gradient.flatten()[::stride].abs()
    return (moved[pulled > 0] / pulled[pulled > 0]).float().cpu()


def _percentiles(rates: Tensor) -> tuple[float, float, float]:
    if not rates.numel():
        return math.nan, math.nan, math.nan
    ordered = rates.sort().values
    low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return float(low), float(middle), float(high)
