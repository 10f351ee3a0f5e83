"""Log-probabilities of given texts under a model: the ground of suites that do not generate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lehr.data.packing import pack
from lehr.data.shapes import Encoded, Pack
from lehr.errors import Diverged, Problem

PACK_LENGTH = 1024


@dataclass(frozen=True)
class SequenceScore:
    """Natural log-probability of a sequence's supervised tokens, and their number."""

    log_probability: float
    tokens: int


@contextmanager
def scoring(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode is restored."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def sequence_scores(
    model: Any, encoded: Sequence[Encoded], pack_length: int = PACK_LENGTH
) -> list[list[SequenceScore]]:
    """One list per example: its branches' scores in their order, or its own single score.

    Examples are packed and isolated by segments; the pack length changes speed only.
    Raises Diverged, naming the row, where a log-probability is not finite.
    """
    results: list[list[SequenceScore]] = [[] for _ in encoded]
    with scoring(model):
        packing = getattr(model, "packs_exactly", True)
        for one in pack(list(enumerate(encoded)), pack_length, packing):
            _score_pack(model, one, results)
    return results


def _score_pack(model: Any, one: Pack, results: list[list[SequenceScore]]) -> None:
    if one.targets.numel() == 0:
        for example in one.sequence_example.tolist():
            results[one.items[example]].append(SequenceScore(0.0, 0))
        return
    hidden = model.hidden(one)
    stats = model.token_stats(hidden, one.predict_from, one.targets)
    sums = one.sequence_sum(stats.log_probability.detach().double().cpu())
    counts = one.sequence_sum(torch.ones(one.targets.numel(), dtype=torch.float64))
    for example, total, count in zip(
        one.sequence_example.tolist(), sums.tolist(), counts.tolist(), strict=True
    ):
        if not math.isfinite(total):
            raise Diverged(Problem(str(one.origins[example]), "finite log-probabilities"))
        results[one.items[example]].append(SequenceScore(total, int(count)))
