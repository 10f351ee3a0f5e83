"""B15 (loader): what is left at the end of an epoch is an update of its own."""

from __future__ import annotations

import pytest

from lehr.data.loader import Loader
from lehr.errors import RecipeError


def test_seven_examples_in_updates_of_four_are_two_updates_an_epoch() -> None:
    loader = Loader({"a": [10] * 7}, {"a": 1.0}, batch_size=4, seed=0)
    assert loader.updates_per_epoch == 2
    assert [len(loader.next()) for _ in range(6)] == [4, 3, 4, 3, 4, 3]


def test_three_examples_are_one_update() -> None:
    loader = Loader({"a": [10] * 3}, {"a": 1.0}, batch_size=4, seed=0)
    assert loader.updates_per_epoch == 1
    assert len(loader.next()) == 3


def test_an_update_of_nothing_is_refused() -> None:
    with pytest.raises(RecipeError):
        Loader({"a": [10] * 3}, {"a": 1.0}, batch_size=0, seed=0)
