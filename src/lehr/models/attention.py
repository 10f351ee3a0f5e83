"""Attention over segments, under the name `lehr_segments` in transformers' attention interface.

A pack holds many sequences in one row of tokens. Each segment is causal in itself and
sees all of the segments that it continues; no mask of the whole pack ever exists, and
no padding. The plan of who sees whom travels through the model's keyword arguments:

    network(input_ids=..., position_ids=..., segments=plan_segments(pack.segments, T))

Plain causal attention is what `sdpa` computes; a branch of length n that continues a
prompt of length m attends with a mask [n, m + n], made once per pack. What computes is
`attention_cpu` on a CPU and `attention_padded` on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lehr.models.attention_cpu import CpuSegments, visible
from lehr.models.attention_padded import padded_attention
from lehr.models.replay import unit
from lehr.models.segments import SegmentPlan

# "flash" or "/" in the name would be taken for a kernel from the hub.
NAME = "lehr_segments"
# Devices that one kernel call a segment suits; meta: sizes alone, for a forecast.
OF_CPU: tuple[str, ...] = ("cpu", "meta")

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
    if segments.watch is not None:
        segments.watch.look(query_htd, key_ktd, segments, scale, sliding_window)
    ours = query.device.type in OF_CPU
    direct = (
        ours
        and softcap is None
        and value.dtype in (torch.float32, torch.bfloat16)
        and value.shape[-1] == key.shape[-1]
    )
    run: Callable[..., Tensor]
    if direct:
        run = partial(_direct, plan=segments, scale=scale, window=sliding_window)
    else:
        run = partial(
            attention_by_autograd if ours else padded_attention,
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
    out: Tensor = CpuSegments.apply(query_htd, key_ktd, value_ktd, plan, scale, window)
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


def attention_by_autograd(
    query_htd: Tensor,
    key_ktd: Tensor,
    value_ktd: Tensor,
    plan: SegmentPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The same [T, H, D] through autograd: any dtype; soft-capped logits (Gemma 2)."""
    repeats = query_htd.shape[0] // key_ktd.shape[0]
    parts = []
    for span in plan.seen(window):
        query = query_htd[:, span.start : span.start + span.length]
        key = visible(key_ktd, span).repeat_interleave(repeats, 0)
        value = visible(value_ktd, span).repeat_interleave(repeats, 0)
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
