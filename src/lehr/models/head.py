"""The fused head: log-probabilities of the pairs that are trained, chunk by chunk.

For a hidden state h and the head's matrix W, logits are z = cap(scale * (h Wᵀ + b)), and
log p(y) = z_y - log Z with log Z = log Σ exp z. A chunk's logits live only while it is
worked on, so logits of all positions never exist: a frozen head takes what its gradient
needs from them at once, one that trains makes them again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lehr.device import moved
from lehr.models.head_chunks import Head, bf16_products_pay, chunk_rows, wide
from lehr.models.head_functions import FrozenHead, FusedHead, OrderedGather

__all__ = [
    "Head",
    "OrderedGather",
    "TokenStats",
    "bf16_products_pay",
    "chunk_rows",
    "divergence",
    "head_of",
    "token_stats",
]


@dataclass(frozen=True)
class TokenStats:
    """Per pair [R], fp32: log-probability, log Z (both differentiable); more on request."""

    log_probability: Tensor
    log_z: Tensor
    entropy: Tensor | None = None
    argmax: Tensor | None = None


def token_stats(
    hidden_td: Tensor,
    predict_from: Tensor,
    targets: Tensor,
    head: Head,
    *,
    entropy: bool = False,
    argmax: bool = False,
    chunk: int | None = None,
) -> TokenStats:
    """Statistics of the pairs (`predict_from`, `targets`) [R] of hidden states [T, d].

    Pairs on the CPU are checked there and moved to where the hidden states are. Raises
    ValueError for a target outside the vocabulary.
    """
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < len(head.weight):
        raise ValueError(f"a target is outside the vocabulary of {len(head.weight)} tokens")
    targets = moved(targets, hidden_td.device)
    # Autocast must not touch the products here: their dtypes are chosen above.
    with torch.autocast(hidden_td.device.type, enabled=False):
        picked = OrderedGather.apply(hidden_td, predict_from)
        fixed = head.detached()
        rest = (targets, fixed, chunk_rows(len(head.weight), chunk), entropy, argmax)
        trains = head.weight.requires_grad or (head.bias is not None and head.bias.requires_grad)
        if trains or not torch.is_grad_enabled() or not _needs_gradient(picked, head):
            found = FusedHead.apply(picked, head.weight, head.bias, head.rows, *rest)
        else:
            found = FrozenHead.apply(picked, head.rows, *rest)
        log_probability, log_z, entropies, best = found
    return TokenStats(log_probability, log_z, entropies, best)


def _needs_gradient(picked: Tensor, head: Head) -> bool:
    return picked.requires_grad or (head.rows is not None and head.rows.requires_grad)


@torch.no_grad()
def divergence(
    hidden_p: Tensor,
    hidden_q: Tensor,
    positions: Tensor,
    head_p: Head,
    head_q: Head,
    chunk: int | None = None,
) -> Tensor:
    """KL(p || q) [R] in nats over the whole vocabulary at `positions` of hidden states [T, d].

    Exactly 0 where both sides are the same numbers.
    """
    rows = chunk_rows(len(head_p.weight), chunk)
    result = torch.empty(positions.numel(), dtype=wide(hidden_p).dtype, device=hidden_p.device)
    for start in range(0, positions.numel(), rows):
        at = positions[start : start + rows]
        log_p = torch.log_softmax(head_p.logits(hidden_p[at]), 1)
        log_q = torch.log_softmax(head_q.logits(hidden_q[at]), 1)
        result[start : start + rows] = (log_p.exp() * (log_p - log_q)).sum(1).clamp_min(0.0)
    return result


def head_of(network: Any) -> Head:
    """The head of a transformers causal language model: scale, cap, bias and trained rows too."""
    layer: Any = network.get_output_embeddings()
    config = (
        network.config.get_text_config()
        if hasattr(network.config, "get_text_config")
        else network.config
    )
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        scale /= float(divisor)
    softcap = getattr(config, "final_logit_softcapping", None)
    active = getattr(layer, "adapter_active", False)
    return Head(
        weight=layer.weight,
        bias=getattr(layer, "bias", None),
        rows=getattr(layer, "rows", None) if active else None,
        row_ids=getattr(layer, "row_ids", None) if active else None,
        scale=scale,
        softcap=float(softcap) if softcap else None,
    )
