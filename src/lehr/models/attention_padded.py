"""Attention over segments on a card: segments of like size in one kernel call.

A card takes longer to be given a short segment than to compute it. So the tokens of a pack are
gathered into a few batches [segments, heads, n, D], padded at their ends. A plain segment needs no
mask there: causality hides what comes after its last token. What continues another segment, and
what has a window, gets a mask [segments, 1, n, m], made once a pack; none of the whole pack exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lehr.device import moved
from lehr.models.attention_short import appearances, in_batches
from lehr.models.segments import SegmentPlan, Span

# A batch more costs a card about as much as so many (query, key) pairs that only pad.
BATCH_COST_PAIRS = 500_000
GRAIN = 8  # keys under a mask: kernels copy a mask whose rows are no multiple of it


@dataclass(frozen=True)
class Batch:
    """`count` segments of at most `length` queries that see at most `seen` tokens.

    mask  [count, 1, length, seen], additive; None: each query sees its own token and those before.
          A padded query sees what the last one does, so that its row is finite
    """

    count: int
    length: int
    seen: int
    mask: Tensor | None


@dataclass(frozen=True)
class Rows:
    """Tokens as the rows of padded batches, and the way back.

    tokens  [Q] of each padded row, batch by batch
    own     [T] the row that holds each token of the pack for the first time
    further (tokens, rows): once for each further time that a token is seen
    """

    tokens: Tensor
    own: Tensor
    further: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True)
class Layout:
    """The batches of a pack, where their queries come from, and what they see."""

    batches: tuple[Batch, ...]
    queries: Rows
    seen: Rows


class Gathered(torch.autograd.Function):
    """Rows [Q, H, D] of tokens [T, H, D]; gradients of one token are added in a fixed order."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return given.index_select(0, rows.tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        into = grad.index_select(0, ctx.rows.own)
        for tokens, rows in ctx.rows.further:
            more = into.index_select(0, tokens).add_(grad.index_select(0, rows))
            into.index_copy_(0, tokens, more)
        return into, None


class Returned(torch.autograd.Function):
    """Tokens [T, H, D] of the padded rows [Q, H, D] of queries."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.size = rows, padded.shape
        return padded.index_select(0, rows.own)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.size).index_copy_(0, ctx.rows.own, grad), None


def padded_attention(
    query_htd: Tensor,
    key_ktd: Tensor,
    value_ktd: Tensor,
    plan: SegmentPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Query [H, T, D], key and value [K, T, D] of a pack -> [T, H, D], on any device."""
    layout = layout_of(plan, window, softcap is not None, query_htd.dtype, query_htd.device)
    repeats = query_htd.shape[0] // key_ktd.shape[0]
    queries = Gathered.apply(query_htd.transpose(0, 1), layout.queries)
    keys, values = (
        Gathered.apply(each.transpose(0, 1), layout.seen) for each in (key_ktd, value_ktd)
    )
    parts = []
    own = seen = 0
    for batch in layout.batches:
        query = _of_batch(queries, own, batch.count, batch.length)
        key, value = (
            # Kernels that share keys among heads do not all take a mask: they are repeated.
            _of_batch(each, seen, batch.count, batch.seen).repeat_interleave(repeats, 1)
            for each in (keys, values)
        )
        if softcap is None:
            part = F.scaled_dot_product_attention(
                query, key, value, batch.mask, 0.0, batch.mask is None, scale=scale
            )
        else:
            assert batch.mask is not None
            logits = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
            shares = torch.softmax(logits + batch.mask, -1, dtype=torch.float32)
            part = shares.to(value.dtype) @ value
        parts.append(part.transpose(1, 2).flatten(0, 1))
        own, seen = own + batch.count * batch.length, seen + batch.count * batch.seen
    out: Tensor = Returned.apply(torch.cat(parts), layout.queries)
    return out


def _of_batch(rows: Tensor, start: int, count: int, length: int) -> Tensor:
    """[count, H, length, D] of the rows [Q, H, D] from `start`."""
    part = rows[start : start + count * length]
    return part.view(count, length, *rows.shape[1:]).transpose(1, 2)


def layout_of(
    plan: SegmentPlan, window: int | None, masks: bool, dtype: torch.dtype, device: torch.device
) -> Layout:
    """The layout of a plan: made once a pack, used by every layer.

    masks  also where causality alone would do
    """
    key = ("padded", window, masks, dtype, device)
    if key not in plan.layouts:
        plan.layouts[key] = lay_out(plan.seen(window), plan.tokens, window, masks, dtype, device)
    found: Layout = plan.layouts[key]
    return found


def lay_out(
    spans: Sequence[Span],
    tokens: int,
    window: int | None,
    masks: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """The layout of `spans`, which cover `tokens` tokens; made on the CPU, then moved."""
    plain = [span for span in spans if not masks and _is_plain(span, window)]
    others = [span for span in spans if masks or not _is_plain(span, window)]
    batches, own, seen, is_own, is_seen = [], [], [], [], []
    for members in [one for kind in (plain, others) for one in in_batches(kind, BATCH_COST_PAIRS)]:
        masked = members[0] in others
        length = max(span.length for span in members)
        total = max(span.context_length + span.length for span in members)
        total = -(-total // GRAIN) * GRAIN if masked else length
        before = torch.tensor([span.context_length for span in members])[:, None]
        lengths = torch.tensor([span.length for span in members])[:, None]
        query, key = torch.arange(length)[None], torch.arange(total)[None]
        within = query.minimum(lengths - 1)
        own.append((torch.tensor([span.start for span in members])[:, None] + within).flatten())
        is_own.append((query < lengths).flatten())
        seen.append(torch.cat([_seen_tokens(span, total) for span in members]))
        is_seen.append((key < before + lengths).flatten())
        mask = _mask(before + within, key, window, dtype) if masked else None
        mask = None if mask is None else moved(mask, device)
        batches.append(Batch(len(members), length, total, mask))
    return Layout(
        tuple(batches),
        _rows(torch.cat(own), torch.cat(is_own), tokens, device),
        _rows(torch.cat(seen), torch.cat(is_seen), tokens, device),
    )


def _is_plain(span: Span, window: int | None) -> bool:
    return not span.context and (window is None or window >= span.length)


def _mask(at: Tensor, key: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """[segments, 1, n, m] of the queries' places `at` [segments, n] among the keys [1, m]."""
    allowed = key[:, None] <= at[:, :, None]
    if window is not None:
        allowed &= at[:, :, None] - key[:, None] < window
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))[:, None]


def _seen_tokens(span: Span, total: int) -> Tensor:
    """Tokens that a span sees, its last one repeated up to `total`."""
    pieces = [torch.arange(start, start + length) for start, length in span.context]
    rest = torch.arange(total - span.context_length).clamp_(max=span.length - 1)
    return torch.cat([*pieces, span.start + rest])


def _rows(tokens: Tensor, real: Tensor, count: int, device: torch.device) -> Rows:
    first, *further = appearances(tokens, torch.nonzero(real)[:, 0])
    assert len(first[0]) == count, "each token stands in a batch"
    return Rows(
        moved(tokens, device),
        moved(first[1], device),
        tuple((moved(a, device), moved(b, device)) for a, b in further),
    )
