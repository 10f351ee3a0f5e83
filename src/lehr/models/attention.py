"""Attention over segments, under the name `lehr_segments` in transformers' attention interface.

A pack holds many sequences in one row of tokens. Each segment is causal in itself and
sees all of the segments that it continues; no mask of the whole pack ever exists, and
no padding. The plan of who sees whom travels through the model's keyword arguments:

    network(input_ids=..., position_ids=..., segments=plan_segments(pack.segments, T))

Plain causal attention is what `sdpa` computes; a branch of length n that continues a
prompt of length m attends with a mask [n, m + n], made once per pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lehr.models.replay import unit
from lehr.models.segments import SegmentPlan, Span

# "flash" or "/" in the name would be taken for a kernel from the hub.
NAME = "lehr_segments"

# Plain products beat the flash kernel's backward for so few tokens seen, in this dtype.
SHORT, SHORT_DTYPE = 192, torch.bfloat16

# Keyword arguments that transformers passes along and that do not change attention.
_HARMLESS = frozenset(
    [
        "position_ids",
        "position_embeddings",
        "use_cache",
        "cache_position",
        "return_dict",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "is_causal",
        "token_type_ids",
        "input_ids",
    ]
)


class UnsupportedAttentionError(RuntimeError):
    """The model asks its attention for something that segments cannot honour (named)."""


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segments: SegmentPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises UnsupportedAttentionError, by name, for everything it cannot honour.
    """
    if segments is None:
        raise UnsupportedAttentionError(
            f"{NAME} needs segments=plan_segments(...) in the model's call"
        )
    _refuse_unsupported(module, attention_mask, dropout, sliding_window, others)
    if query.shape[0] != 1 or query.shape[2] != segments.tokens or key.shape[2] != segments.tokens:
        raise UnsupportedAttentionError(
            f"{NAME} takes one pack of {segments.tokens} tokens without a cache; got queries "
            f"{tuple(query.shape)}, keys {tuple(key.shape)}"
        )
    segments.calls += 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Rotary embeddings under autocast return fp32 queries beside bf16 values.
    query_htd = query[0].to(value.dtype)
    key_ktd, value_ktd = key[0].to(value.dtype), value[0]
    direct = (
        query.device.type == "cpu"
        and softcap is None
        and value.dtype in (torch.float32, torch.bfloat16)
        and value.shape[-1] == key.shape[-1]
    )
    run: Callable[..., Tensor]
    if direct:
        run = partial(_direct, plan=segments, scale=scale, window=sliding_window)
    else:
        run = partial(
            attention_by_autograd,
            plan=segments,
            scale=scale,
            window=sliding_window,
            softcap=softcap,
        )
    width = query_htd.shape[0] * (query_htd.shape[-1] + value_ktd.shape[-1])
    out = unit(
        "attention",
        run,
        query_htd,
        key_ktd,
        value_ktd,
        operations=lambda: 2.0 * width * segments.pairs(sliding_window),
    )
    return out.unsqueeze(0), None


def _direct(
    query_htd: Tensor,
    key_ktd: Tensor,
    value_ktd: Tensor,
    plan: SegmentPlan,
    scale: float,
    window: int | None,
) -> Tensor:
    out: Tensor = _CpuSegments.apply(query_htd, key_ktd, value_ktd, plan, scale, window)
    return out


def _refuse_unsupported(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    sliding_window: int | None,
    others: dict[str, Any],
) -> None:
    if attention_mask is not None:
        # The mask function below returns the window of a layer that is not fully causal.
        if attention_mask.dim() != 0:
            raise UnsupportedAttentionError(
                f"{NAME} takes no attention mask: segments say who sees whom"
            )
        window = int(attention_mask)
        if sliding_window != window:
            raise UnsupportedAttentionError(
                f"{type(module).__name__} looks at chunks or a window of {window} tokens that it "
                f"does not hand to its attention (sliding_window={sliding_window})"
            )
    elif sliding_window is not None:
        # The model decided on a full mask for this layer, and the mask is what counts.
        raise UnsupportedAttentionError(
            f"{type(module).__name__} names a window of {sliding_window} tokens but masks none"
        )
    if dropout:
        raise UnsupportedAttentionError(f"dropout {dropout} inside attention is not supported")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttentionError(f"{type(module).__name__} is not causal")
    for name, setting in others.items():
        if name not in _HARMLESS and setting is not None and setting is not False:
            raise UnsupportedAttentionError(
                f"{type(module).__name__} passes {name}= to its attention, which would be ignored"
            )


class _CpuSegments(torch.autograd.Function):
    """One direct kernel call per segment, reading from and writing into the pack in place.

    Grouped heads are a view of stride 0 (no copies of keys and values), nothing is
    padded, and gradients of a shared prompt are added in the order of its branches.
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
        heads, tokens, _ = query_htd.shape
        out_thd = query_htd.new_empty(tokens, heads, value_ktd.shape[-1])
        normalisers = []
        for span in plan.spans:
            mask = plan.mask(span, window, query_htd.dtype, query_htd.device)
            out, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_grouped(query_htd, key_ktd, value_ktd, span),
                0.0,
                mask is None,
                attn_mask=mask,
                scale=scale,
            )
            rows = out_thd[span.start : span.start + span.length]
            rows.view(span.length, *out.shape[:2], -1).copy_(out.permute(2, 0, 1, 3))
            normalisers.append(normaliser)
        ctx.save_for_backward(query_htd, key_ktd, value_ktd, out_thd, *normalisers)
        ctx.plan, ctx.scale, ctx.window = plan, scale, window
        return out_thd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_thd: Tensor) -> tuple[Tensor | None, ...]:
        query_htd, key_ktd, value_ktd, out_thd, *normalisers = ctx.saved_tensors
        grad_query = torch.empty_like(query_htd, memory_format=torch.contiguous_format)
        grad_key = torch.zeros_like(key_ktd, memory_format=torch.contiguous_format)
        grad_value = torch.zeros_like(value_ktd, memory_format=torch.contiguous_format)
        groups = key_ktd.shape[0]
        for span, normaliser in zip(ctx.plan.spans, normalisers, strict=True):
            own = slice(span.start, span.start + span.length)
            seen = span.context_length + span.length
            if query_htd.dtype == SHORT_DTYPE and seen <= SHORT:
                causal = ctx.plan.mask(
                    span, ctx.window, torch.float32, query_htd.device, plain=True
                )
                assert causal is not None
                by_query, by_key, by_value = _short_backward(
                    _split_heads(grad_thd[own].transpose(0, 1), groups),
                    _split_heads(query_htd[:, own], groups),
                    _visible(key_ktd, span),
                    _visible(value_ktd, span),
                    normaliser,
                    causal,
                    ctx.scale,
                )
                grad_query[:, own] = by_query
                _add_to_seen(grad_key, grad_value, by_key, by_value, span)
                continue
            mask = ctx.plan.mask(span, ctx.window, query_htd.dtype, query_htd.device)
            (
                query_part,
                key_part,
                value_part,
            ) = _grouped(query_htd, key_ktd, value_ktd, span)
            by_query, by_key, by_value = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    _split_heads(grad_thd[own].transpose(0, 1), groups),
                    query_part,
                    key_part,
                    value_part,
                    _split_heads(out_thd[own].transpose(0, 1), groups),
                    normaliser,
                    0.0,
                    mask is None,
                    attn_mask=mask,
                    scale=ctx.scale,
                )
            )
            grad_query[:, own] = by_query.flatten(0, 1)
            _add_to_seen(grad_key, grad_value, by_key.sum(1), by_value.sum(1), span)
        return grad_query, grad_key, grad_value, None, None, None


def _short_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    normaliser: Tensor,
    mask: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (query [H, n, D], key and value [K, m, D]) by plain products.

    grad, query [K, H/K, n, D]; normaliser = log Σ exp [K, H/K, n]; mask [n, m]. Heads of a
    group are rows of one product, so that nothing is repeated for them. At 75 tokens in
    bf16 this takes a fifth of the time of torch's flash kernel, at 256 as long.
    """
    groups, repeats, length, width = query.shape
    rows = query.reshape(groups, repeats * length, width)
    grad_rows = grad.reshape(groups, repeats * length, -1)
    # In fp32, as the kernel's normaliser is: a large score rounded to bf16 is off by units.
    scores = torch.bmm(rows.float(), key.float().transpose(1, 2))
    scores = scores.view(groups, repeats, length, -1)
    shares = scores.mul_(scale).add_(mask).sub_(normaliser.unsqueeze(-1)).exp_()
    by_share = torch.bmm(grad_rows, value.transpose(1, 2)).view_as(shares)
    by_score = torch.ops.aten._softmax_backward_data(by_share.float(), shares, -1, torch.float32)
    by_score = by_score.mul_(scale).to(query.dtype).view(groups, repeats * length, -1)
    shares = shares.to(value.dtype).view(groups, repeats * length, -1)
    return (
        torch.bmm(by_score, key).view(groups * repeats, length, width),
        torch.bmm(by_score.transpose(1, 2), rows),
        torch.bmm(shares.transpose(1, 2), grad_rows),
    )


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
        _visible(key_ktd, span).unsqueeze(1).expand(shape),
        _visible(value_ktd, span).unsqueeze(1).expand(shape),
    )


def _visible(rows_ktd: Tensor, span: Span) -> Tensor:
    own = rows_ktd[:, span.start : span.start + span.length]
    if not span.context:
        return own
    if sum(span.context[0]) == span.start and len(span.context) == 1:
        return rows_ktd[:, span.context[0][0] : span.start + span.length]
    pieces = [rows_ktd[:, start : start + length] for start, length in span.context]
    return torch.cat([*pieces, own], dim=1)


def attention_by_autograd(
    query_htd: Tensor,
    key_ktd: Tensor,
    value_ktd: Tensor,
    plan: SegmentPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The same [T, H, D] through autograd: any device and dtype; soft-capped logits (Gemma 2)."""
    repeats = query_htd.shape[0] // key_ktd.shape[0]
    parts = []
    for span in plan.spans:
        query = query_htd[:, span.start : span.start + span.length]
        key = _visible(key_ktd, span).repeat_interleave(repeats, 0)
        value = _visible(value_ktd, span).repeat_interleave(repeats, 0)
        mask = plan.mask(span, window, query.dtype, query.device)
        if softcap is None:
            part = F.scaled_dot_product_attention(
                query[None], key[None], value[None], mask, 0.0, mask is None, scale=scale
            )[0]
        else:
            logits = softcap * torch.tanh(query @ key.transpose(1, 2) * (scale / softcap))
            if mask is None:
                causal = torch.ones(span.length, span.length, dtype=torch.bool, device=query.device)
                logits = logits.masked_fill(~causal.tril_(), float("-inf"))
            else:
                logits = logits + mask
            part = torch.softmax(logits, -1, dtype=torch.float32).to(value.dtype) @ value
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


def segment_mask(
    *_: Any,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **__: Any,
) -> Tensor | None:
    """transformers' mask function for this name: no mask, and no way to ask for one.

    A padding mask or a cache under this name would be silently ignored, so both raise.
    A window is handed on as a scalar, so that attention can check that it knows it.
    """
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        raise UnsupportedAttentionError(
            f"padding under {NAME} would be ignored: pack instead, or use another attention"
        )
    if kv_length != q_length:
        raise UnsupportedAttentionError(
            f"a cache under {NAME} would be ignored: use `with model.attention('sdpa')` to decode"
        )
    if use_vmap or allow_is_bidirectional_skip is not None:
        raise UnsupportedAttentionError(
            f"this model changes the causal mask, which {NAME} cannot honour"
        )
    return None if local_size is None else torch.tensor(local_size)


def register() -> None:
    """Make the name known to transformers (again and again is harmless)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, segment_attention)
    AttentionMaskInterface.register(NAME, segment_mask)


def use_segments(network: Any) -> None:
    """Let `network` attend over segments from now on."""
    register()
    _set_attention(network.config, NAME)


@contextmanager
def attention(network: Any, name: str | None = None) -> Iterator[None]:
    """`network` under another attention for a while: `sdpa`, or `eager` where sdpa cannot do it."""
    before = network.config._attn_implementation
    _set_attention(network.config, name or plain_attention(network))
    try:
        yield
    finally:
        _set_attention(network.config, before)


def plain_attention(network: Any) -> str:
    """transformers' own attention that is right for this network (padding masks, caches)."""
    return "sdpa" if getattr(network, "_supports_sdpa", False) else "eager"


def _set_attention(config: Any, name: str) -> None:
    # The setter reaches sub-configs; the network's own method would also look for kernels.
    config._attn_implementation = name
