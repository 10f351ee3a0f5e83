"""A forward pass for decoding alone: the Llama shape in about fourteen calls a layer.

transformers' modules take 0.7 ms of Python and dispatch a layer and token; here a step of one
row is bound by reading the weights. Prompts run packed, without padding, under the training
pass's own attention. A step attends over `RowCache` with the heads of a group as rows of one
product: a fifth of the time of attention over repeated heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lehr.data.shapes import Segments
from lehr.generation.cache import RowCache
from lehr.generation.llama_shape import Layer, Norm, Shape, llama_shape
from lehr.generation.products import Kind, Product, multiplier, single_row_kernels
from lehr.generation.step_desk import LayerViews, StepDesk
from lehr.models.attention import segment_attention
from lehr.models.head import head_of
from lehr.models.head_chunks import sharpen
from lehr.models.segments import plan_segments


def normed(x: Tensor, norm: Norm) -> Tensor:
    """w x / sqrt(mean(x²) + ε) over the last dimension, in fp32 up to the product with w."""
    # torch's own takes two calls more. A row's bits do not depend on its place either way.
    wide = x.float()
    squares = torch.linalg.vecdot(wide, wide).mul_(1.0 / x.shape[-1]).add_(norm.epsilon)
    return (wide * squares.rsqrt_()[..., None]).to(x.dtype).mul_(norm.weight)


def rotated(heads: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Rotary positions of [n, heads, size]; cosine and sine are [n, 1, size], see `signed`.

    Every term is rounded to the dtype of `heads`, as the network does it.
    """
    other_half = torch.roll(heads, heads.shape[-1] // 2, -1)
    return (heads * cosine).add_(other_half.mul_(signed_sine))


def signed(sine: Tensor) -> Tensor:
    """The sine as `rotated` takes it: negative for the first half, which loses the other one."""
    half = sine.shape[-1] // 2
    return torch.cat([-sine[..., :half], sine[..., half:]], dim=-1)


def attend(query: Tensor, at: LayerViews, mask: Tensor, scale: float) -> Tensor:
    """softmax(s Q Kᵀ + mask) V of one query a row: [n, heads, size] -> [n, heads * size].

    The heads of a group are the rows of one product, so that nothing is repeated for them. It
    rounds where the training pass over short segments rounds (`models.attention_cpu`): that
    halves the gap between a sample's log-probability here and there.
    """
    rows, heads, size = query.shape
    groups = at.keys.shape[0] // rows
    lanes = query.reshape(rows * groups, heads // groups, size).float()
    scores = torch.baddbmm(mask, lanes, at.keys.float(), alpha=scale)
    shares = torch.softmax(scores, -1).to(query.dtype).to(at.values.dtype)
    return torch.bmm(shares, at.values).to(query.dtype).view(rows, -1)


class HeadProduct:
    """Hidden states [n, d] to fp32 logits [n, V]: `models.head` with a laid-out weight."""

    def __init__(self, network: Any, kind: Kind) -> None:
        self.head = head_of(network).detached()
        self.multiply = multiplier(self.head.weight, None, kind)
        self.sharpens = kind != "int8" and self.head.weight.dtype == torch.bfloat16

    def __call__(self, hidden: Tensor) -> Tensor:
        head = self.head
        logits = self.multiply(hidden).float()
        if self.sharpens:
            sharpen(logits, hidden, head.weight)
        if head.bias is not None:
            logits += head.bias
        if head.rows is not None:
            assert head.row_ids is not None
            own = hidden.float() @ head.rows.float().T
            if head.bias is not None:
                own = own + head.bias[head.row_ids]
            logits.index_copy_(1, head.row_ids, own)
        if head.scale != 1.0:
            logits *= head.scale
        return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


class _Block:
    """One layer's products, made for decoding."""

    def __init__(self, layer: Layer, dtype: torch.dtype, kind: Kind, merge: bool) -> None:
        self.layer = layer
        self.query_key_value = Product(layer.query_key_value, dtype, kind, merge)
        self.output = Product([layer.output], dtype, kind, merge)
        self.gate_up = Product(layer.gate_up, dtype, kind, merge)
        self.down = Product([layer.down], dtype, kind, merge)
        self.silu = isinstance(layer.activation, nn.SiLU) or (
            type(layer.activation).__name__ == "SiLUActivation"
        )

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(normed(x, self.layer.before_feed_forward)).chunk(2, dim=-1)
        active = F.silu(gate) if self.silu else self.layer.activation(gate)
        return self.down(active.mul_(up)).add_(x)


class LeanNetwork:
    """The decode pass of one network as it is now: weights that change later are not seen."""

    def __init__(self, network: Any, kind: Kind = "plain", merge: bool = False) -> None:
        """Raises AnotherShape where the network is no Llama (see llama_shape)."""
        self.shape: Shape = llama_shape(network)
        shape = self.shape
        self.kind = kind
        self.blocks = [_Block(layer, shape.dtype, kind, merge) for layer in shape.layers]
        self.head = HeadProduct(network, kind)
        self.windows = {one.window for one in shape.layers}
        self._desk: StepDesk | None = None

    def new_cache(self, rows: int) -> RowCache:
        """An empty cache with a slot for each of `rows` rows."""
        shape = self.shape
        # One row's stay in fp32, as the products take them: a third of its attention's time. Of
        # many rows that would be twice the memory to read, and no faster.
        dtype = torch.float32 if rows == 1 else shape.dtype
        return RowCache(len(self.blocks), rows, shape.groups, shape.head_size, dtype)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, packed -> fp32 logits [n, V] after each, keys and values of all tokens.

        Keys and values are [layers, groups, tokens, size] in the order of the prompts.
        """
        shape = self.shape
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        starts = lengths.cumsum(0) - lengths
        ends = starts + lengths - 1
        plan = plan_segments(
            Segments(starts, lengths, torch.full_like(lengths, -1)), int(lengths.sum())
        )
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
        x = self._embed(torch.tensor([token for prompt in prompts for token in prompt]))
        cosine, sine = self._angles(positions)
        size = (len(self.blocks), shape.groups, plan.tokens, shape.head_size)
        keys, values = torch.empty(size, dtype=x.dtype), torch.empty(size, dtype=x.dtype)
        for index, block in enumerate(self.blocks):
            layer = block.layer
            query, key, value = self._heads(block, x, cosine, sine)
            keys[index], values[index] = key.transpose(0, 1), value.transpose(0, 1)
            mask = None if layer.window is None else torch.tensor(layer.window)
            seen, _ = segment_attention(
                _CAUSAL,
                query.transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                mask,
                scaling=layer.scale,
                sliding_window=layer.window,
                segments=plan,
            )
            seen, rest = seen[0].reshape(plan.tokens, -1), x
            if index == len(self.blocks) - 1:  # nobody reads what other tokens come to
                seen, rest = seen[ends], x[ends]
            x = block.feed_forward(block.output(seen).add_(rest))
        return self.head(normed(x, shape.norm)), keys, values

    def step(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """One token [n] at its position [n] in each of the first n slots -> fp32 logits [n, V]."""
        rows = tokens.numel()
        cache.reserve(int(positions.max()) + 1)
        if self._desk is None or not self._desk.fits(rows, cache):
            self._desk = StepDesk(rows, cache)
        with single_row_kernels(rows if self.kind == "plain" else 0, self.shape.dtype):
            return self._step(tokens, positions, self._desk)

    def _step(self, tokens: Tensor, positions: Tensor, desk: StepDesk) -> Tensor:
        shape = self.shape
        x = self._embed(tokens)
        cosine, sine = self._angles(positions)
        places, masks = desk.places(positions), desk.masks(positions, self.windows)
        for index, block in enumerate(self.blocks):
            layer = block.layer
            query, key, value = self._heads(block, x, cosine, sine)
            at = desk.layers[index]
            at.keys_flat.index_copy_(0, places, key.reshape(desk.lanes, -1).to(desk.dtype))
            at.values_flat.index_copy_(0, places, value.reshape(desk.lanes, -1).to(desk.dtype))
            seen = attend(query, at, masks[layer.window], layer.scale)
            x = block.feed_forward(block.output(seen).add_(x))
        return self.head(normed(x, shape.norm))

    def _heads(
        self, block: _Block, x: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values [n, heads, size] of a layer's input [n, d]."""
        shape, layer = self.shape, block.layer
        all_heads = block.query_key_value(normed(x, layer.before_attention))
        all_heads = all_heads.view(x.shape[0], -1, shape.head_size)
        turning = all_heads[:, : -shape.groups]
        if layer.norms_of_heads is not None:
            of_query, of_key = layer.norms_of_heads
            queries, keys = turning[:, : shape.heads], turning[:, shape.heads :]
            turning = torch.cat([normed(queries, of_query), normed(keys, of_key)], dim=1)
        turned = rotated(turning, cosine, sine)
        return turned[:, : shape.heads], turned[:, shape.heads :], all_heads[:, -shape.groups :]

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.shape.embedding(tokens)
        return embedded

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine [n, 1, size] in the network's dtype."""
        like = torch.empty(1, 1, 1, dtype=self.shape.dtype)
        cosine, sine = self.shape.rotary(like, positions[None])
        return cosine[0, :, None], signed(sine)[0, :, None]


class _Causal(nn.Module):
    is_causal = True


_CAUSAL = _Causal()
