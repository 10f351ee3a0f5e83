"""B57 (loader): seeds of ranks, sources and passes must differ where they must, and only there."""

from __future__ import annotations

import itertools

import torch

from lehr.data.loader import Loader, UpdateBatches
from lehr.data.shapes import Encoded, Origin


def _batches(rank: int, seed: int = 0) -> UpdateBatches:
    supervised = torch.tensor([False, True, True])
    data = {
        name: [Encoded(torch.arange(3), supervised, Origin(name, name, i)) for i in range(64)]
        for name in ("a", "b")
    }
    shares = {"a": 0.5, "b": 0.5}
    return UpdateBatches(data, shares, 16, seed, pack_length=3, rank=rank, world=2)


def _items(rank: int, seed: int = 0) -> list[list[int]]:
    source = _batches(rank, seed)
    return [[item for one in source.next() for item in one.items] for _ in range(16)]


def test_two_ranks_never_train_on_the_same_example_of_an_update() -> None:
    first, second = _items(0), _items(1)
    for mine, other in zip(first, second, strict=True):
        assert len(mine) == len(other) == 8
        assert not set(mine) & set(other)
    assert first == _items(0)  # run twice: identical
    assert first != _items(0, seed=1)


def test_orders_of_sources_passes_and_seeds_differ_pairwise() -> None:
    orders = []
    for seed, source in itertools.product((0, 1), ("a", "b")):
        loader = Loader({source: [1] * 40}, {source: 1.0}, 40, seed)
        orders += [tuple(index for _, index in loader.next()) for _ in range(2)]
    assert len(set(orders)) == 8


def test_the_loader_neither_reads_nor_moves_the_global_random_state() -> None:
    torch.manual_seed(1)
    first = _items(0)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert _items(0) == first
    assert torch.equal(before, torch.get_rng_state())
