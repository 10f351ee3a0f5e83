"""Who sees whom in a pack, as Python numbers that attention layers can use directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lehr.data.shapes import Segments

# Queries of a windowed segment at a time: fewer keep no core busy, more look at what most of
# them do not see.
BLOCK = 256, 512


@dataclass(frozen=True)
class Span:
    """`length` queries from `start`; `context`: (start, length) of what the segment continues."""

    start: int
    length: int
    context: tuple[tuple[int, int], ...] = ()

    @property
    def context_length(self) -> int:
        return sum(length for _, length in self.context)


class LooksAtAttention(Protocol):
    """Told of query [H, T, D] and key [K, T, D] of every attention layer."""

    def look(
        self, query: Tensor, key: Tensor, plan: SegmentPlan, scale: float, window: int | None
    ) -> None: ...


@dataclass
class SegmentPlan:
    """Segments as Python numbers, in order of their start; made once per pack.

    `calls` counts attention layers that used the plan: a model that ignores the
    attention interface leaves it at 0. `layouts` is where an attention keeps what it
    makes of the plan once. `watch` is told of each layer's queries and keys.
    """

    tokens: int
    spans: tuple[Span, ...]
    calls: int = 0
    layouts: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    watch: LooksAtAttention | None = None
    _masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    _windowed: dict[int, tuple[Span, ...]] = field(default_factory=dict)

    def seen(self, window: int | None) -> tuple[Span, ...]:
        """The spans, cut so that none has much before it that no query of it sees.

        Without a window these are `spans`. With one the cost of a segment is its length times
        the window, where a mask of the whole segment would cost its length squared.
        """
        if window is None:
            return self.spans
        if window not in self._windowed:
            cut = [part for span in self.spans for part in _windowed(span, window)]
            self._windowed[window] = tuple(cut)
        return self._windowed[window]

    def pairs(self, window: int | None = None) -> int:
        """How many (query, key) pairs see each other."""
        total = 0
        for span in self.spans:
            before, length = span.context_length, span.length
            if window is None or window >= before + length:
                total += length * before + length * (length + 1) // 2
            else:
                total += sum(min(window, before + query + 1) for query in range(length))
        return total

    def mask(
        self,
        span: Span,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor | None:
        """Additive mask [length, context + length], or None where plain causality is exact."""
        before = span.context_length
        total = before + span.length
        windowed = window is not None and window < total
        if not before and not windowed:
            return None
        key = (span.length, before, window if windowed else None, dtype, device)
        if key not in self._masks:
            query = torch.arange(before, total, device=device)[:, None]
            keys = torch.arange(total, device=device)[None, :]
            allowed = keys <= query
            if windowed:
                assert window is not None
                allowed &= query - keys < window
            mask = torch.zeros(span.length, total, dtype=dtype, device=device)
            self._masks[key] = mask.masked_fill_(~allowed, float("-inf"))
        return self._masks[key]


def plan_segments(segments: Segments, tokens: int) -> SegmentPlan:
    """The plan of a pack of `tokens` tokens.

    Raises ValueError unless the segments cover every token exactly once and each
    prefix comes before its branch.

    >>> s = Segments(torch.tensor([0, 2]), torch.tensor([2, 3]), torch.tensor([-1, 0]))
    >>> plan_segments(s, 5).spans[1]
    Span(start=2, length=3, context=((0, 2),))
    """
    starts = segments.start.tolist()
    lengths = segments.length.tolist()
    prefixes = segments.prefix.tolist()
    spans = []
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        context: list[tuple[int, int]] = []
        ancestor, below = prefixes[index], index
        while ancestor >= 0:
            if ancestor >= below:
                raise ValueError(
                    f"segment {below} continues segment {ancestor}, which is not before it"
                )
            context.insert(0, (starts[ancestor], lengths[ancestor]))
            ancestor, below = prefixes[ancestor], ancestor
        if length > 0:
            spans.append(Span(start, length, _joined(context)))
    spans.sort(key=lambda span: span.start)
    covered = 0
    for span in spans:
        if span.start != covered:
            raise ValueError(f"segments must cover each token once; token {covered} is not")
        covered += span.length
    if covered != tokens:
        raise ValueError(f"segments cover {covered} tokens of a pack of {tokens}")
    return SegmentPlan(tokens, tuple(spans))


def _windowed(span: Span, window: int) -> Iterator[Span]:
    """Blocks of a span's queries, each with what its first query sees as the context."""
    block = min(max(window, BLOCK[0]), BLOCK[1])
    before = (*span.context, (span.start, span.length))
    for first in range(0, span.length, block):
        length = min(block, span.length - first)
        reach = span.context_length + first  # tokens before the block
        context = _last(before, reach, min(reach, window - 1))
        yield Span(span.start + first, length, _joined(context))


def _last(pieces: Sequence[tuple[int, int]], total: int, wanted: int) -> list[tuple[int, int]]:
    """Of the first `total` tokens of `pieces` the last `wanted`, as pieces."""
    found: list[tuple[int, int]] = []
    at = 0
    for start, length in pieces:
        first, end = max(total - wanted - at, 0), min(length, total - at)
        if first < end:
            found.append((start + first, end - first))
        at += length
    return found


def _joined(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, length in pieces:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        elif length > 0:
            joined.append((start, length))
    return tuple(joined)
