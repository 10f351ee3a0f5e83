"""Matrix products of decoding: few rows, the same weights again at every token.

Layers that read the same input are one product, and an adapter's A matrices are rows of
it, so that an unmerged adapter costs one small product more, in the training pass's own
arithmetic. On a CPU that multiplies bf16, oneDNN takes 0.6 times as long for up to 64 rows
where the weights were laid out for it before, and gives a row the same bits beside any
others. A single row's weights it reads at half the memory's speed, where torch's own kernel
reaches all of it (and rounds a few sums in a thousand otherwise).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lehr.models.adapter_layers import LoraMixin
from lehr.models.head import bf16_products_pay

Kind = Literal["plain", "packed", "int8"]

# Above this, calls of their own cost little beside the products, and no copy is made.
FUSED_ELEMENTS = 4_000_000
PACKED_FOR_ROWS = 16
Multiply = Callable[[Tensor], Tensor]


class Adapted(NamedTuple):
    """One linear layer as it computes now: weight [out, in], bias, its adapter or None."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, module: Any) -> Adapted:
        """What an nn.Linear or a LoraLinear holds, detached."""
        bias = None if module.bias is None else module.bias.detach()
        if isinstance(module, LoraMixin) and module.adapter_active:
            a, b = module.lora_a.detach(), module.lora_b.detach()
            return cls(module.weight.detach(), bias, a, b, module.scale)
        return cls(module.weight.detach(), bias)

    def merged(self, dtype: torch.dtype) -> Adapted:
        """The adapter added in fp32 and rounded once; the live weight stays."""
        if self.lora_a is None or self.lora_b is None:
            return self
        total = self.weight.float().addmm(
            self.lora_b.float(), self.lora_a.float(), alpha=self.scale
        )
        return Adapted(total.to(dtype), self.bias)


def packing_possible(dtype: torch.dtype) -> bool:
    """True where oneDNN multiplies this type natively and lets weights be laid out before."""
    known = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return dtype == torch.bfloat16 and known and bf16_products_pay()


def multiplier(weight: Tensor, bias: Tensor | None, kind: Kind) -> Multiply:
    """x [n, in] -> x Wᵀ + b [n, out], with the weight laid out as `kind` says."""
    if kind == "packed":
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        product = torch.ops.mkldnn._linear_pointwise

        def by_packed(x: Tensor) -> Tensor:
            # One row is summed in another order than many: two of it are not.
            rows = x.expand(2, -1) if x.shape[0] == 1 else x
            out: Tensor = product(rows.contiguous(), packed, bias, "none", [], "")
            return out[: x.shape[0]]

        return by_packed
    if kind == "int8":
        codes, scales = to_int8(weight)
        own = scales.to(weight.dtype)

        def by_int8(x: Tensor) -> Tensor:
            out: Tensor = torch._weight_int8pack_mm(x.contiguous(), codes, own)
            return out if bias is None else out + bias

        return by_int8
    return lambda x: F.linear(x, weight, bias)


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [out, in], scales fp32 [out]): w ≈ code * scale, symmetric, by output row.

    >>> codes, scales = to_int8(torch.tensor([[0.0, 63.5, -127.0]]))
    >>> codes.tolist(), scales.tolist()
    ([[0, 64, -127]], [1.0])
    """
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / 127
    return torch.round(wide / scales[:, None]).to(torch.int8), scales


class Product:
    """Layers with one input as one product, and their adapters: x [n, in] -> [n, out]."""

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype, kind: Kind, merge: bool) -> None:
        parts = [Adapted.of(module) for module in modules]
        if merge or kind == "int8":
            parts = [part.merged(dtype) for part in parts]
        self.out = sum(part.weight.shape[0] for part in parts)
        self.scale = next((part.scale for part in parts if part.lora_a is not None), 1.0)
        low = [part.lora_a.to(dtype) for part in parts if part.lora_a is not None]
        # One row of so narrow a bf16 product takes torch three to ten times as long as in fp32.
        self.low_dtype = torch.float32 if kind == "plain" else dtype
        self.low_out = _block_rows(parts, self.scale, dtype) if low else None
        if self.low_out is not None:
            self.low_out = self.low_out.to(self.low_dtype)
        elements = sum(part.weight.numel() for part in parts)
        self._apart: list[Multiply] = []
        if kind == "plain" and elements > FUSED_ELEMENTS:
            self._apart = [multiplier(part.weight, part.bias, kind) for part in parts]
            if low:
                self._apart.append(multiplier(torch.cat(low), None, kind))
            return
        weights = [*(part.weight for part in parts), *low]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._multiply = multiplier(whole, _bias(parts, whole), kind)

    def __call__(self, x: Tensor) -> Tensor:
        if self._apart:
            outs = [multiply(x) for multiply in self._apart]
            y = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        else:
            y = self._multiply(x)
        if self.low_out is None:
            return y
        # x Wᵀ + s (x Aᵀ) Bᵀ, where x Aᵀ are the last columns of y.
        wide = y.to(self.low_dtype)
        total = wide[:, : self.out].addmm_(wide[:, self.out :], self.low_out, alpha=self.scale)
        return total.to(y.dtype)


def _block_rows(parts: Sequence[Adapted], scale: float, dtype: torch.dtype) -> Tensor:
    """[all ranks, all outputs]: each part's Bᵀ in its own columns, as multiples of `scale`."""
    ranks = sum(part.lora_a.shape[0] for part in parts if part.lora_a is not None)
    out = sum(part.weight.shape[0] for part in parts)
    block = torch.zeros(ranks, out, dtype=dtype, device=parts[0].weight.device)
    row = column = 0
    for part in parts:
        width = part.weight.shape[0]
        if part.lora_b is not None:
            rank = part.lora_b.shape[1]
            own = part.lora_b.T if part.scale == scale else part.lora_b.T * (part.scale / scale)
            block[row : row + rank, column : column + width] = own.to(dtype)
            row += rank
        column += width
    return block


def _bias(parts: Sequence[Adapted], whole: Tensor) -> Tensor | None:
    if all(part.bias is None for part in parts):
        return None
    bias = whole.new_zeros(whole.shape[0])
    column = 0
    for part in parts:
        width = part.weight.shape[0]
        if part.bias is not None:
            bias[column : column + width] = part.bias
        column += width
    return bias


@contextmanager
def single_row_kernels(rows: int, dtype: torch.dtype) -> Iterator[None]:
    """torch's own bf16 kernel for plain products of one row; else nothing changes."""
    if rows != 1 or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        yield
        return
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
