"""What the engine knows of a loss: what a batch weighs, and its loss as a sum.

An objective returns sums, never means. The engine divides by the weight of the
whole update, so a batch may be cut into micro-batches and ranks in any way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lehr.data.shapes import Pack

Number = float | Tensor


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch.

    total    scalar, differentiable: a sum, divided by nothing
    metrics  name -> (sum, count); the value shown is Σ sum ÷ Σ count over the whole update.
             Scalars may stay tensors, so that no objective waits for the device.
             Names that begin with `source.` are columns of their own, all others stand
             under `objective.`
    """

    total: Tensor
    metrics: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)


class Objective(Protocol):
    """Pure arithmetic: knows nothing of optimizers, ranks or files."""

    def weight(self, pack: Pack) -> float:
        """What the pack counts in the denominator; needs no forward pass; ≥ 0."""
        ...

    def loss(self, model: Any, pack: Pack) -> Loss:
        """The pack's loss as a sum; any cut of an update adds up to the same total."""
        ...
