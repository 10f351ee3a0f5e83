"""Packing: pairs in closed form, isolation as pairs, determinism, and what no pack can express."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.data.packing import best_fit_decreasing, fill, merge, pack, single
from lehr.data.shapes import Encoded, Origin, Pack

ORIGIN = Origin(source="s", file="s.jsonl", line=1)


def example(
    ids: Sequence[int], supervised: Sequence[int] = (), branches: tuple[Encoded, ...] = ()
) -> Encoded:
    """An example whose `supervised` places are targets."""
    flags = torch.zeros(len(ids), dtype=torch.bool)
    flags[list(supervised)] = True
    return Encoded(torch.tensor(list(ids)), flags, ORIGIN, branches)


def plain(length: int, first: int = 0) -> Encoded:
    return example(range(first, first + length), range(1, length))


def pair(prompt: int, chosen: int, rejected: int, first: int = 0) -> Encoded:
    answers = (
        example(range(first + 100, first + 100 + chosen), range(chosen)),
        example(range(first + 200, first + 200 + rejected), range(rejected)),
    )
    return example(range(first, first + prompt), (), answers)


def pairs_of(one: Pack) -> list[tuple[int, int, int]]:
    """(id that predicts, target, item), sorted: what a pack trains, wherever it stands."""
    items = torch.tensor(one.items)[one.sequence_example[one.sequence]]
    return sorted(
        zip(one.ids[one.predict_from].tolist(), one.targets.tolist(), items.tolist(), strict=True)
    )


def test_one_example_predicts_each_target_from_the_position_before() -> None:
    one = single(7, example([10, 11, 12, 13], [2, 3]))
    assert one.predict_from.tolist() == [1, 2]
    assert one.targets.tolist() == [12, 13]
    assert one.positions.tolist() == [0, 1, 2, 3]
    assert one.sequence.tolist() == [0, 0]
    assert one.weights.tolist() == [1.0, 1.0]
    assert one.items == (7,)
    assert one.origins == (ORIGIN,)
    assert one.segments.prefix.tolist() == [-1]


def test_both_answers_of_a_pair_start_from_the_last_position_of_their_prompt() -> None:
    one = single(3, pair(prompt=3, chosen=2, rejected=4))
    assert one.ids.tolist() == [0, 1, 2, 100, 101, 200, 201, 202, 203]
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert one.segments.start.tolist() == [0, 3, 5]
    assert one.segments.length.tolist() == [3, 2, 4]
    assert one.segments.prefix.tolist() == [-1, 0, 0]
    assert one.predict_from.tolist() == [2, 3, 2, 5, 6, 7]
    assert one.targets.tolist() == [100, 101, 200, 201, 202, 203]
    assert one.sequence.tolist() == [0, 0, 1, 1, 1, 1]
    assert one.sequence_example.tolist() == [0, 0]
    assert one.sequence_sum(one.weights).tolist() == [2.0, 4.0]


def test_a_branch_predicts_only_its_supervised_tokens() -> None:
    tail_only = example([5, 6, 7], [2])
    one = single(0, example([1, 2], (), (tail_only, example([8], [0]))))
    assert one.predict_from.tolist() == [3, 1]
    assert one.targets.tolist() == [7, 8]


def test_packs_are_ordered_by_their_first_example_and_keep_order_inside() -> None:
    packs = pack([(i, plain(n)) for i, n in enumerate([3, 5, 2, 4])], pack_length=7)
    assert [one.items for one in packs] == [(0, 3), (1, 2)]
    assert fill(packs, 7) == 1.0


def test_without_packing_each_example_has_its_own_pack() -> None:
    packs = pack([(i, plain(n)) for i, n in enumerate([3, 5, 2])], 100, packing=False)
    assert [one.items for one in packs] == [(0,), (1,), (2,)]


def test_an_example_longer_than_a_pack_is_never_cut() -> None:
    packs = pack([(0, plain(4)), (1, pair(6, 5, 5)), (2, plain(4))], pack_length=8)
    assert [one.items for one in packs] == [(0, 2), (1,)]
    assert [one.tokens for one in packs] == [8, 16]
    assert fill(packs, 8) == 1.0


def test_merging_packs_equals_assembling_their_examples_in_one() -> None:
    first = pack([(0, plain(4)), (1, pair(3, 2, 2, first=300))], 100)
    second = pack([(2, pair(2, 1, 3, first=600)), (3, plain(5, first=900))], 100)
    merged = merge([*first, *second])
    whole = pack(
        [
            (0, plain(4)),
            (1, pair(3, 2, 2, first=300)),
            (2, pair(2, 1, 3, first=600)),
            (3, plain(5, first=900)),
        ],
        100,
    )[0]
    for name in ("ids", "positions", "predict_from", "targets", "sequence", "weights"):
        assert torch.equal(getattr(merged, name), getattr(whole, name)), name
    for name in ("start", "length", "prefix"):
        assert torch.equal(getattr(merged.segments, name), getattr(whole.segments, name)), name
    assert torch.equal(merged.sequence_example, whole.sequence_example)
    assert merged.items == whole.items


def test_nothing_packs_to_nothing_and_nothing_cannot_be_merged() -> None:
    assert pack([], 8) == []
    assert fill([], 8) == 0.0
    with pytest.raises(ValueError, match="at least one pack"):
        merge([])


def test_an_example_without_supervision_has_no_pairs() -> None:
    one = single(0, example([1, 2, 3]))
    assert one.predict_from.numel() == one.targets.numel() == one.weights.numel() == 0
    assert one.sequence_sum(one.weights).tolist() == [0.0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (example([1, 2], [0]), "token 0"),
        (example([]), "without tokens"),
        (example([1, 2], [1], (example([3], [0]),)), "supervised tokens"),
        (example([1], (), (example([]),)), "without tokens"),
        (example([1], (), (example([2], (), (example([3], [0]),)),)), "branches of its own"),
        (Encoded(torch.tensor([1, 2]), torch.tensor([False]), ORIGIN), "same line"),
        (Encoded(torch.tensor([1, 2]), torch.tensor([0, 1]), ORIGIN), "must be bool"),
    ],
)
def test_what_no_pack_can_express_is_refused_with_its_row(bad: Encoded, message: str) -> None:
    with pytest.raises(ValueError, match=f"s.jsonl:1.*{message}"):
        pack([(0, plain(3)), (1, bad)], 100)


@pytest.mark.parametrize("length", [0, -1])
def test_a_pack_needs_room(length: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack([(0, plain(3))], length)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 40))
def test_every_item_stands_in_one_bin_that_it_fits(lengths: list[int], capacity: int) -> None:
    bins = best_fit_decreasing(lengths, capacity)
    assert sorted(place for places in bins for place in places) == list(range(len(lengths)))
    for places in bins:
        total = sum(lengths[place] for place in places)
        assert total <= capacity or len(places) == 1
    # Two bins that fit into one would have been one.
    totals = sorted(sum(lengths[place] for place in places) for places in bins)
    assert len(totals) < 2 or totals[0] + totals[1] > capacity


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(2, 9)),
            st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(4, 40),
)
def test_packing_trains_the_same_pairs_as_one_example_a_pack(
    shapes: list[tuple[int, ...]], pack_length: int
) -> None:
    items = [
        (i, pair(*shape, first=1000 * i) if len(shape) == 3 else plain(shape[0], 1000 * i))
        for i, shape in enumerate(shapes)
    ]
    packed = pack(items, pack_length)
    alone = [single(i, encoded) for i, encoded in items]
    both = [sorted(p for one in packs for p in pairs_of(one)) for packs in (packed, alone)]
    assert both[0] == both[1]
    for one in packed:
        assert bool((one.sequence[1:] >= one.sequence[:-1]).all())
        # A pair never leaves its segment, except to the prompt that its segment continues.
        ends = one.segments.start + one.segments.length
        place = torch.bucketize(one.predict_from, ends, right=True)
        target_item = one.sequence_example[one.sequence]
        item_of_segment = torch.tensor(
            [i for i, item in enumerate(one.items) for _ in range(_segments(items[item][1]))]
        )
        assert torch.equal(item_of_segment[place], target_item)


def _segments(encoded: Encoded) -> int:
    return 1 + len(encoded.branches)
