"""`lehr plan --numerics`: where the gradients of a run's first update lie, tensor by tensor.

One backward pass in fp32 over the packs of the first stage's first update, on a model of its
own: the run's model stays bit for bit what it was, and so does the global random state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lehr.data.packing import merge
from lehr.data.shapes import Pack
from lehr.objectives.base import Objective
from lehr.objectives.language import Language
from lehr.pipeline.planning import Prepared
from lehr.pipeline.staging import PlannedStage
from lehr.stages.preference import LOSSES, log_probabilities
from lehr.training.batch import cut
from lehr.training.numeric_range import TensorRange, range_report, suggested_loss_scale
from lehr.training.update import accumulate, denominator_of


@dataclass(frozen=True)
class NumericReport:
    """Ranges of the gradients, and what narrow types would make of them.

    stage                folder of the stage whose first update this is
    loss                 of that update, per unit of its weight
    ranges               one per trained tensor, in the model's order
    suggested_loss_scale power of two that brings the largest gradient near 2^13
    lost                 share of all gradients that are not 0, and that a cast to fp16 makes 0:
                         as they are, and under that scale; and of bf16
    """

    stage: str
    loss: float
    ranges: tuple[TensorRange, ...]
    suggested_loss_scale: float
    lost_fp16: float
    lost_fp16_scaled: float
    lost_bf16: float

    def as_json(self) -> dict[str, Any]:
        """The `numerics` part of `lehr plan --numerics --json`."""
        return {
            "stage": self.stage,
            "loss": self.loss,
            "tensors": [asdict(one) for one in self.ranges],
            "suggested_loss_scale": self.suggested_loss_scale,
            "fp16_underflow": self.lost_fp16,
            "fp16_underflow_scaled": self.lost_fp16_scaled,
            "bf16_underflow": self.lost_bf16,
        }

    def worst_first(self) -> list[TensorRange]:
        """The tensors from which fp16 takes most come first; of equals the smaller ones."""
        return sorted(self.ranges, key=lambda one: (-one.fp16_underflow, one.smallest))


def numeric_report(prepared: Prepared) -> NumericReport:
    """Measure the gradients of the first stage's first update."""
    with torch.random.fork_rng():
        return _measure(prepared)


def _measure(prepared: Prepared) -> NumericReport:
    planned, recipe = prepared.stages[0], prepared.recipe
    model = prepared.bench.in_fp32(prepared.bench.base)
    if planned.trains_all:
        model.train_all()
    else:
        adapter = planned.stage.adapter
        model.add_adapter(adapter.rank, adapter.alpha, adapter.targets)
    model.eval()  # ranges, not a lottery: no dropout
    packs = planned.first_packs(recipe.seed)
    objective = _objective(model, planned, packs, recipe.seed)
    micro_batches = cut(packs, planned.micro_batch, merge)
    weights = [float(objective.weight(one)) for one in micro_batches]
    denominator = denominator_of(weights, micro_batches, 1)
    done = accumulate(model, objective, micro_batches, weights, denominator, (recipe.seed,), "fp32")
    gradients = {
        name: value.grad for name, value in model.trained().items() if value.grad is not None
    }
    return report_of(planned.folder_name, done.loss, gradients)


def report_of(stage: str, loss: float, gradients: dict[str, Tensor]) -> NumericReport:
    """The report of these gradients, fp32."""
    ranges = range_report(gradients)
    scale = suggested_loss_scale(ranges)
    scaled = range_report({name: value * scale for name, value in gradients.items()})
    return NumericReport(
        stage,
        loss,
        tuple(ranges),
        scale,
        _share(ranges, "fp16_underflow"),
        _share(scaled, "fp16_underflow"),
        _share(ranges, "bf16_underflow"),
    )


def _share(ranges: Sequence[TensorRange], name: str) -> float:
    """Of all values that are not 0, whatever tensor they are in."""
    count = sum(one.values for one in ranges)
    return sum(getattr(one, name) * one.values for one in ranges) / count if count else 0.0


def _objective(model: Any, planned: PlannedStage, packs: list[Pack], seed: int) -> Objective:
    stage = planned.stage
    if stage.kind != "preference":
        return Language(accuracy=False, per_source=False)
    shown = {item for one in packs for item in one.items}
    items = [(item, one) for item, one in planned.batches(seed).items() if item in shown]
    make = partial(LOSSES[stage.loss], beta=stage.beta, label_smoothing=stage.label_smoothing)
    state = model.state()  # the model before its first update is its own reference
    made: Objective = make(
        reference=log_probabilities(model, items, state, planned.pack_length, stage.packing)
    )
    return made
