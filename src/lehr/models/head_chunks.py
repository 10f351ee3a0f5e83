"""Logits of one chunk of positions, and what a head is.

For a hidden state h and the head's matrix W, logits are z = cap(scale * (h Wᵀ + b)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

CHUNK_LOGITS = 8_000_000  # about 32 MB of fp32 logits at a time
LIKELIEST_BLOCK = 64
SHARPENED = 8  # the likeliest logits of each position that are summed again in fp32


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
        return cap(self, uncapped(self, hidden))

    def detached(self) -> Head:
        """The same numbers without a graph."""
        return replace(
            self,
            weight=self.weight.detach(),
            bias=None if self.bias is None else self.bias.detach(),
            rows=None if self.rows is None else self.rows.detach(),
        )


@lru_cache(maxsize=1)
def bf16_products_pay() -> bool:
    """True where the processor multiplies bf16 natively; else widening it first is faster."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if torch.float64 in (hidden.dtype, weight.dtype):
        return torch.float64
    both = {hidden.dtype, weight.dtype}
    if torch.bfloat16 in both and (hidden.device.type != "cpu" or bf16_products_pay()):
        return torch.bfloat16
    # A CPU multiplies fp16 more slowly than fp32.
    return torch.float16 if torch.float16 in both and hidden.is_cuda else torch.float32


def wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids [c, count] (at most V) of the largest logits of each row, in order.

    They stand in the blocks with the largest maxima, so that one pass looks for these and only
    the blocks are ranked: a fourth of topk's time at 49,152 tokens.
    """
    rows, size = logits.shape
    blocks = size // LIKELIEST_BLOCK
    if blocks <= 4 * count:
        return logits.topk(min(count, size), 1).indices
    whole = logits[:, : blocks * LIKELIEST_BLOCK].view(rows, blocks, LIKELIEST_BLOCK)
    best = whole.amax(-1).topk(count, 1).indices
    inside = torch.arange(LIKELIEST_BLOCK, device=logits.device)
    ids = (best[:, :, None] * LIKELIEST_BLOCK + inside).flatten(1)
    if blocks * LIKELIEST_BLOCK < size:
        rest = torch.arange(blocks * LIKELIEST_BLOCK, size, device=logits.device)
        ids = torch.cat([ids, rest.expand(rows, -1)], 1)
    return ids.gather(1, logits.gather(1, ids).topk(count, 1).indices)


def sharpen(
    logits: Tensor, hidden: Tensor, matrix: Tensor, targets: Tensor | None = None
) -> Tensor:
    """fp32 `logits` [c, V] of a bf16 product, the numbers that matter put right in place.

    A product's sums are fp32, but what comes out is rounded to bf16: a logit of 20 by up to
    0.06, and log Z with it. The likeliest tokens of each row and its target are summed again.
    Samples' log-probabilities then are 2.8e-2 nats from the training pass on SmolLM2, not 4.2e-2.
    """
    places = likeliest(logits, SHARPENED)
    if targets is not None:
        places = torch.cat([places, targets[:, None]], 1)
    exact = (hidden.float()[:, None] * matrix[places].float()).sum(-1)
    return logits.scatter_(1, places, exact)


def uncapped(
    head: Head, hidden: Tensor, weight: Tensor | None = None, targets: Tensor | None = None
) -> Tensor:
    """scale * (h Wᵀ + b) [c, V]; `weight` may hold an already converted copy.

    targets  [c]: whose logits must be as exact as the likeliest ones
    """
    dtype = product_dtype(hidden, head.weight)
    matrix = head.weight.to(dtype) if weight is None else weight
    narrow = hidden.to(dtype)
    logits = wide(narrow @ matrix.T)
    if dtype == torch.bfloat16 and logits.device.type == "cpu":
        sharpen(logits, narrow, matrix, targets)
    if head.bias is not None:
        logits += head.bias
    if head.rows is not None:
        assert head.row_ids is not None
        own = wide(hidden) @ wide(head.rows).T.to(wide(hidden).dtype)
        if head.bias is not None:
            own = own + head.bias[head.row_ids]
        logits = logits.index_copy(1, head.row_ids, own.to(logits.dtype))
    return logits if head.scale == 1.0 else logits * head.scale


def cap(head: Head, uncapped: Tensor) -> Tensor:
    if head.softcap is None:
        return uncapped
    return head.softcap * torch.tanh(uncapped / head.softcap)


def chunk_rows(vocabulary: int, chunk: int | None = None) -> int:
    """Positions per chunk: by the vocabulary alone, so that no timing changes a number."""
    return chunk if chunk is not None else max(16, CHUNK_LOGITS // max(vocabulary, 1))
