"""The fused head's autograd functions: logits of one chunk at a time, and their gradients.

log p(y) = z_y - log Z with log Z = log Σ exp z; d log p(y) / dz = onehot(y) - p, d log Z / dz = p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lehr.device import moved
from lehr.models.head_chunks import Head, cap, product_dtype, uncapped, wide


class OrderedGather(torch.autograd.Function):
    """rows[index] with a backward that adds repeated indices in their order.

    The index of a shared prompt's last position repeats. Autograd's own backward adds
    such rows atomically, in no fixed order, above a size and with several threads.

    An index on the CPU is looked at there: a card that is asked what repeats has to finish first.
    """

    @staticmethod
    def forward(ctx: Any, rows_td: Tensor, index: Tensor) -> Tensor:
        ctx.rounds = None
        if index.device != rows_td.device:
            ctx.rounds = [
                (moved(chosen, rows_td.device), moved(index[chosen], rows_td.device))
                for chosen in _rounds(index)
            ]
            index = moved(index, rows_td.device)
        ctx.save_for_backward(index)
        ctx.size = rows_td.shape
        return rows_td.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_rd: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad_td = grad_rd.new_zeros(ctx.size)
        rounds = ctx.rounds or ((chosen, index[chosen]) for chosen in _rounds(index))
        for chosen, at in rounds:
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


@dataclass(frozen=True)
class ChunkStats:
    """What one chunk of logits [c, V] says of its pairs: p = shares [c, V] / total [c]."""

    log_probability: Tensor
    log_z: Tensor
    entropy: Tensor | None
    argmax: Tensor | None
    shares: Tensor
    total: Tensor


def chunk_stats(logits: Tensor, targets: Tensor, entropy: bool, argmax: bool) -> ChunkStats:
    """Statistics of `logits`, which are overwritten by shares = exp(z - max z)."""
    chosen = logits.gather(1, targets[:, None])[:, 0]
    best = logits.argmax(1) if argmax else None
    top = logits.amax(1, keepdim=True)
    # A row whose largest logit is infinite stays what it is instead of turning into inf - inf.
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    shifted = logits.sub_(top)
    shares = shifted.exp() if entropy else shifted.exp_()
    total = shares.sum(1)
    log_z = total.log() + top[:, 0]
    # H = log Z - Σ p z
    mean = (shares * shifted).sum(1) / total + top[:, 0] if entropy else None
    return ChunkStats(
        chosen - log_z, log_z, None if mean is None else log_z - mean, best, shares, total
    )


class _Statistics:
    """Room for the statistics of all pairs, filled chunk by chunk."""

    def __init__(self, hidden_rd: Tensor, targets: Tensor, entropy: bool, argmax: bool) -> None:
        count = hidden_rd.shape[0]
        dtype = torch.float64 if hidden_rd.dtype == torch.float64 else torch.float32
        self.log_probability = hidden_rd.new_empty(count, dtype=dtype)
        self.log_z = hidden_rd.new_empty(count, dtype=dtype)
        self.entropy = hidden_rd.new_empty(count, dtype=dtype) if entropy else None
        self.argmax = targets.new_empty(count) if argmax else None

    def fill(self, part: slice, stats: ChunkStats) -> None:
        self.log_probability[part], self.log_z[part] = stats.log_probability, stats.log_z
        if self.entropy is not None and stats.entropy is not None:
            self.entropy[part] = stats.entropy
        if self.argmax is not None and stats.argmax is not None:
            self.argmax[part] = stats.argmax

    def outputs(self, ctx: Any) -> tuple[Tensor | None, ...]:
        fixed = [tensor for tensor in (self.entropy, self.argmax) if tensor is not None]
        ctx.mark_non_differentiable(*fixed)
        return self.log_probability, self.log_z, self.entropy, self.argmax


class FrozenHead(torch.autograd.Function):
    """The head whose matrix is frozen: the logits are made once, in the forward pass.

    With a(v) = p(v) dz(v)/du(v), u the bare products, the gradient of a pair's hidden state is
    c W(y) + (g_z - g_y) Σ_{v≠y} a(v) W(v), where only the numbers g come from above: the sum is
    taken while the logits are there. The target stays out of it because for a sure prediction
    its share would cancel against c, and what is left would be rounding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_rd: Tensor,
        rows: Tensor | None,
        targets: Tensor,
        head: Head,
        chunk: int,
        entropy: bool,
        argmax: bool,
    ) -> tuple[Tensor | None, ...]:
        stats = _Statistics(hidden_rd, targets, entropy, argmax)
        matrix = head.weight.to(product_dtype(hidden_rd, head.weight))
        others_rd = torch.empty_like(hidden_rd, dtype=matrix.dtype)
        slope = torch.full_like(stats.log_z, head.scale)  # dz/du at the target
        own = None if rows is None else stats.log_z.new_empty(len(targets), len(rows))
        for start in range(0, hidden_rd.shape[0], chunk):
            part = slice(start, start + chunk)
            wanted = targets[part, None]
            logits = cap(head, uncapped(head, hidden_rd[part], matrix, targets[part]))
            slopes = None if head.softcap is None else 1 - (logits / head.softcap) ** 2
            one = chunk_stats(logits, targets[part], entropy, argmax)
            stats.fill(part, one)
            shares = one.shares
            if slopes is not None:
                shares *= slopes
                slope[part] *= slopes.gather(1, wanted)[:, 0]
            shares.scatter_(1, wanted, 0.0)
            factor = (head.scale / one.total)[:, None]
            if own is not None:
                assert head.row_ids is not None
                own[part] = shares[:, head.row_ids] * factor
                shares[:, head.row_ids] = 0.0
            others_rd[part] = (shares.to(matrix.dtype) @ matrix) * factor.to(wide(others_rd).dtype)
            del logits, one, shares, slopes  # else they live beside the next chunk's
        ctx.save_for_backward(
            hidden_rd, rows, targets, others_rd, own, slope, stats.log_probability
        )
        ctx.head = head
        return stats.outputs(ctx)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, by_log_probability: Tensor, by_log_z: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        hidden_rd, rows, targets, others_rd, own, slope, log_probability = ctx.saved_tensors
        head: Head = ctx.head
        by_others = (by_log_z - by_log_probability)[:, None]
        # g_y (1 - p_y) + g_z p_y, without the loss of digits of 1 - p_y.
        by_target = -by_log_probability * torch.expm1(log_probability)
        by_target = (by_target + by_log_z * log_probability.exp()) * slope
        grad_hidden = by_others * wide(others_rd)
        chosen_rd = wide(head.weight[targets])
        grad_rows = None
        if rows is not None:
            assert head.row_ids is not None
            match = targets[:, None] == head.row_ids
            by_rows = by_others * own + by_target[:, None] * match
            grad_hidden += by_rows @ rows.to(by_rows.dtype)
            grad_rows = (by_rows.T @ wide(hidden_rd)).to(rows.dtype)
            by_target = by_target.masked_fill(match.any(1), 0.0)
        grad_hidden += by_target[:, None] * chosen_rd
        return grad_hidden.to(hidden_rd.dtype), grad_rows, *[None] * 5


class FusedHead(torch.autograd.Function):
    """The head whose matrix trains, or that needs no gradient; backward makes the logits again."""

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
        stats = _Statistics(hidden_rd, targets, entropy, argmax)
        matrix = weight.to(product_dtype(hidden_rd, weight))
        for start in range(0, hidden_rd.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = cap(head, uncapped(head, hidden_rd[part], matrix, targets[part]))
            stats.fill(part, chunk_stats(logits, targets[part], entropy, argmax))
            del logits  # else it lives beside the next chunk's
        ctx.save_for_backward(hidden_rd, weight, bias, rows, targets, stats.log_z)
        ctx.head, ctx.chunk = head, chunk
        return stats.outputs(ctx)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, by_log_probability: Tensor, by_log_z: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        hidden_rd, weight, bias, rows, targets, log_z = ctx.saved_tensors
        head: Head = ctx.head
        wants_hidden, wants_weight, wants_bias, wants_rows = ctx.needs_input_grad[:4]
        dtype = product_dtype(hidden_rd, weight)
        matrix = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden_rd) if wants_hidden else None
        accumulated = torch.float64 if dtype == torch.float64 else torch.float32
        grad_weight = torch.zeros_like(weight, dtype=accumulated) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=accumulated) if wants_bias else None
        grad_rows = torch.zeros_like(rows, dtype=accumulated) if wants_rows else None
        # d log p(y) = onehot(y) - p and d log Z = p, so dz = g_y onehot + (g_z - g_y) p.
        by_softmax = by_log_z - by_log_probability
        for start in range(0, hidden_rd.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden = hidden_rd[part]
            capped = cap(head, uncapped(head, hidden, matrix, targets[part]))
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
                    grad_rows += by_rows.T @ hidden.to(accumulated)
            product = grad.to(dtype)
            if grad_hidden is not None:
                into = product @ matrix
                if by_rows is not None:
                    into = into + by_rows @ rows.to(by_rows.dtype)
                grad_hidden[part] = into.to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight += product.T @ hidden.to(dtype)
            del capped, grad, product, by_rows  # else they live beside the next chunk's
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None if grad_rows is None else grad_rows.to(rows.dtype),
            *[None] * 5,
        )
