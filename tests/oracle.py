"""lehr's mathematics in plain padded torch: what every fast path is checked against.

One branch per row, right padding, transformers' own attention, full logits, autograd.
Slow and obvious on purpose. A researcher who wants to know what lehr computes reads
this file; a fast path that disagrees with it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lehr.data.shapes import Encoded, Pack
from lehr.models.attention import attention


@dataclass(frozen=True)
class Row:
    """One sequence alone: its tokens, and which of them are targets (never token 0)."""

    ids: Tensor  # int64 [t]
    supervised: Tensor  # bool [t]
    example: int  # index of the Encoded it came from


def rows_of(encoded: Sequence[Encoded]) -> list[Row]:
    """One row per example, or per branch with its whole prompt before it."""
    rows = []
    for index, example in enumerate(encoded):
        if not example.branches:
            rows.append(Row(example.ids, example.supervised.clone(), index))
        for branch in example.branches:
            ids = torch.cat([example.ids, branch.ids])
            # The prompt of a branched example carries no targets of its own.
            flags = torch.cat([torch.zeros_like(example.supervised), branch.supervised])
            rows.append(Row(ids, flags, index))
    for row in rows:
        row.supervised[0] = False
    return rows


def rows_of_pack(pack: Pack) -> list[tuple[Tensor, list[int], list[int]]]:
    """For each sequence of a pack: its ids alone; its pairs' source positions; their indices."""
    starts, lengths = pack.segments.start.tolist(), pack.segments.length.tolist()
    prefixes = pack.segments.prefix.tolist()
    rows = []
    for number in range(pack.sequences):
        pairs = torch.nonzero(pack.sequence == number)[:, 0].tolist()
        last = max(int(pack.predict_from[pair]) for pair in pairs)
        segment = next(s for s in range(len(starts)) if starts[s] <= last < starts[s] + lengths[s])
        chain = [segment]
        while prefixes[chain[0]] >= 0:
            chain.insert(0, prefixes[chain[0]])
        where = torch.cat([torch.arange(starts[s], starts[s] + lengths[s]) for s in chain])
        at = {int(position): index for index, position in enumerate(where)}
        sources = [at[int(pack.predict_from[pair])] for pair in pairs]
        rows.append((pack.ids[where], sources, pairs))
    return rows


def logits_of(network: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """Full logits [t, V] in fp32 of each row, from one right-padded forward pass."""
    longest = max(len(ids) for ids in rows)
    batch = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, ids in enumerate(rows):
        batch[index, : len(ids)] = ids
        mask[index, : len(ids)] = 1
    with attention(network):
        logits = network(input_ids=batch, attention_mask=mask, use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return [wide[index, : len(ids)] for index, ids in enumerate(rows)]


def log_probabilities(network: Any, rows: Sequence[Row]) -> list[Tensor]:
    """log p(token | tokens before it) of each row's targets, in order."""
    result = []
    for row, logits in zip(rows, logits_of(network, [row.ids for row in rows]), strict=True):
        targets = torch.nonzero(row.supervised)[:, 0]
        all_of_them = torch.log_softmax(logits[targets - 1], -1)
        result.append(all_of_them[torch.arange(len(targets)), row.ids[targets]])
    return result


def pack_log_probabilities(network: Any, pack: Pack) -> Tensor:
    """log p of every pair [R] of a pack, each sequence alone in a row."""
    rows = rows_of_pack(pack)
    result: list[Tensor | None] = [None] * len(pack.targets)
    for (_, sources, pairs), logits in zip(
        rows, logits_of(network, [ids for ids, _, _ in rows]), strict=True
    ):
        for source, pair in zip(sources, pairs, strict=True):
            result[pair] = torch.log_softmax(logits[source], -1)[pack.targets[pair]]
    return torch.stack([value for value in result if value is not None])


def language_loss(network: Any, encoded: Sequence[Encoded]) -> Tensor:
    """Mean over all targets of the update of -log p: nats per token."""
    values = torch.cat(log_probabilities(network, rows_of(encoded)))
    return -values.sum() / values.numel()


def bits_per_byte(network: Any, encoded: Sequence[Encoded]) -> float:
    """Bits that the model needs per UTF-8 byte of the supervised text."""
    values = torch.cat(log_probabilities(network, rows_of(encoded)))
    size = sum(
        example.supervised_bytes + sum(branch.supervised_bytes for branch in example.branches)
        for example in encoded
    )
    return float(-values.sum()) / math.log(2) / size


def answer_sums(network: Any, encoded: Sequence[Encoded]) -> Tensor:
    """Σ log p of each branch [pairs, 2]: chosen, rejected."""
    values = [row.sum() for row in log_probabilities(network, rows_of(encoded))]
    return torch.stack(values).view(len(encoded), 2)


def dpo_loss(
    network: Any,
    encoded: Sequence[Encoded],
    reference: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean over pairs of -log sigmoid(beta * margin) (Rafailov et al. 2023, eq. 7).

    reference [pairs, 2] holds the frozen model's answer_sums. Label smoothing is the
    chance that a preference is the wrong way round.
    """
    ratios = answer_sums(network, encoded) - reference
    margin = beta * (ratios[:, 0] - ratios[:, 1])
    right = torch.nn.functional.logsigmoid(margin)
    wrong = torch.nn.functional.logsigmoid(-margin)
    return -((1 - label_smoothing) * right + label_smoothing * wrong).mean()


def divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p || q) in nats per row of logits [r, V]."""
    log_p, log_q = torch.log_softmax(logits_p, -1), torch.log_softmax(logits_q, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient of `loss` by each named parameter."""
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def relative_gap(one: Tensor, two: Tensor) -> float:
    """‖one - two‖ / ‖two‖ (0 where both are 0): how far two gradients are apart."""
    size = float(two.double().norm())
    apart = float((one.double() - two.double()).norm())
    return apart / size if size else apart
