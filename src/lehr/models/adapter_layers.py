"""Layers with trained parts: LoRA around linear layers, single rows of a vocabulary.

y = x Wᵀ + s (x Aᵀ) Bᵀ with s = alpha / rank, B = 0 at the start (Hu et al. 2021, eq. 3).
An adapted layer is a new module around the *same* weight, so base names and tied
weights stay as they are. Trained tensors are fp32; products run in the dtype of x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lehr.models.nf4 import FrozenProduct, Nf4Linear, Nf4Weight


@dataclass(frozen=True)
class AdapterSpec:
    """What was added: enough to make it again, and to write adapter_config.json."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]  # full module names
    rows: tuple[int, ...] = ()  # trained vocabulary ids

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class _LoraProduct(torch.autograd.Function):
    """x Wᵀ + b + s (x Aᵀ) Bᵀ; saves x and x Aᵀ only, adds both input gradients in one product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scale: float,
        by_columns: bool,
        quantised: Nf4Weight | None = None,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if quantised is not None:  # dequantised for this product alone
            weight = quantised.dense(x.dtype)
        assert weight is not None
        matrix = weight if by_columns else weight.T  # [in, out]
        out = flat @ matrix if bias is None else torch.addmm(bias, flat, matrix)
        a, b = lora_a.to(x.dtype), lora_b.to(x.dtype)
        low = flat @ a.T
        out.addmm_(low, b.T, alpha=scale)
        ctx.quantised = quantised
        kept = weight if quantised is None else None
        ctx.save_for_backward(flat, kept, bias, lora_a, lora_b, low)
        ctx.scale, ctx.by_columns, ctx.shape = scale, by_columns, x.shape
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, bias, lora_a, lora_b, low = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        a, b = lora_a.to(flat.dtype), lora_b.to(flat.dtype)
        by_low = (grad @ b).mul_(ctx.scale)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            if ctx.quantised is not None:
                weight = ctx.quantised.dense(grad.dtype)
            grad_x = grad @ (weight.T if ctx.by_columns else weight)
            grad_x.addmm_(by_low, a)
            grad_x = grad_x.view(ctx.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = flat.T @ grad if ctx.by_columns else grad.T @ flat
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        grad_a = (by_low.T @ flat).to(lora_a.dtype)
        # The narrow operand is the one to transpose: a fifth faster on a CPU at 1,536 outputs.
        grad_b = (low.T @ grad).mul_(ctx.scale).T.to(lora_b.dtype)
        return grad_x, grad_weight, grad_bias, grad_a, grad_b, None, None, None


class LoraMixin:
    """The adapter of one linear layer: `lora_a` [rank, in], `lora_b` [out, rank], both fp32."""

    weight: Any
    bias: Any
    training: bool
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    dropout: float
    adapter_active: bool
    by_columns = False

    def attach(self, base: Any, spec: AdapterSpec, generator: torch.Generator) -> None:
        """Take over the tensors of `base` and begin at B = 0."""
        self.weight = base.weight
        self.bias = getattr(base, "bias", None)
        self.begin(spec, generator, *layer_shape(base), base.weight.device)

    def begin(
        self,
        spec: AdapterSpec,
        generator: torch.Generator,
        inputs: int,
        outputs: int,
        device: torch.device,
    ) -> None:
        """A in its random start, B = 0."""
        # The distribution of peft's default: kaiming uniform with a = sqrt(5).
        bound = 1 / math.sqrt(inputs)
        start = torch.empty(spec.rank, inputs).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(start.to(device))
        self.lora_b = nn.Parameter(torch.zeros(outputs, spec.rank, device=device))
        self.scale, self.dropout, self.adapter_active = spec.scale, spec.dropout, True

    def base_product(self, x: Tensor) -> Tensor:
        base = x @ self.weight if self.by_columns else F.linear(x, self.weight)
        return base if self.bias is None else base + self.bias

    def adapted(self, x: Tensor) -> Tensor:
        if not self.adapter_active:
            return self.base_product(x)
        if self.dropout and self.training:
            base = self.base_product(x)
            dropped = F.dropout(x, self.dropout)
            low = F.linear(dropped, self.lora_a.to(x.dtype))
            return base + F.linear(low, self.lora_b.to(x.dtype)) * self.scale
        return self.whole_product(x)

    def whole_product(self, x: Tensor) -> Tensor:
        """Base and adapter at once."""
        out: Tensor = _LoraProduct.apply(
            x, self.weight, self.bias, self.lora_a, self.lora_b, self.scale, self.by_columns
        )
        return out

    def delta(self) -> Tensor:
        """s B A in fp32, in the layout of `weight`."""
        product = self.scale * (self.lora_b.detach().float() @ self.lora_a.detach().float())
        return product.T if self.by_columns else product


class LoraLinear(LoraMixin, nn.Linear):
    """nn.Linear with an adapter."""

    def __init__(self, base: nn.Linear, spec: AdapterSpec, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.attach(base, spec, generator)

    def forward(self, input: Tensor) -> Tensor:
        return self.adapted(input)


class LoraNf4(LoraMixin, Nf4Linear):
    """A linear layer in four bits with an adapter."""

    def __init__(self, base: Nf4Linear, spec: AdapterSpec, generator: torch.Generator) -> None:
        Nf4Linear.__init__(self, base.quantised, base.bias, base.dtype)
        self.begin(spec, generator, self.in_features, self.out_features, base.quantised.device)

    def base_product(self, x: Tensor) -> Tensor:
        out: Tensor = FrozenProduct.apply(x, self.quantised, self.bias)
        return out

    def whole_product(self, x: Tensor) -> Tensor:
        out: Tensor = _LoraProduct.apply(
            x, None, self.bias, self.lora_a, self.lora_b, self.scale, False, self.quantised
        )
        return out

    def forward(self, input: Tensor) -> Tensor:
        return self.adapted(input)


class LoraConv1D(LoraMixin, Conv1D):
    """transformers' Conv1D (GPT-2: a linear layer whose weight is [in, out]) with an adapter."""

    by_columns = True

    def __init__(self, base: Conv1D, spec: AdapterSpec, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.nf, self.nx = base.nf, base.nx
        self.attach(base, spec, generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(x)


class RowEmbedding(nn.Embedding):
    """An embedding of which the rows `row_ids` are trained, the others untouched."""

    rows: nn.Parameter
    row_ids: Tensor

    def __init__(self, base: nn.Embedding, ids: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        self.padding_idx, self.max_norm = base.padding_idx, base.max_norm
        self.norm_type, self.sparse = base.norm_type, base.sparse
        self.scale_grad_by_freq = base.scale_grad_by_freq
        self.weight = base.weight
        # Gemma's embedding multiplies by a constant that it keeps beside the weight.
        known: float | None = getattr(base, "multiplier", None)
        self.multiplier: float | None = getattr(base, "scalar_embed_scale", known)
        _attach_rows(self, ids)

    def forward(self, input: Tensor) -> Tensor:
        embedded = F.embedding(input, self.weight)
        if self.adapter_active:
            match = input.unsqueeze(-1) == self.row_ids
            hit = match.any(-1, keepdim=True)
            # A product with 0/1 rather than an indexed add: its backward has one fixed order.
            own = match.to(self.rows.dtype) @ self.rows
            embedded = torch.where(hit, own.to(embedded.dtype), embedded)
        return embedded if self.multiplier is None else embedded * self.multiplier


class RowLinear(nn.Linear):
    """An output layer of which the rows `row_ids` are trained (or shared with the embedding)."""

    rows: nn.Parameter
    row_ids: Tensor

    def __init__(
        self, base: nn.Linear, ids: Sequence[int], shared: nn.Parameter | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        _attach_rows(self, ids, shared)

    def forward(self, input: Tensor) -> Tensor:
        logits = F.linear(input, self.weight, self.bias)
        if not self.adapter_active:
            return logits
        bias = None if self.bias is None else self.bias[self.row_ids]
        own = F.linear(input, self.rows.to(input.dtype), bias)
        return logits.index_copy(-1, self.row_ids, own.to(logits.dtype))


def _attach_rows(module: Any, ids: Sequence[int], shared: nn.Parameter | None = None) -> None:
    device = module.weight.device
    module.register_buffer("row_ids", torch.tensor(ids, dtype=torch.long, device=device), False)
    start = module.weight.detach()[module.row_ids].float().clone()
    module.rows = nn.Parameter(start) if shared is None else shared
    module.adapter_active = True


def layer_shape(module: Any) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight: Tensor = module.weight
    outputs, inputs = weight.shape if not isinstance(module, Conv1D) else weight.shape[::-1]
    return int(inputs), int(outputs)
