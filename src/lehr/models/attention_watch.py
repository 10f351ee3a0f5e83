"""The largest attention logit of training's forward passes, from a few queries of each segment.

Fused kernels never write their logits down, so the largest one of all is not to be had. Logits
that run away do so over many queries, and a sample shows it:

    max over layers, heads, sampled queries i, keys j that i sees:  scale · q_i · k_j

A soft cap comes after it. Queries are chosen within their segment (its last one, the others evenly
spaced), never within the pack: any cut of an update into packs and ranks has the same maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lehr.models.attention_cpu import visible
from lehr.models.segments import SegmentPlan


def sampled_queries(length: int, count: int) -> list[int]:
    """At most `count` positions of a segment, evenly spaced, the last one always.

    >>> sampled_queries(10, 2), sampled_queries(3, 8), sampled_queries(7, 1)
    ([4, 9], [0, 1, 2], [6])
    """
    count = min(count, length)
    return sorted({(n + 1) * length // count - 1 for n in range(count)})


def largest_logit(
    query_htd: Tensor,
    key_ktd: Tensor,
    plan: SegmentPlan,
    scale: float,
    window: int | None,
    count: int,
) -> Tensor:
    """Of one layer, a scalar: query [H, T, D], key [K, T, D], `count` queries of a segment."""
    groups = key_ktd.shape[0]
    found = []
    for span in plan.spans:
        keys = visible(key_ktd, span).transpose(1, 2)
        for position in sampled_queries(span.length, count):
            seen = span.context_length + position + 1
            first = 0 if window is None else max(0, seen - window)
            query = query_htd[:, span.start + position].unflatten(0, (groups, -1))
            found.append(torch.bmm(query, keys[..., first:seen]).amax())
    return torch.stack(found).amax().float() * scale


class AttentionWatch:
    """Collects the largest logit of every layer and pack without waiting for the device."""

    def __init__(self, queries: int) -> None:
        self.queries = queries
        self._found: list[Tensor] = []

    @torch.no_grad()
    def look(
        self, query: Tensor, key: Tensor, plan: SegmentPlan, scale: float, window: int | None
    ) -> None:
        """One layer of one pack; computed again in the backward pass, it gives the same."""
        found = largest_logit(query, key, plan, scale, window, self.queries)
        self._found.append(found)

    def take(self) -> float | None:
        """The largest one since the last take; None where no layer was seen."""
        found, self._found = self._found, []
        return float(torch.stack(found).max()) if found else None
