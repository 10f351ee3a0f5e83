"""Sizes of packs that are not made equal those of the packs that are."""

from __future__ import annotations

import pytest
import torch

from lehr.data.loader import UpdateBatches
from lehr.data.shapes import Encoded, Origin


def example(tokens: int, supervised: int, branches: tuple[Encoded, ...] = ()) -> Encoded:
    flags = torch.zeros(tokens, dtype=torch.bool)
    flags[tokens - supervised :] = True
    return Encoded(torch.ones(tokens, dtype=torch.int64), flags, Origin("a", "a", 1), branches)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_sizes_without_packs_are_those_of_the_packs(packing: bool, world: int) -> None:
    rows = [example(4 + 5 * n % 17, 1 + n % 3) for n in range(23)]
    pairs = [example(4, 0, (example(2 + n, 2), example(3, 1))) for n in range(7)]
    shares = {"rows": 0.6, "pairs": 0.4}

    def batches(rank: int) -> UpdateBatches:
        sources = {"rows": rows, "pairs": pairs}
        return UpdateBatches(sources, shares, 8, 3, 30, packing, rank, world)

    for rank in range(world):
        real, sizes = batches(rank), batches(rank)
        for _ in range(9):
            packs = [(one.tokens, int(one.targets.numel())) for one in real.next()]
            assert sizes.next_sizes() == packs
