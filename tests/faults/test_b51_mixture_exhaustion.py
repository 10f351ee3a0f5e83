"""B51: a source that is used up must neither end the mixture nor change its shares."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from lehr.data.loader import Loader
from lehr.errors import RecipeError

DRAWS = 10_000


def _sizes(**counts: int) -> dict[str, list[int]]:
    return {name: [10] * count for name, count in counts.items()}


def _draws(loader: Loader, count: int) -> list[tuple[str, int]]:
    draws: list[tuple[str, int]] = []
    while len(draws) < count:
        draws += loader.next()
    return draws


def test_use_everything_once_goes_on_behind_the_shortest_source() -> None:
    loader = Loader(_sizes(a=2, b=5, c=1), None, batch_size=1, seed=0)
    assert loader.updates_per_epoch == 8
    for _ in range(2):
        counts = Counter(_draws(loader, 8))
        assert len(counts) == 8
        assert set(counts.values()) == {1}


def test_with_repetition_the_shares_stay_and_repeats_are_counted() -> None:
    loader = Loader(_sizes(a=300, b=7), {"a": 0.75, "b": 0.25}, batch_size=1, seed=0)
    counts = Counter(name for name, _ in _draws(loader, DRAWS))
    assert counts["a"] / DRAWS == pytest.approx(0.75, abs=0.013)
    assert counts["a"] == 7500  # and, without chance in the rule, exactly
    assert loader.passes == {"a": 25.0, "b": pytest.approx(2500 / 7)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_mixture_draws_the_same(ranks: int) -> None:
    def make() -> Loader:
        return Loader(_sizes(a=300, b=7), {"a": 0.75, "b": 0.25}, batch_size=1, seed=5)

    for _ in range(ranks):  # no rank draws anything of its own
        loader = make()
        whole = _draws(loader, 6000)
        first = make()
        _draws(first, 4321)
        resumed = make()
        resumed.load(json.loads(json.dumps(first.state())))
        assert _draws(resumed, 6000 - 4321) == whole[4321:]


def test_a_sum_that_is_not_one_is_named() -> None:
    with pytest.raises(RecipeError, match=r"1\.1"):
        Loader(_sizes(a=2, b=5, c=1), {"a": 0.7, "b": 0.2, "c": 0.2}, 1, 0)


def test_a_share_of_zero_is_never_drawn() -> None:
    loader = Loader(_sizes(a=5, b=5), {"a": 1.0, "b": 0.0}, batch_size=1, seed=0)
    assert {name for name, _ in _draws(loader, 200)} == {"a"}


def test_an_empty_source_is_an_error() -> None:
    with pytest.raises(RecipeError, match="source b"):
        Loader(_sizes(a=5, b=0), {"a": 0.5, "b": 0.5}, 1, 0)
    with pytest.raises(RecipeError, match="source b"):
        Loader(_sizes(a=5, b=0), None, 1, 0)
