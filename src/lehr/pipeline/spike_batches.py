"""The batch of a spike and its neighbours in the data, as a stage draws them; their losses."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lehr.data.packing import merge, pack
from lehr.data.shapes import Encoded, Pack
from lehr.diagnosis.spike import AFTER, BEFORE, Row, Values, norms, worst
from lehr.objectives.base import Objective
from lehr.stages.context import StageContext
from lehr.streams import seed_for
from lehr.training import gradients
from lehr.training.batch import cut
from lehr.training.state import trained_parameters
from lehr.training.update import accumulate, arithmetic, seed_dropout

Items = list[tuple[int, Encoded]]


@dataclass(frozen=True)
class Around:
    """Items of the batch, and of the batches before and after it without the batch's own rows.

    An epoch later the batch's rows stand in other batches: they must not make themselves usual.
    """

    batch: Items
    before: list[Items]
    after: list[Items]

    @classmethod
    def of(cls, context: StageContext, begin: Any, attempt: int) -> Around:
        """Of attempt number `attempt`; `begin`: state of the batches before the first one."""
        known = dict(context.batches.items())
        context.batches.load(begin)
        first = max(1, attempt - BEFORE)
        drawn: dict[int, Items] = {}
        for number in range(1, attempt + BEFORE + AFTER - (attempt - first) + 1):
            packs = context.batches.next()
            if number >= first:
                drawn[number] = [(item, known[item]) for one in packs for item in one.items]
        own = {str(known[item].origin) for item, _ in drawn[attempt]}
        others = {
            number: [(item, one) for item, one in items if str(one.origin) not in own]
            for number, items in drawn.items()
            if number != attempt
        }
        before = [items for number, items in others.items() if items and number < attempt]
        after = [items for number, items in others.items() if items and number > attempt]
        return cls(drawn[attempt], before, after)

    @property
    def count(self) -> int:
        return len(self.before) + len(self.after)


def measured(
    context: StageContext, objective: Objective, around: Around, with_norms: bool
) -> tuple[Values, Values | None]:
    """Losses, and gradient norms where they are asked for, with the model as it is."""

    def of(items: Items) -> tuple[float, float]:
        packs = pack(items, context.pack_length, context.stage.packing)
        return signals(context, objective, packs, with_norms)

    batch, before, after = (
        of(around.batch),
        [of(items) for items in around.before],
        [of(items) for items in around.after],
    )
    losses = Values(batch[0], tuple(a for a, _ in before), tuple(a for a, _ in after))
    if not with_norms:
        return losses, None
    return losses, norms(batch[1], [b for _, b in before], [b for _, b in after])


def signals(
    context: StageContext, objective: Objective, packs: Sequence[Pack], with_norm: bool
) -> tuple[float, float]:
    """(loss, gradient norm or NaN) of an update's packs as the engine computes them."""
    settings = context.settings
    parts = cut(list(packs), settings.micro_batch, merge)
    weights = [float(objective.weight(part)) for part in parts]
    total = sum(weights)
    if total <= 0:
        return math.nan, math.nan
    trained = trained_parameters(context.model, settings.precision)
    names = (context.seed, context.stage.kind, "spike")
    context.model.train()
    if with_norm:
        done = accumulate(
            context.model, objective, parts, weights, total, names, settings.precision
        )
        norm = gradients.measure(trained).norm
        gradients.clear(trained)
        return done.loss, norm
    with torch.no_grad():
        return forward_loss(context, objective, parts, weights, names) / total, math.nan


def forward_loss(
    context: StageContext,
    objective: Objective,
    parts: Sequence[Pack],
    weights: Sequence[float],
    names: Sequence[object],
) -> float:
    """The sum of the parts' losses, with the dropout that `accumulate` would draw."""
    total = 0.0
    for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if weight == 0:
            continue
        seed_dropout(seed_for(*names, "micro", index, "rank", 0), context.model.device)
        with arithmetic(context.model, context.settings.precision):
            total += float(objective.loss(context.model, part).total)
    return total


def rows_alone(context: StageContext, objective: Objective, around: Around) -> tuple[Row, ...]:
    """The batch's rows with the largest losses, each row computed alone."""
    losses: dict[str, float] = {}
    for item, one in around.batch:
        packs = pack([(item, one)], context.pack_length, False)
        name = f"{os.path.normpath(one.origin.file)}:{one.origin.line}"
        losses[name] = signals(context, objective, packs, False)[0]
    return worst(losses)
