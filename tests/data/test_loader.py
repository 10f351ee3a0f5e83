"""Loader: epochs, shares, resume at any update, ranks; UpdateBatches: packs of the same update."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from lehr.data.loader import Loader, UpdateBatches
from lehr.data.shapes import Encoded, Origin
from lehr.errors import RecipeError

SHARES = {"a": 0.75, "b": 0.25}


def sizes(**counts: int) -> dict[str, list[int]]:
    return {name: [5 + (i % 7) for i in range(count)] for name, count in counts.items()}


def encoded(count: int, source: str, length: int = 6) -> list[Encoded]:
    supervised = torch.ones(length, dtype=torch.bool)
    supervised[0] = False
    return [
        Encoded(torch.arange(length), supervised, Origin(source, f"{source}.jsonl", i + 1))
        for i in range(count)
    ]


def test_an_epoch_holds_every_example_once_and_ends_with_a_smaller_update() -> None:
    loader = Loader(sizes(a=7), {"a": 1.0}, batch_size=4, seed=0)
    assert loader.updates_per_epoch == 2
    epochs = [[loader.next(), loader.next()] for _ in range(3)]
    for updates in epochs:
        assert [len(draws) for draws in updates] == [4, 3]
        assert sorted(index for draws in updates for _, index in draws) == list(range(7))
    assert len({str(updates) for updates in epochs}) == 3  # each pass has its own order
    assert loader.epoch == 3.0
    assert loader.passes == {"a": 3.0}


def test_fewer_examples_than_a_batch_make_one_update() -> None:
    loader = Loader(sizes(a=3), {"a": 1.0}, batch_size=4, seed=0)
    assert [len(loader.next()), len(loader.next())] == [3, 3]


def test_the_order_depends_on_seed_source_and_pass_and_on_nothing_else() -> None:
    first = Loader(sizes(a=50), {"a": 1.0}, 50, seed=0).next()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = Loader(sizes(a=50), {"a": 1.0}, 50, seed=0).next()
    assert torch.equal(before, torch.get_rng_state())
    assert first == again
    assert first != Loader(sizes(a=50), {"a": 1.0}, 50, seed=1).next()
    renamed = Loader(sizes(b=50), {"b": 1.0}, 50, seed=0).next()
    assert [index for _, index in first] != [index for _, index in renamed]


def test_other_batch_sizes_walk_the_same_order() -> None:
    by_three = Loader(sizes(a=12), {"a": 1.0}, 3, seed=0)
    by_four = Loader(sizes(a=12), {"a": 1.0}, 4, seed=0)
    walked = [
        [draw for _ in range(12 // size) for draw in loader.next()]
        for size, loader in ((3, by_three), (4, by_four))
    ]
    assert walked[0] == walked[1]


def test_an_epoch_of_a_mixture_sees_the_primary_source_once() -> None:
    loader = Loader(sizes(a=90, b=500), SHARES, batch_size=10, seed=0)
    draws = [draw for _ in range(loader.updates_per_epoch) for draw in loader.next()]
    seen = Counter(index for source, index in draws if source == "a")
    assert set(seen) == set(range(90))
    assert sum(count - 1 for count in seen.values()) < 10  # only what fills the last update
    assert loader.epoch == 1.0
    tokens = loader.drawn_tokens
    assert tokens["a"] / sum(tokens.values()) == pytest.approx(0.75, abs=11 / sum(tokens.values()))


def test_a_small_source_repeats_and_the_repeats_are_told() -> None:
    loader = Loader({"a": [10] * 90, "b": [10] * 10}, SHARES, batch_size=8, seed=0)
    for _ in range(loader.updates_per_epoch):
        loader.next()
    assert loader.passes["a"] == pytest.approx(1.0, abs=0.07)
    assert loader.passes["b"] == pytest.approx(3.0, abs=0.2)


@pytest.mark.parametrize("shares", [{"a": 1.0}, None, SHARES])
@pytest.mark.parametrize("stop", [0, 1, 6, 7, 8, 23])
def test_a_resumed_loader_draws_the_same(shares: dict[str, float] | None, stop: int) -> None:
    whole = Loader(sizes(a=30, b=13), shares, batch_size=4, seed=3)
    draws = [whole.next() for _ in range(40)]
    first = Loader(sizes(a=30, b=13), shares, batch_size=4, seed=3)
    for _ in range(stop):
        first.next()
    state = json.loads(json.dumps(first.state()))
    resumed = Loader(sizes(a=30, b=13), shares, batch_size=4, seed=3)
    resumed.load(state)
    assert [resumed.next() for _ in range(40 - stop)] == draws[stop:]
    assert resumed.state() == whole.state()
    assert resumed.epoch == whole.epoch
    # A loader that has gone on can be set back.
    whole.load(state)
    assert [whole.next() for _ in range(40 - stop)] == draws[stop:]


@pytest.mark.parametrize(
    ("counts", "shares", "batch_size", "seed"),
    [
        ({"a": 31, "b": 13}, SHARES, 4, 3),
        ({"a": 30, "b": 13}, {"a": 0.5, "b": 0.5}, 4, 3),
        ({"a": 30, "b": 13}, SHARES, 5, 3),
        ({"a": 30, "b": 13}, SHARES, 4, 4),
    ],
)
def test_a_state_of_other_data_is_refused(
    counts: dict[str, int], shares: dict[str, float], batch_size: int, seed: int
) -> None:
    state = Loader(sizes(a=30, b=13), SHARES, 4, 3).state()
    with pytest.raises(RecipeError, match="loader state"):
        Loader(sizes(**counts), shares, batch_size, seed).load(state)


@pytest.mark.parametrize("batch_size", [0, -1, True, 2.5, "4"])
def test_an_impossible_batch_size_is_refused(batch_size: int) -> None:
    with pytest.raises(RecipeError, match="batch_size"):
        Loader(sizes(a=3), {"a": 1.0}, batch_size, 0)


@pytest.mark.parametrize("given", [{}, {"a": [3], "b": []}])
def test_a_joint_list_without_examples_is_refused(given: dict[str, list[int]]) -> None:
    with pytest.raises(RecipeError, match="at least one"):
        Loader(given, None, 4, 0)


def batches(world: int = 1, rank: int = 0, **options: object) -> UpdateBatches:
    data = {"a": encoded(10, "a"), "b": encoded(7, "b", 9)}
    settings: dict[str, object] = {"batch_size": 6, "seed": 0, "pack_length": 20, **options}
    return UpdateBatches(data, None, rank=rank, world=world, **settings)  # type: ignore[arg-type]


def test_items_are_numbered_over_all_sources() -> None:
    source = batches()
    assert [item for item, _ in source.items()] == list(range(17))
    assert [source.source_of(item) for item in (0, 9, 10, 16)] == ["a", "a", "b", "b"]
    for wrong in (-1, 17):
        with pytest.raises(IndexError):
            source.source_of(wrong)
    seen: list[int] = []
    by_item = dict(source.items())
    for _ in range(source.updates_per_epoch):
        for one in source.next():
            seen += one.items
            assert one.origins == tuple(by_item[item].origin for item in one.items)
    assert sorted(seen) == list(range(17))


def test_packing_does_not_change_what_an_update_is_made_of() -> None:
    packed, alone = batches(pack_length=64), batches(packing=False)
    for _ in range(6):
        first, second = packed.next(), alone.next()
        assert len(first) < len(second)
        assert sorted(i for p in first for i in p.items) == sorted(
            i for p in second for i in p.items
        )


def test_ranks_share_an_update_without_overlap() -> None:
    alone = batches()
    ranks = [batches(world=2, rank=rank) for rank in range(2)]
    for _ in range(6):
        whole = sorted(i for p in alone.next() for i in p.items)
        parts = [[i for p in one.next() for i in p.items] for one in ranks]
        assert not set(parts[0]) & set(parts[1])
        assert sorted(parts[0] + parts[1]) == whole
    assert ranks[0].state() == ranks[1].state() == alone.state()


def test_update_batches_resume() -> None:
    source = batches()
    source.next()
    state = json.loads(json.dumps(source.state()))
    expected = [one.items for _ in range(5) for one in source.next()]
    resumed = batches()
    resumed.load(state)
    assert [one.items for _ in range(5) for one in resumed.next()] == expected


def test_expected_tokens_of_an_update() -> None:
    data = {"a": encoded(8, "a", 6), "b": encoded(8, "b", 12)}
    joint = UpdateBatches(data, None, batch_size=4, seed=0, pack_length=64)
    assert joint.tokens_per_update == 4 * 9
    shares = {"a": 0.5, "b": 0.5}
    mixed = UpdateBatches(data, shares, batch_size=6, seed=0, pack_length=64)
    assert mixed.tokens_per_update == pytest.approx(6 * 8)  # two short examples to a long one
    drawn = [sum(one.tokens for one in mixed.next()) for _ in range(50)]
    assert sum(drawn) / 50 == pytest.approx(48, rel=0.02)


def test_a_pack_without_room_is_refused() -> None:
    with pytest.raises(RecipeError, match="pack_length"):
        batches(pack_length=0)
