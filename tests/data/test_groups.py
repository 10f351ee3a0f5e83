"""Groups: one prompt, many answers; what sharing saves; cutting a group without losing a pair."""

from __future__ import annotations

import pytest
import torch

from lehr.data.groups import group_of, split_group
from lehr.data.packing import merge, pack, single
from lehr.data.shapes import Encoded, Origin, Pack

ORIGIN = Origin("prompts", "prompts.jsonl", 4)


def group(prompt: int, *answers: int) -> Encoded:
    ids = iter(range(1000))
    taken = [[next(ids) for _ in range(length)] for length in (prompt, *answers)]
    return group_of(taken[0], taken[1:], ORIGIN)


def pairs_of(packs: list[Pack]) -> list[tuple[list[int], int]]:
    """(everything that a target's prediction sees, target): what is trained, however it is cut."""
    found = []
    for one in packs:
        starts, lengths = one.segments.start.tolist(), one.segments.length.tolist()
        for source, target, sequence in zip(
            one.predict_from.tolist(), one.targets.tolist(), one.sequence.tolist(), strict=True
        ):
            here = [s for s in range(len(starts)) if starts[s] <= source < starts[s] + lengths[s]]
            prefix = int(one.segments.prefix[here[0]])
            before = [] if prefix < 0 else one.ids[starts[prefix] :][: lengths[prefix]].tolist()
            own = one.ids[starts[here[0]] : source + 1].tolist()
            assert 0 <= sequence < one.sequences
            found.append((before + own, target))
    return sorted(found)


def test_every_answer_starts_from_the_last_position_of_the_one_prompt() -> None:
    one = single(0, group(3, 2, 1, 3))
    assert one.ids.tolist() == list(range(9))
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 3, 3, 4, 5]
    assert one.segments.prefix.tolist() == [-1, 0, 0, 0]
    assert one.predict_from.tolist() == [2, 3, 2, 2, 6, 7]
    assert one.targets.tolist() == [3, 4, 5, 6, 7, 8]
    assert one.sequence.tolist() == [0, 0, 1, 2, 2, 2]
    assert one.sequence_example.tolist() == [0, 0, 0]


def test_tokens_computed_and_tokens_with_a_prompt_for_each_answer() -> None:
    one = group(40, *[64] * 8)
    assert (one.tokens, one.unshared_tokens, one.supervised_tokens) == (552, 832, 512)
    alone = Encoded(one.ids, one.supervised, ORIGIN)
    assert alone.unshared_tokens == alone.tokens == 40


@pytest.mark.parametrize("most", [1, 6, 7, 9, 100])
def test_a_cut_group_trains_the_same_pairs(most: int) -> None:
    whole = group(3, 2, 1, 3, 1)
    parts = split_group(whole, most)
    assert pairs_of([single(0, whole)]) == pairs_of([single(0, part) for part in parts])
    assert sum(len(part.branches) for part in parts) == 4
    assert all(part.tokens <= most or len(part.branches) == 1 for part in parts)


def test_groups_and_plain_rows_share_packs_in_any_cut() -> None:
    plain = Encoded(torch.arange(500, 505), torch.tensor([False] + [True] * 4), ORIGIN)
    items = list(enumerate([group(3, 2, 2), plain, group(4, 1, 5, 2)]))
    packs = pack(items, 20)
    assert len(packs) > 1
    assert pairs_of(packs) == pairs_of([merge(packs)]) == pairs_of([single(*one) for one in items])


@pytest.mark.parametrize(("prompt", "answers"), [([], [[1]]), ([1], []), ([1], [[2], []])])
def test_what_is_no_group_is_refused(prompt: list[int], answers: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"prompts\.jsonl:4: a group needs"):
        group_of(prompt, answers, ORIGIN)
