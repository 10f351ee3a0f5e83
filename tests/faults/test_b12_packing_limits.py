"""B12: packing must work at every limit and lose no token (a limit once stopped it altogether)."""

from __future__ import annotations

import pytest
import torch

from lehr.data.packing import fill, pack
from lehr.data.shapes import Encoded, Origin


def _row(length: int) -> Encoded:
    supervised = torch.ones(length, dtype=torch.bool)
    supervised[0] = False
    return Encoded(torch.arange(length), supervised, Origin("s", "f", 1))


@pytest.mark.parametrize("limit", [4000, 4001])
def test_two_thousand_rows_of_a_thousand_tokens_fill_five_hundred_packs(limit: int) -> None:
    packs = pack([(i, _row(1000)) for i in range(2000)], limit)
    assert len(packs) == 500
    assert sum(one.tokens for one in packs) == 2_000_000
    assert fill(packs, limit) == pytest.approx(4000 / limit)
    assert sorted(item for one in packs for item in one.items) == list(range(2000))


def test_rows_around_the_limit_keep_every_token() -> None:
    packs = pack([(0, _row(17)), (1, _row(9))], 12)
    assert [one.items for one in packs] == [(0,), (1,)]
    assert sum(one.tokens for one in packs) == 26
