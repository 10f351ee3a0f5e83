import pytest
from small_runs import make_pack, merge_packs

from lehr.errors import OutOfResources
from lehr.training.batch import choose_micro_batch, cut

GIB = 2**30


def estimate(packs):
    return GIB + packs * 100 * 2**20


@pytest.mark.parametrize(
    ("packs_per_update", "limit", "expected"),
    [
        (16, 8 * GIB, 16),
        (16, estimate(7), 6),
        (6, estimate(5), 3),
        (16, estimate(1), 1),
        (1, 9e9, 1),
    ],
)
def test_the_largest_even_cut_that_fits(packs_per_update, limit, expected):
    chosen = choose_micro_batch(packs_per_update, estimate, int(limit))
    assert chosen.packs == expected
    assert chosen.estimated_bytes == estimate(expected) <= limit
    assert f"up to {expected} pack(s)" in chosen.why


def test_one_pack_too_many():
    with pytest.raises(OutOfResources, match=r"1\.10 GiB for one pack, 1\.00 GiB allowed"):
        choose_micro_batch(4, estimate, GIB)


def test_cut_keeps_every_pack_once():
    packs = [make_pack([1, 2, 3], item) for item in range(7)]
    groups = cut(packs, 3, merge_packs)
    assert [group.items for group in groups] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert cut(packs, 1, None) == packs


def test_a_window_of_zero_and_a_missing_merge():
    with pytest.raises(ValueError, match="at least 1"):
        cut([make_pack([1, 2])], 0, merge_packs)
    with pytest.raises(ValueError, match="merges packs"):
        cut([make_pack([1, 2])] * 2, 2, None)
