"""The fused head: log-probabilities of the pairs that are trained, chunk by chunk.

For a hidden state h and the head's matrix W, logits are z = cap(scale * (h Wᵀ + b)), and
log p(y) = z_y - log Z with log Z = log Σ exp z. A chunk's logits live only while it is
worked on; the backward pass makes them again, so logits of all positions never exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 8_000_000  # about 32 MB of fp32 logits at a time


@dataclass(frozen=True)
class Head:
    """What turns a hidden state into logits.

    weight   [V, d]
    bias     [V] or None
    rows     [k, d] or None: trained rows that stand for `row_ids` [k] of `weight`
    scale    logits are multiplied by it (Cohere; Granite divides)
    softcap  c or None: logits become c tanh(z / c) (Gemma 2)
    """

    weight: Tensor
    bias: Tensor | None = None
    rows: Tensor | None = None
    row_ids: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [c, V] in fp32 (fp64 for fp64) of one chunk of hidden states [c, d]."""
        return _cap(self, _uncapped(self, hidden))

    def detached(self) -> Head:
        """The same numbers without a graph."""
        return replace(
            self,
            weight=self.weight.detach(),
            bias=None if self.bias is None else self.bias.detach(),
            rows=None if self.rows is None else self.rows.detach(),
        )


@dataclass(frozen=True)
class TokenStats:
    """Per pair [R], fp32: log-probability, log Z (both differentiable); more on request."""

    log_probability: Tensor
    log_z: Tensor
    entropy: Tensor | None = None
    argmax: Tensor | None = None


@lru_cache(maxsize=1)
def bf16_products_pay() -> bool:
    """True where the processor multiplies bf16 natively; else widening it first is faster."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if torch.float64 in (hidden.dtype, weight.dtype):
        return torch.float64
    both = {hidden.dtype, weight.dtype}
    if torch.bfloat16 in both and (hidden.device.type != "cpu" or bf16_products_pay()):
        return torch.bfloat16
    # A CPU multiplies fp16 more slowly than fp32.
    return torch.float16 if torch.float16 in both and hidden.is_cuda else torch.float32


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _uncapped(head: Head, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    """scale * (h Wᵀ + b) [c, V]; `weight` may hold an already converted copy."""
    dtype = _product_dtype(hidden, head.weight)
    matrix = head.weight.to(dtype) if weight is None else weight
    logits = _wide(hidden.to(dtype) @ matrix.T)
    if head.bias is not None:
        logits += head.bias
    if head.rows is not None:
        assert head.row_ids is not None
        own = _wide(hidden) @ _wide(head.rows).T.to(_wide(hidden).dtype)
        if head.bias is not None:
            own = own + head.bias[head.row_ids]
        logits = logits.index_copy(1, head.row_ids, own.to(logits.dtype))
    return logits if head.scale == 1.0 else logits * head.scale


def _cap(head: Head, uncapped: Tensor) -> Tensor:
    if head.softcap is None:
        return uncapped
    return head.softcap * torch.tanh(uncapped / head.softcap)


class OrderedGather(torch.autograd.Function):
    """rows[index] with a backward that adds repeated indices in their order.

    The index of a shared prompt's last position repeats. Autograd's own backward adds
    such rows atomically, in no fixed order, above a size and with several threads.
    """

    @staticmethod
    def forward(ctx: Any, rows_td: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = rows_td.shape
        return rows_td.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_rd: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad_td = grad_rd.new_zeros(ctx.size)
        for chosen in _rounds(index):
            at = index[chosen]
            grad_td[at] = grad_td[at] + grad_rd[chosen]
        return grad_td, None


def _rounds(index: Tensor) -> list[Tensor]:
    """Positions of `index`, in rounds within which no index repeats."""
    order = torch.argsort(index, stable=True)
    ordered = index[order]
    position = torch.arange(index.numel(), device=index.device)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    start = torch.where(first, position, torch.zeros_like(position)).cummax(0).values
    occurrence = position - start
    if not bool(occurrence.any()):
        return [position]
    return [order[occurrence == k] for k in range(int(occurrence.max()) + 1)]


def chunk_rows(vocabulary: int, chunk: int | None = None) -> int:
    """Positions per chunk: by the vocabulary alone, so that no timing changes a number."""
    return chunk if chunk is not None else max(16, CHUNK_LOGITS // max(vocabulary, 1))


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_rd: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        targets: Tensor,
        head: Head,
        chunk: int,
        entropy: bool,
        argmax: bool,
    ) -> tuple[Tensor | None, ...]:
        count = hidden_rd.shape[0]
        wide = torch.float64 if hidden_rd.dtype == torch.float64 else torch.float32
        log_probability = hidden_rd.new_empty(count, dtype=wide)
        log_z = hidden_rd.new_empty(count, dtype=wide)
        entropies = hidden_rd.new_empty(count, dtype=wide) if entropy else None
        best = targets.new_empty(count) if argmax else None
        matrix = weight.to(_product_dtype(hidden_rd, weight))
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _cap(head, _uncapped(head, hidden_rd[part], matrix))
            log_z[part] = torch.logsumexp(logits, 1)
            chosen = logits.gather(1, targets[part, None])[:, 0]
            log_probability[part] = chosen - log_z[part]
            if best is not None:
                best[part] = logits.argmax(1)
            if entropies is not None:
                # H = log Z - Σ p z
                p = torch.exp(logits - log_z[part, None])
                entropies[part] = log_z[part] - (p * logits).sum(1)
        ctx.save_for_backward(hidden_rd, weight, bias, rows, targets, log_z)
        ctx.head, ctx.chunk = head, chunk
        ctx.mark_non_differentiable(*[t for t in (entropies, best) if t is not None])
        return log_probability, log_z, entropies, best

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, by_log_probability: Tensor, by_log_z: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        hidden_rd, weight, bias, rows, targets, log_z = ctx.saved_tensors
        head: Head = ctx.head
        wants_hidden, wants_weight, wants_bias, wants_rows = ctx.needs_input_grad[:4]
        dtype = _product_dtype(hidden_rd, weight)
        matrix = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden_rd) if wants_hidden else None
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        grad_rows = torch.zeros_like(rows, dtype=wide) if wants_rows else None
        # d log p(y) = onehot(y) - p and d log Z = p, so dz = g_y onehot + (g_z - g_y) p.
        by_softmax = by_log_z - by_log_probability
        for start in range(0, hidden_rd.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden = hidden_rd[part]
            capped = _cap(head, _uncapped(head, hidden, matrix))
            grad = torch.exp(capped - log_z[part, None]) * by_softmax[part, None]
            at = torch.arange(grad.shape[0], device=grad.device)
            grad[at, targets[part]] += by_log_probability[part]
            if head.softcap is not None:
                grad *= 1 - (capped / head.softcap) ** 2
            if head.scale != 1.0:
                grad *= head.scale
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            by_rows = None
            if rows is not None:
                assert head.row_ids is not None
                by_rows = grad[:, head.row_ids]
                grad[:, head.row_ids] = 0
                if grad_rows is not None:
                    grad_rows += by_rows.T @ hidden.to(wide)
            product = grad.to(dtype)
            if grad_hidden is not None:
                into = product @ matrix
                if by_rows is not None:
                    into = into + by_rows @ rows.to(by_rows.dtype)
                grad_hidden[part] = into.to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight += product.T @ hidden.to(dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None if grad_rows is None else grad_rows.to(rows.dtype),
            *[None] * 5,
        )


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

    Raises ValueError for a target outside the vocabulary.
    """
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < len(head.weight):
        raise ValueError(f"a target is outside the vocabulary of {len(head.weight)} tokens")
    # Autocast must not touch the products here: their dtypes are chosen above.
    with torch.autocast(hidden_td.device.type, enabled=False):
        picked = OrderedGather.apply(hidden_td, predict_from)
        log_probability, log_z, entropies, best = _FusedHead.apply(
            picked,
            head.weight,
            head.bias,
            head.rows,
            targets,
            head.detached(),
            chunk_rows(len(head.weight), chunk),
            entropy,
            argmax,
        )
    return TokenStats(log_probability, log_z, entropies, best)


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
    result = torch.empty(positions.numel(), dtype=_wide(hidden_p).dtype, device=hidden_p.device)
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
