"""The arithmetic of one update: sums over micro-batches and ranks, one division.

    gradient = ∇ Σ_micro-batches,ranks loss.total  ÷  Σ weight

The denominator is known before the first forward pass, so every cut of the update
into micro-batches and ranks gives the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lehr import ranks
from lehr.data.shapes import Pack
from lehr.errors import Problem, RecipeError
from lehr.models.precision import autocast_dtype
from lehr.objectives.base import Objective
from lehr.streams import seed_for
from lehr.training.metrics import MetricSums, read


class StopNow(Exception):
    """An interrupt arrived between two micro-batches; the attempt is given up."""


@dataclass(frozen=True)
class Accumulated:
    """What the backward passes of one update left besides the gradients.

    loss       Σ loss.total over all ranks ÷ denominator; not finite where any part is not
    nonfinite  micro-batches of this rank whose own loss is not finite
    """

    loss: float
    nonfinite: tuple[int, ...]
    metrics: MetricSums


def denominator_of(weights: Sequence[float], packs: Sequence[Pack], attempt: int) -> float:
    """Weight of the whole update over all ranks.

    Raises RecipeError where nothing is weighed: a loss of 0.0 would hide it.
    """
    denominator = ranks.all_sum(sum(weights))
    if not (denominator > 0 and math.isfinite(denominator)) or any(w < 0 for w in weights):
        origins = ", ".join(str(origin) for pack in packs for origin in pack.origins[:3])
        expected = (
            "a weight above 0: nothing in this update is supervised"
            if denominator == 0
            else "finite weights of at least 0"
        )
        raise RecipeError(Problem(f"attempt {attempt} ({origins})", expected, denominator))
    return denominator


def accumulate(
    model: nn.Module,
    objective: Objective,
    micro_batches: Sequence[Pack],
    weights: Sequence[float],
    denominator: float,
    seed_names: Sequence[object],
    precision: str,
    stop: Callable[[], bool] = lambda: False,
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    counting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    seen: Callable[[int, float], None] | None = None,
) -> Accumulated:
    """Backward through every micro-batch; gradients add up in the parameters.

    seed_names  names of the random stream of this update. Each micro-batch has its own
                stream, so dropout is a pure function of run, update, micro-batch and rank.
    scaled      what is done to a micro-batch's share of the loss before its backward pass
    counting    surrounds each forward pass, and no backward pass (which may recompute)
    seen        called with (examples, weight) after each backward pass
    Raises StopNow where `stop()` turns true between two micro-batches.
    """
    totals: list[tuple[int, Tensor]] = []
    metrics = MetricSums()
    device = next(model.parameters()).device
    for index, (pack, weight) in enumerate(zip(micro_batches, weights, strict=True)):
        if stop():
            raise StopNow
        if weight == 0:  # excluded pairs do not exist: no forward, nothing to poison
            continue
        seed_dropout(seed_for(*seed_names, "micro", index, "rank", ranks.rank()), device)
        with arithmetic(model, precision), counting():
            loss = objective.loss(model, pack)
        if not loss.total.requires_grad:
            expected = "a loss that depends on a trained tensor: all are frozen, or detached"
            raise RecipeError(Problem("objective", expected))
        scaled(loss.total / denominator).backward()
        if seen is not None:
            seen(len(pack.origins), weight)
        totals.append((index, loss.total.detach()))
        metrics.add(loss.metrics)
    values = read([total for _, total in totals])
    nonfinite = tuple(
        index for (index, _), value in zip(totals, values, strict=True) if not math.isfinite(value)
    )
    return Accumulated(ranks.all_sum(sum(values)) / denominator, nonfinite, metrics)


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seed the global generators of the CPU and of `device`.

    `torch.manual_seed` also notes a traceback for every absent accelerator: 1.7 ms a call
    measured, where this takes microseconds.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def arithmetic(model: Any, precision: str) -> AbstractContextManager[Any]:
    """Autocast to the precision, unless the model has chosen its own `compute_dtype`."""
    dtype = autocast_dtype(precision)
    if dtype is None or hasattr(model, "compute_dtype"):
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=dtype)
