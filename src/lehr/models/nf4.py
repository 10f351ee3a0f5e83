"""A frozen base in four bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314, section 3).

Linear layers hold NF4 codes, 64 weights to a scale, the scales in 8 bits themselves (double
quantisation): 0.516 bytes a weight. A product takes the layer's weights dequantised, forward
and again backward, and keeps none, so that at most one layer's are there at a time. Codes are
made from the numbers that the files hold, so that they are the same in every precision.

bitsandbytes keeps and reads the codes, on the CPU too. They are made here, bit for bit its
own: it needs fifteen times as long on a CPU. And they are read as rows of one block: its
AVX-512 kernel (0.50.2) misreads rows that are not whole blocks, without a word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lehr.errors import Problem, RecipeError
from lehr.models.bitsandbytes import functional, require_bitsandbytes

BLOCK, SCALES = 64, 256  # weights to a scale; scales to a scale of scales
MARK = "lehr-base.json"  # beside an adapter: what its base has to be
# Quantiles of a normal distribution, 0 and both ends included (the paper's appendix E).
CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_CHUNK = 1 << 15  # blocks whose codes are made at once: their numbers stay in the caches


@dataclass(eq=False, frozen=True)
class Nf4Weight:
    """The weight [out, in] of one linear layer in four bits.

    packed  two codes a byte [blocks * 32, 1], the last block filled up with zeros
    scales  of the blocks in 8 bits [blocks]; None on the meta device: sizes alone
    offset  what was subtracted from the scales; outer: how to read what was left
    """

    shape: tuple[int, int]
    packed: Tensor
    scales: Tensor | None = None
    offset: Tensor | None = None
    outer: Any = None

    @classmethod
    def of(cls, weight: Tensor) -> Nf4Weight:
        """Quantise; a weight on the meta device gives sizes alone."""
        out, inputs = weight.shape
        blocks = -(-out * inputs // BLOCK)
        if weight.is_meta:
            packed = weight.new_empty((blocks * BLOCK // 2, 1), dtype=torch.uint8)
            return cls((out, inputs), packed)
        packed, largest = nf4_codes(weight.detach())
        offset = largest.mean()
        scales, outer = functional().quantize_blockwise(largest - offset, blocksize=SCALES)
        return cls((out, inputs), packed, scales, offset, outer)

    @classmethod
    def from_state(cls, packed: Tensor, state: Any) -> Nf4Weight:
        """From what bitsandbytes' own layers hold (`weight.data`, `weight.quant_state`)."""
        out, inputs = state.shape
        short = -(-out * inputs // BLOCK) * BLOCK // 2 - packed.numel()
        filled = torch.cat([packed.view(-1), packed.new_zeros(short)]).view(-1, 1)
        return cls((out, inputs), filled, state.absmax, state.offset, state.state2)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in], multiplied out in fp32 and rounded once."""
        if self.scales is None:
            return torch.empty(self.shape, dtype=dtype, device=self.packed.device)
        own = functional()
        state = own.QuantState(
            absmax=self.scales,
            shape=torch.Size((self.scales.numel(), BLOCK)),
            dtype=dtype,
            blocksize=BLOCK,
            quant_type="nf4",
            offset=self.offset,
            state2=self.outer,
        )
        found: Tensor = own.dequantize_4bit(self.packed, state)
        return found.view(-1)[: self.numel()].view(self.shape)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def to(self, device: torch.device) -> Nf4Weight:
        """The same numbers on another device."""
        if self.scales is None or self.offset is None:
            return replace(self, packed=self.packed.to(device))
        own = self.outer
        outer = functional().QuantState(
            absmax=own.absmax.to(device),
            code=own.code.to(device),
            blocksize=own.blocksize,
            dtype=own.dtype,
        )
        packed, scales, offset = (one.to(device) for one in (self.packed, self.scales, self.offset))
        return Nf4Weight(self.shape, packed, scales, offset, outer)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def bytes(self) -> int:
        """Codes, scales of blocks in 8 bits, scales of those in fp32."""
        return nf4_bytes(self.numel())


def nf4_bytes(numbers: int) -> int:
    """Bytes of one layer's weights in double-quantised NF4, without its 1 KB of tables.

    >>> nf4_bytes(64 * 256) / (64 * 256)
    0.515869140625
    """
    blocks = -(-numbers // BLOCK)
    return blocks * BLOCK // 2 + blocks + 4 * -(-blocks // SCALES)


def nf4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(two codes a byte [blocks * 32, 1], largest magnitude of each block [blocks]) of numbers.

    A code is the nearest of CODES to the number over its block's largest; the lower of two.

    >>> packed, largest = nf4_codes(torch.tensor([[0.0, -2.0, 1.0, 0.3]]))
    >>> [hex(byte) for byte in packed[:2, 0].tolist()], largest.tolist()
    (['0x70', '0xc9'], [2.0])
    """
    flat = weight.reshape(-1)
    missing = -flat.numel() % BLOCK
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    blocks = flat.view(-1, BLOCK)
    codes = torch.tensor(CODES, device=weight.device)
    bounds = ((codes[:-1] + codes[1:]) / 2).tolist()
    packed = torch.empty(len(blocks), BLOCK // 2, dtype=torch.uint8, device=weight.device)
    largest = torch.empty(len(blocks), device=weight.device)
    for start in range(0, len(blocks), _CHUNK):
        part = blocks[start : start + _CHUNK].float()
        found = part.abs().amax(1)
        part = (part * (1.0 / found.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
        above = torch.empty_like(part, dtype=torch.bool)
        code = torch.zeros_like(part, dtype=torch.uint8)
        for bound in bounds:
            code += torch.gt(part, bound, out=above).view(torch.uint8)
        packed[start : start + _CHUNK] = (code[:, ::2] << 4) | code[:, 1::2]
        largest[start : start + _CHUNK] = found
    return packed.view(-1, 1), largest


class FrozenProduct(torch.autograd.Function):
    """x Wᵀ + b with W in four bits; nothing is kept but the codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantised: Nf4Weight, bias: Tensor | None) -> Tensor:
        ctx.quantised = quantised
        return nn.functional.linear(x, quantised.dense(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ ctx.quantised.dense(grad.dtype), None, None


class Nf4Linear(nn.Linear):
    """A linear layer whose frozen weight is in four bits; `weight` dequantises it anew."""

    quantised: Nf4Weight
    dtype: torch.dtype

    def __init__(self, quantised: Nf4Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = quantised.shape
        self.quantised, self.dtype = quantised, dtype
        self.bias = bias  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in] in the type that the layer computes in."""
        return self.quantised.dense(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = FrozenProduct.apply(input, self.quantised, self.bias)
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """To another device or type: the codes are moved, and never cast."""
        super()._apply(fn, recurse)
        like = fn(torch.empty(0, dtype=self.dtype, device=self.quantised.device))
        self.dtype = like.dtype
        if like.device != self.quantised.device:
            self.quantised = self.quantised.to(like.device)
        return self


def quantise(network: Any, dtype: torch.dtype | None = None) -> int:
    """Put every linear layer but the output layer into four bits; how many.

    dtype  that they will compute in (default: that of their weights)
    Raises RecipeError without bitsandbytes, and for a network without such layers.
    """
    output = network.get_output_embeddings()
    if not network.get_input_embeddings().weight.is_meta:
        require_bitsandbytes()
    found = [
        (name, module)
        for name, module in network.named_modules()
        if type(module) is nn.Linear and module is not output
    ]
    if not found:
        expected = "lora: this model has no plain linear layers to put into four bits"
        raise RecipeError(Problem("adapter.kind", expected, "qlora"))
    for index, (name, module) in enumerate(found):
        parent, _, leaf = name.rpartition(".")
        made = Nf4Linear(Nf4Weight.of(module.weight), module.bias, dtype or module.weight.dtype)
        made.train(module.training)
        setattr(network.get_submodule(parent) if parent else network, leaf, made)
        found[index] = (name, made)  # the dense weight goes now, not at the end
    return len(found)


def round_trip(network: Any) -> None:
    """Let the weights be those of a base in four bits, dequantised again."""
    require_bitsandbytes()
    output = network.get_output_embeddings()
    for module in network.modules():
        if type(module) is nn.Linear and module is not output:
            module.weight.data = Nf4Weight.of(module.weight).dense(module.weight.dtype)


def quantised_layers(network: Any) -> dict[str, Nf4Weight]:
    """Weights in four bits, by the name of their layer (adapted or not)."""
    return {
        name: module.quantised
        for name, module in network.named_modules()
        if isinstance(module, Nf4Linear)
    }


def parameter_count(network: Any) -> int:
    """Numbers of a network's own weights, four-bit ones included."""
    plain = sum(parameter.numel() for parameter in network.parameters())
    return plain + sum(one.numel() for one in quantised_layers(network).values())


def stored_bytes(network: Any, size: int) -> int | None:
    """Bytes of a base with layers in four bits, `size` for each other number; None without."""
    layers = quantised_layers(network).values()
    if not layers:
        return None
    plain = sum(parameter.numel() for parameter in network.parameters())
    return plain * size + sum(one.bytes for one in layers)


def dense_bytes(network: Any, size: int) -> tuple[int, int]:
    """Bytes of (the largest layer, all layers) in four bits, dequantised to `size` a number."""
    numbers = [one.numel() for one in quantised_layers(network).values()]
    return max(numbers, default=0) * size, sum(numbers) * size
