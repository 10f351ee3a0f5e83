"""Choosing the next token: greedy, or by keyed random numbers.

The random number of a token is a pure function of (seed, item, position), so a sample
does not depend on which batch its prompt was in, or on how many tokens others drew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lehr.streams import seed_for

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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


def sample_rows(logits: Tensor, temperature: float, top_p: float, uniform: Tensor) -> Tensor:
    """One token a row from softmax(logits / temperature) cut to its nucleus.

    logits [B, V] fp32; uniform [B] float64 in [0, 1) -> int64 [B].
    The nucleus (Holtzman et al. 2020) is the smallest set of most probable tokens whose
    mass reaches `top_p`. The draw inverts the cumulative sum in order of token id, so a
    tiny change of the logits moves the result only at a boundary of that sum.
    """
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(dim=-1) - ordered
        outside = torch.zeros_like(probabilities, dtype=torch.bool)
        outside.scatter_(-1, order, mass_before >= top_p)
        probabilities = probabilities.masked_fill(outside, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    # Scaled by the total, so that the last token with mass is reached for any u < 1.
    threshold = uniform.to(cumulative.device).unsqueeze(-1) * cumulative[:, -1:]
    # right=True skips tokens without mass, whose cumulative sum equals their neighbour's.
    chosen = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return chosen.clamp_(max=logits.shape[-1] - 1)
