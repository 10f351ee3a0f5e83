"""Next-token prediction on the supervised pairs: pretraining and supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lehr.data.shapes import Pack
from lehr.device import moved
from lehr.objectives.base import Loss, Number


@dataclass(frozen=True)
class Language:
    """Cross-entropy as a sum over pairs, in nats:  L = Σ_r w_r (−log p(target_r) + c log² Z_r).

    z_loss      c: holds the normaliser Z near 1, so that logits do not drift (PaLM,
                arXiv 2204.02311, section 5); 0 = none
    accuracy    also report how often the most likely token is the target
    per_source  also report `source.<name>.loss` for each data source in the pack
    """

    z_loss: float = 0.0
    accuracy: bool = True
    per_source: bool = True

    def weight(self, pack: Pack) -> float:
        """Σ w_r; with weights of 1 the number of supervised tokens."""
        return float(pack.weights.sum(dtype=torch.float64))

    def loss(self, model: Any, pack: Pack) -> Loss:
        """`model` gives `hidden(pack)` [T, d] and `token_stats(...)`, see lehr.models."""
        stats = model.token_stats(
            model.hidden(pack), pack.predict_from, pack.targets, argmax=self.accuracy
        )
        log_probability = stats.log_probability
        weights = moved(pack.weights, log_probability.device)
        losses = -weights * log_probability
        total = losses.sum()
        weight = self.weight(pack)
        metrics: dict[str, tuple[Number, Number]] = {
            "loss": (total.detach(), weight),
            "log_z": ((weights * stats.log_z.detach()).sum(), weight),
        }
        if self.z_loss:
            extra = self.z_loss * (weights * stats.log_z.square()).sum()
            metrics["z_loss"] = (extra.detach(), weight)
            total = total + extra
        if self.accuracy:
            right = (stats.argmax == moved(pack.targets, stats.argmax.device)).to(weights.dtype)
            metrics["accuracy"] = ((weights * right).sum(), weight)
        if self.per_source:
            metrics |= source_losses(pack, losses.detach())
        return Loss(total=total, metrics=metrics)


def source_losses(pack: Pack, losses: Tensor) -> dict[str, tuple[Number, Number]]:
    """Per-pair `losses` [R] summed by the source of their example, with the weights."""
    sources = sorted({origin.source for origin in pack.origins})
    if len(sources) == 1:
        return {f"source.{sources[0]}.loss": (losses.sum(), float(pack.weights.sum()))}
    index = {source: position for position, source in enumerate(sources)}
    source_of_example = torch.tensor([index[origin.source] for origin in pack.origins])
    source_of_pair = source_of_example[pack.sequence_example][pack.sequence]
    sums = torch.zeros(len(sources), dtype=losses.dtype, device=losses.device)
    sums = sums.index_add(0, moved(source_of_pair, losses.device), losses)
    weights = torch.zeros(len(sources)).index_add(0, source_of_pair, pack.weights).tolist()
    return {
        f"source.{source}.loss": (sums[position], weights[position])
        for source, position in index.items()
        if weights[position] > 0
    }
