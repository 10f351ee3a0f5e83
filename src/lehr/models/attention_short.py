"""Attention of short segments on a CPU: segments of like length in one padded product.

A kernel call a segment wastes a CPU: its products are too small for two cores. Here the rows of
all short segments are gathered once a layer, each batch of like lengths takes two products
forward and four backward, and what pads them is gathered from no one and given to no one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lehr.models.segments import SegmentPlan, Span

# A batch more costs about as much as so many (query, key) pairs that only pad.
BATCH_COST_PAIRS = 2000
# Queries of a product: fewer leave out more of what no query sees, more fill it better.
PIECE = 64


@dataclass(frozen=True)
class Batch:
    """`count` segments of at most `length` queries that see at most `seen` tokens.

    mask [count, length, seen], additive; a padded query sees what the last one does, so that
    its row is finite, and no one sees a padded key.
    """

    count: int
    length: int
    seen: int
    mask: Tensor


@dataclass(frozen=True)
class Layout:
    """Where the padded rows of all batches come from, and where they go to.

    A row is one head of one token: t · H + h of the queries, t · K + k of keys and values.

    query_rows   [Q] row of each padded query row, batch by batch: segment, K, H / K, query
    padding      those of the Q rows that only pad
    seen_rows    [M] row of each padded key row: segment, K, token
    own          (rows, places): rows of the output, and which of the Q rows hold them
    appearances  (rows, places) of the keys, once for each further time that a token is seen
    whole        `own` are all rows in order, and so are the first appearances
    """

    batches: tuple[Batch, ...]
    query_rows: Tensor
    padding: Tensor
    seen_rows: Tensor
    own: tuple[Tensor, Tensor]
    appearances: tuple[tuple[Tensor, Tensor], ...]
    whole: bool


def layout_of(
    plan: SegmentPlan,
    spans: Sequence[Span],
    heads: int,
    groups: int,
    window: int | None,
    device: torch.device,
) -> Layout:
    """The layout of `spans` of a plan: made once a pack, used by every layer."""
    key = (len(spans), heads, groups, window, device)
    if key not in plan.layouts:
        plan.layouts[key] = lay_out(spans, plan.tokens, heads, groups, window, device)
    found: Layout = plan.layouts[key]
    return found


def lay_out(
    spans: Sequence[Span],
    tokens: int,
    heads: int,
    groups: int,
    window: int | None,
    device: torch.device,
) -> Layout:
    """The layout of `spans` in a pack of `tokens` tokens, H heads over K groups of keys."""
    batches, own, seen, is_own, is_seen = [], [], [], [], []
    for members in in_batches([piece for span in spans for piece in pieces(span)]):
        length = max(span.length for span in members)
        total = max(span.context_length + span.length for span in members)
        before = torch.tensor([span.context_length for span in members])[:, None]
        lengths = torch.tensor([span.length for span in members])[:, None]
        query, key = torch.arange(length)[None], torch.arange(total)[None]
        within = query.minimum(lengths - 1)
        own.append(torch.tensor([span.start for span in members])[:, None] + within)
        is_own.append(query < lengths)
        seen.append(torch.stack([_seen_tokens(span, total) for span in members]))
        is_seen.append(key < before + lengths)
        at = (before + within)[:, :, None]
        allowed = key[:, None] <= at
        if window is not None:
            allowed &= at - key[:, None] < window
        mask = torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))
        batches.append(Batch(len(members), length, total, mask.to(device)))
    query_rows, real = _by_head(own, is_own, heads, groups, heads // groups)
    seen_rows, visible = _by_head(seen, is_seen, groups, groups, 1)
    places = torch.nonzero(real)[:, 0]
    places = places[query_rows[places].argsort()]
    rows = query_rows[places]
    times = appearances(seen_rows, torch.nonzero(visible)[:, 0])
    return Layout(
        tuple(batches),
        query_rows.to(device),
        torch.nonzero(~real)[:, 0].to(device),
        seen_rows.to(device),
        (rows.to(device), places.to(device)),
        tuple((a.to(device), b.to(device)) for a, b in times),
        len(rows) == tokens * heads and len(times[0][0]) == tokens * groups,
    )


def pieces(span: Span) -> list[Span]:
    """A span as pieces that continue one another: causality leaves out what no query sees.

    >>> pieces(Span(0, 200))[1]
    Span(start=66, length=67, context=((0, 66),))
    """
    count = max(1, round(span.length / PIECE))
    borders = [span.length * number // count for number in range(count + 1)]
    return [
        Span(
            span.start + begin,
            end - begin,
            (*span.context, (span.start, begin)) if begin else span.context,
        )
        for begin, end in itertools.pairwise(borders)
    ]


def in_batches(spans: Sequence[Span], cost_pairs: int = BATCH_COST_PAIRS) -> list[list[Span]]:
    """Spans of like size together: a batch's padding costs about as much as one batch more.

    >>> [len(batch) for batch in in_batches([Span(0, 100), Span(100, 96), Span(196, 20)])]
    [2, 1]
    """
    largest_first = sorted(
        spans, key=lambda span: (-span.context_length - span.length, -span.length, span.start)
    )
    batches: list[list[Span]] = []
    real = length = seen = 0
    for span in largest_first:
        own, total = span.length, span.context_length + span.length
        wider = max(length, own)
        area = wider * seen * (len(batches[-1]) + 1) if batches else 0
        if batches and area - real - own * total <= cost_pairs + area // 10:
            batches[-1].append(span)
            length, real = wider, real + own * total
            continue
        batches.append([span])
        length, seen, real = own, total, own * total
    return batches


def short_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Padded output [Q, D] of query [T · H, D], key and value [T · K, D], and what to keep.

    Scores are fp32: a large score rounded to bf16 would be off by units. Kept are the padded
    rows of all three and the shares of each batch [segments · K, H / K · n, m].
    """
    queries = query.index_select(0, layout.query_rows)
    keys = key.index_select(0, layout.seen_rows)
    values = value.index_select(0, layout.seen_rows)
    out = queries.new_empty(len(queries), value.shape[-1])
    kept = [queries, keys, values]
    for batch, own, seen in _slices(layout, len(queries), len(keys)):
        many = _heads(batch, own, seen)
        rows = queries[own].view(many, -1, query.shape[-1]).to(torch.float32, copy=True).mul_(scale)
        scores = torch.bmm(rows, keys[seen].view(many, batch.seen, -1).float().transpose(1, 2))
        scores.view(batch.count, -1, batch.length, batch.seen).add_(batch.mask[:, None])
        shares = torch.softmax(scores, -1).to(value.dtype)
        torch.bmm(
            shares,
            values[seen].view(many, batch.seen, -1),
            out=out[own].view(many, -1, value.shape[-1]),
        )
        kept.append(shares)
    return out, kept


def short_backward(
    grad: Tensor, kept: Sequence[Tensor], layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Padded gradients [Q, D], [M, D], [M, D] of query, key and value; grad [T · H, D]."""
    queries, keys, values, *all_shares = kept
    grads = grad.index_select(0, layout.query_rows).index_fill_(0, layout.padding, 0)
    by_query, by_key, by_value = (torch.empty_like(each) for each in (queries, keys, values))
    slices = _slices(layout, len(queries), len(keys))
    for (batch, own, seen), shares in zip(slices, all_shares, strict=True):
        many = _heads(batch, own, seen)
        rows = (many, -1, queries.shape[-1])
        grad_rows = grads[own].view(many, -1, grads.shape[-1])
        by_share = torch.bmm(grad_rows, values[seen].view(many, batch.seen, -1).transpose(1, 2))
        # Its sums are fp32 whatever the dtype.
        by_score = torch.ops.aten._softmax_backward_data(by_share, shares, -1, shares.dtype)
        torch.bmm(by_score, keys[seen].view(rows), out=by_query[own].view(rows))
        torch.bmm(by_score.transpose(1, 2), queries[own].view(rows), out=by_key[seen].view(rows))
        torch.bmm(shares.transpose(1, 2), grad_rows, out=by_value[seen].view(many, batch.seen, -1))
    return by_query.mul_(scale), by_key.mul_(scale), by_value


def own_rows(padded: Tensor, layout: Layout, into: Tensor) -> Tensor:
    """Rows of queries from their padded places; `into` [T · H, D] where others fill the rest."""
    rows, places = layout.own
    found = padded.index_select(0, places)
    return found if layout.whole else into.index_copy_(0, rows, found)


def seen_rows(padded: Tensor, layout: Layout, into: Tensor) -> Tensor:
    """Rows of keys [T · K, D]: what each of their appearances adds, in order."""
    (rows, places), *further = layout.appearances
    found = padded.index_select(0, places)
    if layout.whole:
        into = found
    else:
        into.index_copy_(0, rows, into.index_select(0, rows).add_(found))
    for rows, places in further:
        into.index_copy_(0, rows, into.index_select(0, rows).add_(padded.index_select(0, places)))
    return into


def _seen_tokens(span: Span, total: int) -> Tensor:
    """Tokens that a span sees, its last one repeated up to `total`."""
    pieces = [torch.arange(start, start + length) for start, length in span.context]
    rest = torch.arange(total - span.context_length).clamp_(max=span.length - 1)
    return torch.cat([*pieces, span.start + rest])


def _by_head(
    tokens: Sequence[Tensor], real: Sequence[Tensor], heads: int, groups: int, repeat: int
) -> tuple[Tensor, Tensor]:
    """Rows t · heads + h, and whether they are real, of each batch in the order its products need.

    tokens, real: [segments, n] a batch.
    """
    head = torch.arange(heads).view(1, groups, repeat, 1)
    rows, flags = [], []
    for each, flag in zip(tokens, real, strict=True):
        found = each[:, None, None, :] * heads + head
        rows.append(found.flatten())
        flags.append(flag[:, None, None, :].expand(found.shape).flatten())
    return torch.cat(rows), torch.cat(flags)


def appearances(rows: Tensor, places: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(rows, places) of the first time that each row appears, of the second, and so on.

    In the order of places, so that what is added for one row is added in one fixed order.
    """
    order = places[rows[places].argsort(stable=True)]
    sorted_rows = rows[order]
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = sorted_rows[1:] != sorted_rows[:-1]
    begins = torch.nonzero(first)[:, 0]
    since = torch.arange(len(order)) - begins[first.cumsum(0) - 1]
    return [
        (sorted_rows[since == time], order[since == time]) for time in range(int(since.max()) + 1)
    ]


def _slices(layout: Layout, queries: int, keys: int) -> list[tuple[Batch, slice, slice]]:
    """Each batch with its padded rows of queries and of keys."""
    padded_queries = sum(batch.count * batch.length for batch in layout.batches)
    padded_keys = sum(batch.count * batch.seen for batch in layout.batches)
    heads, groups = queries // padded_queries, keys // padded_keys
    found = []
    own = seen = 0
    for batch in layout.batches:
        until = own + batch.count * batch.length * heads
        seen_until = seen + batch.count * batch.seen * groups
        found.append((batch, slice(own, until), slice(seen, seen_until)))
        own, seen = until, seen_until
    return found


def _heads(batch: Batch, own: slice, seen: slice) -> int:
    """Products in the batch: one a segment and group of heads."""
    return (seen.stop - seen.start) // batch.seen
