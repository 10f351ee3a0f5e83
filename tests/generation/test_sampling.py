"""Samplers against their definition in float64, and their random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lehr.generation.sampling import Sampling, item_keys, sample_rows, uniform_table, uniforms


def kept_shares(logits: Tensor, sampling: Sampling) -> Tensor:
    """The definition for one row [V]: the whole vocabulary sorted, in float64."""
    shares = torch.softmax(logits.double() / sampling.temperature, -1)
    order = sorted(range(len(shares)), key=lambda token: (-float(logits[token]), token))
    kept = torch.ones(len(shares), dtype=torch.bool)
    if sampling.top_k:
        least = logits[order[min(sampling.top_k, len(order)) - 1]]
        kept &= logits >= least
    mass = torch.where(kept, shares, 0.0)
    mass = mass / mass.sum()
    before = 0.0
    for token in order:
        if before >= sampling.top_p:
            kept[token] = False
        before += float(mass[token])
    kept &= shares >= sampling.min_p * shares.max()
    left = torch.where(kept, shares, 0.0)
    return left / left.sum()


def by_definition(logits: Tensor, sampling: Sampling, uniform: float) -> int:
    cumulative = kept_shares(logits, sampling).cumsum(-1)
    return int((cumulative <= uniform * float(cumulative[-1])).sum())


SETTINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.3, top_p=0.9),
    Sampling(1.0, top_p=0.999),
    Sampling(0.8, top_k=5),
    Sampling(1.0, min_p=0.1),
    Sampling(0.9, top_p=0.8, top_k=40, min_p=0.02),
    Sampling(5.0, top_p=0.95, top_k=300),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize(("size", "spread"), [(48, 3.0), (5000, 1.0), (5000, 6.0)])
def test_draws_are_those_of_the_definition(sampling: Sampling, size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(8, size, generator=generator) * spread
    logits[:, 7] = logits[:, 11]  # equal tokens
    uniform = torch.rand(8, generator=generator, dtype=torch.float64)
    drawn = sample_rows(logits, sampling, uniform)
    wanted = [
        by_definition(row, sampling, float(u)) for row, u in zip(logits, uniform, strict=True)
    ]
    assert drawn.tolist() == wanted


def test_a_hand_computed_nucleus_and_floor() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])).repeat(4, 1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.999], dtype=torch.float64)
    # Nucleus of 0.6: tokens 1 and 3 with 0.4 and 0.3, so the boundary is at 4/7.
    nucleus = sample_rows(logits, Sampling(1.0, top_p=0.6), uniform)
    assert nucleus.tolist() == [1, 1, 1, 3]
    # At least 0.6 of the likeliest's 0.4: the same two tokens.
    assert sample_rows(logits, Sampling(1.0, min_p=0.6), uniform).tolist() == [1, 1, 1, 3]
    assert sample_rows(logits, Sampling(1.0, top_k=1), uniform).tolist() == [1, 1, 1, 1]
    # All: boundaries at 0.1, 0.5, 0.7.
    assert sample_rows(logits, Sampling(1.0), uniform).tolist() == [0, 1, 2, 3]


def test_equal_tokens_at_the_edge_of_the_candidates_are_cut_by_their_id() -> None:
    # The nucleus of a half is the first thousand ids of 2,000 equal ones: wider than a first look.
    logits = torch.zeros(3, 2000)
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    drawn = sample_rows(logits, Sampling(1.0, top_p=0.5), uniform)
    assert drawn.tolist() == [0, 500, 999]
    # All of the tokens that equal the k-th stay.
    assert sample_rows(logits, Sampling(1.0, top_k=3), uniform).tolist() == [0, 1000, 1999]


def test_the_largest_number_finds_a_token_with_mass() -> None:
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [3, 300]] = 0.0
    last = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    for sampling in (Sampling(1.0), Sampling(1.0, top_p=0.99), Sampling(1.0, min_p=0.5)):
        assert sample_rows(logits, sampling, last).tolist() == [300]
        assert sample_rows(logits, sampling, 0 * last).tolist() == [3]


def test_rows_do_not_touch_each_other() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)) * 2
    uniform = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for sampling in SETTINGS:
        together = sample_rows(logits, sampling, uniform)
        alone = [sample_rows(logits[[i]], sampling, uniform[[i]])[0] for i in range(6)]
        assert together.tolist() == [int(one) for one in alone]


def test_the_table_is_the_stream() -> None:
    keys = item_keys(5, [0, 1, 7])
    table = uniform_table(keys, 9)
    assert table.shape == (3, 9) and table.dtype == torch.float64
    for position in range(9):
        assert np.array_equal(table[:, position].numpy(), uniforms(keys, position))
    assert float(table.min()) >= 0.0 and float(table.max()) < 1.0
