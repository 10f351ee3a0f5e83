"""B11: a packed neighbour must not become a target (restarted positions alone do not isolate)."""

from __future__ import annotations

import torch

from lehr.data.packing import pack, single
from lehr.data.shapes import Encoded, Origin


def _row(length: int, first: int) -> Encoded:
    supervised = torch.ones(length, dtype=torch.bool)
    supervised[0] = False
    return Encoded(torch.arange(first, first + length), supervised, Origin("s", "f", 1))


def test_five_and_seven_tokens_have_ten_targets_not_eleven() -> None:
    (one,) = pack([(0, _row(5, 100)), (1, _row(7, 200))], 64)
    assert one.tokens == 12
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
    assert one.targets.numel() == 4 + 6
    assert 200 not in one.targets.tolist()  # B's first token is predicted from nothing
    assert 4 not in one.predict_from.tolist()  # A's last position predicts nothing


def test_the_packed_pairs_are_the_separate_pairs() -> None:
    rows = [_row(5, 100), _row(7, 200)]
    (one,) = pack(list(enumerate(rows)), 64)
    separate = [single(0, rows[0]), single(1, rows[1])]
    asked = [(p.ids[p.predict_from].tolist(), p.targets.tolist()) for p in separate]
    assert one.ids[one.predict_from].tolist() == asked[0][0] + asked[1][0]
    assert one.targets.tolist() == asked[0][1] + asked[1][1]
