"""Choosing the next token: greedy, or by keyed random numbers, for all rows at once.

The random number of a token is a pure function of (seed, item, position), so a sample
does not depend on which batch its prompt was in, or on how many tokens others drew.
A draw inverts the cumulative sum in order of token id, so that a tiny change of the
logits moves the result only at a boundary of that sum. No step sorts the vocabulary:
what top-k and the nucleus keep is looked for among the likeliest few hundred tokens, and
among more where these do not prove it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lehr.streams import seed_for

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_CANDIDATES = 128  # the first look; each further one is 16 times as wide
_BLOCK = 256  # tokens whose mass is summed at once


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy, and the rest then changes nothing.

    temperature  logits are divided by it
    top_k        0, or: only the k likeliest tokens (and what equals the last of them)
    top_p        the nucleus (Holtzman et al. 2020): the smallest set of the likeliest of
                 these whose share of their mass reaches it; equal tokens by their id
    min_p        only tokens at least so likely as this share of the likeliest one's
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def item_keys(seed: int, items: Sequence[int]) -> NDArray[np.uint64]:
    """One 64-bit key for each item of this seed."""
    return np.array([seed_for(seed, "generate", item) for item in items], dtype=np.uint64)


def uniforms(keys: NDArray[np.uint64], position: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per key at `position`: SplitMix64 as a counter-based stream.

    The finaliser is that of Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators" (OOPSLA 2014): each output is a bijective mix of key + position * odd constant.
    """
    with np.errstate(over="ignore"):
        state = keys + np.uint64(position + 1) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform_table(keys: NDArray[np.uint64], positions: int) -> Tensor:
    """Float64 [items, positions]: `uniforms` of every position, so that a step looks up only."""
    columns = [uniforms(keys, position) for position in range(positions)]
    return torch.from_numpy(np.stack(columns, axis=1))


def sample_rows(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """One token a row: logits [B, V] fp32; uniform [B] float64 in [0, 1) -> int64 [B]."""
    uniform = uniform.to(logits.device)
    if sampling.top_p < 1.0 or sampling.top_k:
        return _draw_among_likeliest(logits, sampling, uniform)
    weights = _weights(logits, logits.amax(-1, keepdim=True), sampling.temperature)
    if sampling.min_p:
        weights.masked_fill_(weights < sampling.min_p, 0.0)
    return _draw(weights, uniform)


def _weights(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """exp((z - max z) / T): 1 for the likeliest token, and no overflow."""
    weights = logits - largest
    if temperature != 1.0:
        weights /= temperature
    return weights.exp_()


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative weight [B, V] at uniform * total, first by block, then inside one."""
    rows, size = weights.shape
    blocks = -(-size // _BLOCK)
    if blocks * _BLOCK != size:
        weights = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - size))
    by_block = weights.view(rows, blocks, _BLOCK)
    ends = by_block.sum(-1, dtype=torch.float64).cumsum(-1)
    # Below the total also after rounding; right=True then finds a block with mass.
    total = ends[:, -1:]
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, 0 * total))
    block = torch.searchsorted(ends, threshold, right=True)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = by_block[torch.arange(rows, device=weights.device), block[:, 0]].double()
    sums = inside.cumsum(-1)
    # Summed in another order than the block's mass: the last token with mass is the limit.
    last = (inside > 0).to(torch.int8).cumsum(-1).argmax(-1, keepdim=True)
    at = torch.searchsorted(sums, threshold - before, right=True)
    return (block * _BLOCK + torch.minimum(at, last)).squeeze(1)


def _draw_among_likeliest(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Candidates in order of weight, cut, and drawn from in order of id; wider where unproved."""
    size = logits.shape[1]
    chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    open_rows = torch.arange(len(logits), device=logits.device)
    width = min(size, max(_CANDIDATES, 2 * sampling.top_k))
    while len(open_rows):
        rows = logits[open_rows] if len(open_rows) < len(logits) else logits
        ids, masses, proved = _candidates(rows, sampling, width)
        ids, by_id = ids.sort(dim=-1)
        masses = masses.gather(1, by_id)
        cumulative = masses.double().cumsum(-1)
        threshold = uniform[open_rows, None] * cumulative[:, -1:]
        at = torch.searchsorted(cumulative, threshold, right=True)
        last = masses.gt(0).cumsum(-1).argmax(-1, keepdim=True)
        chosen[open_rows] = ids.gather(1, torch.minimum(at, last)).squeeze(1)
        open_rows = open_rows[~proved]
        width = min(size, 16 * width)
    return chosen


def _candidates(logits: Tensor, sampling: Sampling, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` likeliest tokens by weight, then id: their ids, their weights [B, width] (0
    where cut), and for each row whether none outside of them can be kept."""
    values, ids = logits.topk(width, -1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    weights = _weights(values, values[:, :1], sampling.temperature)
    kept = weights > 0
    if sampling.top_k:
        kept &= values >= values[:, [min(sampling.top_k, width) - 1]]
    if sampling.top_p < 1.0:
        # Shares are of what top-k left; without it, of the whole vocabulary.
        own = weights.masked_fill(~kept, 0.0) if sampling.top_k else weights
        every = own if sampling.top_k else _weights(logits, values[:, :1], sampling.temperature)
        mass = own.double()
        before = mass.cumsum(-1) - mass
        kept &= before < sampling.top_p * every.sum(-1, keepdim=True, dtype=torch.float64)
    kept &= weights >= sampling.min_p
    masses = weights.masked_fill(~kept, 0.0)
    # A token outside may equal the last candidate, so all that is kept must be likelier.
    least = values.masked_fill(~kept, float("inf")).amin(-1)
    proved = values[:, -1] < least
    return ids, masses, proved | (width == logits.shape[1])
