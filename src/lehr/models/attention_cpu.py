"""Attention over segments on a CPU: plain products for short ones, a kernel call for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lehr.models.attention_short import (
    layout_of,
    own_rows,
    seen_rows,
    short_backward,
    short_forward,
)
from lehr.models.segments import SegmentPlan, Span

# Plain products beat the flash kernel for so many tokens seen and more (at 512 tokens by half, at
# 1,024 by a third); beyond, the shares that they keep are the larger part of what a layer keeps.
SHORT = 512


class CpuSegments(torch.autograd.Function):
    """Query [H, T, D], key and value [K, T, D] of a pack -> [T, H, D].

    Short segments are computed in batches (attention_short), the others by one kernel call
    each. Grouped heads are a view of stride 0 (no copies of keys and values), and gradients
    of a shared prompt are added in one fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_htd: Tensor,
        key_ktd: Tensor,
        value_ktd: Tensor,
        plan: SegmentPlan,
        scale: float,
        window: int | None,
    ) -> Tensor:
        inputs = (query_htd, key_ktd, value_ktd)
        short, long = _by_length(plan.seen(window), query_htd.dtype)
        out_thd = query_htd.new_empty(*query_htd.shape[1::-1], value_ktd.shape[-1])
        layout = None
        kept: list[Tensor] = []
        if short:
            layout = layout_of(plan, short, *_heads(inputs), window, query_htd.device)
            rows = _rows(query_htd), _rows(key_ktd), _rows(value_ktd)
            padded, kept = short_forward(*rows, layout, scale)
            out_thd = own_rows(padded, layout, out_thd.flatten(0, 1)).view(out_thd.shape)
        if long:
            kept += [*inputs, out_thd, *_long_forward(*inputs, out_thd, plan, long, scale, window)]
        ctx.save_for_backward(*kept)
        ctx.shapes = [(each.shape[1], each.shape[0], each.shape[2]) for each in inputs]
        ctx.layout, ctx.long, ctx.plan, ctx.scale, ctx.window = layout, long, plan, scale, window
        return out_thd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_thd: Tensor) -> tuple[Tensor | None, ...]:
        kept, layout = ctx.saved_tensors, ctx.layout
        shorts = 0 if layout is None else 3 + len(layout.batches)
        # Long segments add to what begins as 0; with short ones alone every row is written once.
        grads = [grad_thd.new_zeros(shape if ctx.long else 0) for shape in ctx.shapes]
        if ctx.long:
            into = [grad.transpose(0, 1) for grad in grads]
            _long_backward(grad_thd, kept[shorts:], into, ctx.plan, ctx.long, ctx.scale, ctx.window)
        if layout is not None:
            padded = short_backward(grad_thd.flatten(0, 1), kept[:shorts], layout, ctx.scale)
            takes = (own_rows, seen_rows, seen_rows)
            grads = [
                take(each, layout, grad.view(-1, shape[-1])).view(shape)
                for take, each, grad, shape in zip(takes, padded, grads, ctx.shapes, strict=True)
            ]
        return *(grad.transpose(0, 1) for grad in grads), None, None, None


def is_short(span: Span, dtype: torch.dtype) -> bool:
    """Whether plain products compute this segment: its shares [H, n, m] are kept."""
    return dtype in (torch.bfloat16, torch.float32) and span.context_length + span.length <= SHORT


def _by_length(spans: Sequence[Span], dtype: torch.dtype) -> tuple[list[Span], list[Span]]:
    """The spans that plain products compute, and the others."""
    short = [span for span in spans if is_short(span, dtype)]
    return short, [span for span in spans if not is_short(span, dtype)]


def _heads(inputs: Sequence[Tensor]) -> tuple[int, int]:
    return inputs[0].shape[0], inputs[1].shape[0]


def _rows(rows_htd: Tensor) -> Tensor:
    """[H, T, D] as rows [T · H, D]; a view where heads of a token lie side by side."""
    return rows_htd.transpose(0, 1).reshape(-1, rows_htd.shape[-1])


def _long_forward(
    query_htd: Tensor,
    key_ktd: Tensor,
    value_ktd: Tensor,
    out_thd: Tensor,
    plan: SegmentPlan,
    spans: Sequence[Span],
    scale: float,
    window: int | None,
) -> list[Tensor]:
    """Write the output of `spans` into `out_thd`; the logarithm of each row's normaliser."""
    normalisers = []
    for span in spans:
        mask = plan.mask(span, window, query_htd.dtype, query_htd.device)
        out, one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_grouped(query_htd, key_ktd, value_ktd, span),
            0.0,
            mask is None,
            attn_mask=mask,
            scale=scale,
        )
        rows = out_thd[span.start : span.start + span.length]
        rows.view(span.length, *out.shape[:2], -1).copy_(out.permute(2, 0, 1, 3))
        normalisers.append(one)
    return normalisers


def _long_backward(
    grad_thd: Tensor,
    kept: Sequence[Tensor],
    into: Sequence[Tensor],
    plan: SegmentPlan,
    spans: Sequence[Span],
    scale: float,
    window: int | None,
) -> None:
    """Add the gradients of `spans` to those [H, T, D], [K, T, D], [K, T, D] of the pack."""
    query_htd, key_ktd, value_ktd, out_thd, *normalisers = kept
    grad_query, grad_key, grad_value = into
    groups = key_ktd.shape[0]
    for span, one in zip(spans, normalisers, strict=True):
        own = slice(span.start, span.start + span.length)
        mask = plan.mask(span, window, query_htd.dtype, query_htd.device)
        query_part, key_part, value_part = _grouped(query_htd, key_ktd, value_ktd, span)
        by_query, by_key, by_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _split_heads(grad_thd[own].transpose(0, 1), groups),
                query_part,
                key_part,
                value_part,
                _split_heads(out_thd[own].transpose(0, 1), groups),
                one,
                0.0,
                mask is None,
                attn_mask=mask,
                scale=scale,
            )
        )
        grad_query[:, own] = by_query.flatten(0, 1)
        _add_to_seen(grad_key, grad_value, by_key.sum(1), by_value.sum(1), span)


def _add_to_seen(
    grad_key: Tensor, grad_value: Tensor, by_key: Tensor, by_value: Tensor, span: Span
) -> None:
    """Add gradients [K, m, D] to what the span sees, its context first."""
    at = 0
    for start, length in (*span.context, (span.start, span.length)):
        grad_key[:, start : start + length] += by_key[:, at : at + length]
        grad_value[:, start : start + length] += by_value[:, at : at + length]
        at += length


def _split_heads(rows_htd: Tensor, groups: int) -> Tensor:
    return rows_htd.unflatten(0, (groups, rows_htd.shape[0] // groups))


def _grouped(
    query_htd: Tensor, key_ktd: Tensor, value_ktd: Tensor, span: Span
) -> tuple[Tensor, Tensor, Tensor]:
    """Views [K, H/K, n, D] of the queries and [K, H/K (stride 0), m + n, D] of keys and values."""
    groups = key_ktd.shape[0]
    query = _split_heads(query_htd[:, span.start : span.start + span.length], groups)
    shape = (-1, query.shape[1], -1, -1)
    return (
        query,
        visible(key_ktd, span).unsqueeze(1).expand(shape),
        visible(value_ktd, span).unsqueeze(1).expand(shape),
    )


def visible(rows_ktd: Tensor, span: Span) -> Tensor:
    """What a span sees of [K, T, D]: its context, then itself; a view where both adjoin."""
    own = rows_ktd[:, span.start : span.start + span.length]
    if not span.context:
        return own
    if sum(span.context[0]) == span.start and len(span.context) == 1:
        return rows_ktd[:, span.context[0][0] : span.start + span.length]
    pieces = [rows_ktd[:, start : start + length] for start, length in span.context]
    return torch.cat([*pieces, own], dim=1)
