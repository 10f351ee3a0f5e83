"""A linear layer whose three products take FP8 operands.

    y = Q(x) Q(W)ᵀ        ∂x = Q(∂y) Q(W)        ∂W = Q(∂y)ᵀ Q(x)

x and W are cast to E4M3, ∂y to E5M2 (Micikevicius et al. 2022, arXiv:2209.05433, §3); sums are
fp32. The cast is straight-through: W keeps its own precision, and the optimizer sees ∂W.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lehr.models.adapter_layers import LoraLinear
from lehr.training.float8_formats import Float8Format, format_named
from lehr.training.float8_recipe import CUDA_MULTIPLE, OPERANDS, Float8Settings
from lehr.training.float8_scaling import (
    AmaxHistory,
    Quantized,
    health_sums,
    quantize,
    quantize_blocks,
)


class LayerFloat8:
    """The FP8 side of one layer: scales, and what its casts lost in the current update.

    active     False: the layer computes in high precision
    measuring  health is collected in this update
    histories  of delayed scaling, one per operand
    """

    def __init__(self, name: str, settings: Float8Settings) -> None:
        self.name, self.settings = name, settings
        self.active, self.measuring = True, True
        forward = format_named(settings.forward_format)
        gradient = format_named(settings.gradient_format)
        self.formats = {"input": forward, "weight": forward, "gradient": gradient}
        self.histories: dict[str, AmaxHistory] = {}
        if settings.scaling == "delayed":
            self.histories = {o: AmaxHistory(settings.window, settings.margin) for o in OPERANDS}
        self.sums: dict[str, Tensor] = {}
        self.nonfinite: dict[str, Tensor] = {}

    def cast(self, operand: str, values: Tensor, record: bool) -> Quantized:
        """[rows, k] in FP8, scaled along k; with `record` the update remembers what it saw."""
        form: Float8Format = self.formats[operand]
        history = self.histories.get(operand)
        if self.settings.scaling == "block":
            quantized = quantize_blocks(values, form)
        else:
            scale = None if history is None else history.scale(values, form)
            quantized = quantize(values, form, scale)
        if record:
            self._record(operand, values, quantized, form)
        return quantized

    def _record(
        self, operand: str, values: Tensor, quantized: Quantized, form: Float8Format
    ) -> None:
        if operand in self.histories:
            self.histories[operand].note(values)
        bad = ~values.detach().isfinite().all()
        self.nonfinite[operand] = bad | self.nonfinite.get(operand, bad)
        if self.measuring:
            sums = health_sums(values, quantized, form.largest)
            self.sums[operand] = self.sums[operand] + sums if operand in self.sums else sums

    def forget(self) -> None:
        """Drop what the current update collected."""
        self.sums, self.nonfinite = {}, {}
        for history in self.histories.values():
            history.forget()


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerFloat8,
                  record: bool) -> Tensor:  # fmt: skip
    """x Wᵀ + b with FP8 operands. x [..., in], weight [out, in], bias [out] -> [..., out].

    The result has the dtype that nn.Linear would give: autocast's, or that of x.
    """
    device = x.device.type
    cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if cast else x.dtype
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = _Float8Product.apply(flat, weight, bias, layer, record, dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


class Float8Linear(nn.Linear):
    """nn.Linear in FP8. Made from a layer by changing its class (see `convert`), so that its
    parameters, hooks and places in the model are the same objects."""

    float8: LayerFloat8

    def forward(self, input: Tensor) -> Tensor:
        if not self.float8.active:
            return super().forward(input)
        record = self.training and torch.is_grad_enabled()
        return float8_linear(input, self.weight, self.bias, self.float8, record)


class Float8LoraLinear(LoraLinear):
    """An adapted layer whose base product is FP8; the adapter's two small products are not."""

    float8: LayerFloat8

    def forward(self, input: Tensor) -> Tensor:
        if not self.float8.active:
            return super().forward(input)
        record = self.training and torch.is_grad_enabled()
        base = float8_linear(input, self.weight, self.bias, self.float8, record)
        if not self.adapter_active:
            return base
        dropped = F.dropout(input, self.dropout, self.training)
        low = F.linear(dropped, self.lora_a.to(input.dtype))
        return base + F.linear(low, self.lora_b.to(input.dtype)) * self.scale


# What can compute in FP8, and as what.
FLOAT8_CLASSES: dict[type[nn.Linear], type[nn.Linear]] = {
    nn.Linear: Float8Linear,
    LoraLinear: Float8LoraLinear,
}


class _Float8Product(torch.autograd.Function):
    """Shapes: x [t, in], weight [out, in], grad [t, out]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LayerFloat8,
        record: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        input_8 = layer.cast("input", x, record)
        weight_8 = layer.cast("weight", weight, record)
        out = product(input_8, weight_8, layer.settings.backend)
        if layer.settings.scaling == "block":  # the other products sum over another axis
            ctx.save_for_backward(x, weight)
        else:
            ctx.save_for_backward(input_8.codes, input_8.scale, weight_8.codes, weight_8.scale)
        ctx.layer, ctx.record = layer, record
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return (out if bias is None else out + bias.float()).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: LayerFloat8 = ctx.layer
        backend = layer.settings.backend
        blocks = layer.settings.scaling == "block"
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        saved = ctx.saved_tensors  # read once: each read would recompute under a checkpoint
        grad_x = grad_weight = grad_bias = None
        grad_8 = layer.cast("gradient", grad, ctx.record)
        if need_x:
            if blocks:
                weight_8 = layer.cast("weight", saved[1].T, False)
            else:
                weight_8 = _transposed(Quantized(*saved[2:]))
            grad_x = product(grad_8, weight_8, backend).to(ctx.x_dtype)
        if need_weight:
            if blocks:
                input_8 = layer.cast("input", saved[0].T, False)
                turned = layer.cast("gradient", grad.T, False)
            else:
                input_8 = _transposed(Quantized(*saved[:2]))
                turned = _transposed(grad_8)
            grad_weight = product(turned, input_8, backend).to(ctx.weight_dtype)
        if need_bias:
            grad_bias = grad.float().sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def product(left: Quantized, right: Quantized, backend: str = "emulated") -> Tensor:
    """left [m, k] times right [n, k]ᵀ with fp32 sums -> [m, n] fp32.

    Emulated: the values that the codes stand for are multiplied in fp32, where a product of two
    codes is exact. scaled_mm: torch's FP8 product; k is padded with zeros to what CUDA takes.
    """
    if backend == "scaled_mm":
        a, b = left.codes.contiguous(), right.codes.contiguous()
        if a.is_cuda and a.shape[1] % CUDA_MULTIPLE:  # the tokens of a weight gradient
            missing = -a.shape[1] % CUDA_MULTIPLE
            a, b = _padded(a, missing), _padded(b, missing)
        return torch._scaled_mm(a, b.t(), 1 / left.scale, 1 / right.scale, out_dtype=torch.float32)
    with torch.autocast(left.codes.device.type, enabled=False):
        return left.values() @ right.values().T


def _transposed(quantized: Quantized) -> Quantized:
    return Quantized(quantized.codes.T, quantized.scale)


def _padded(codes: Tensor, columns: int) -> Tensor:
    """Zeros to the right: the code 0 is the value 0 in both formats."""
    return F.pad(codes.view(torch.uint8), (0, columns)).view(codes.dtype)
