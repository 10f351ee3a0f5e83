"""Held-out rows: exact in number, blind to order, never on both sides."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.data.shapes import Example, Origin
from lehr.data.splitting import default_holdout, first_rows, split
from lehr.errors import RecipeError


def texts(names: list[str]) -> list[Example]:
    return [Example("text", Origin("s", "f", n), text=name) for n, name in enumerate(names, 1)]


def said(examples: list[Example]) -> list[str]:
    return [example.text for example in examples]


ROWS = texts([f"row {n}" for n in range(500)])


def test_the_number_is_exact_and_the_order_kept() -> None:
    for holdout, expected in [(1, 1), (37, 37), (0.1, 50), (0.0001, 1), (37.0, 37), (0, 0)]:
        train, heldout = split(ROWS, holdout, seed=0)
        assert len(heldout) == expected
        assert sorted([*train, *heldout], key=lambda e: e.origin.line) == ROWS
        assert [e.origin.line for e in train] == sorted(e.origin.line for e in train)


def test_order_does_not_matter_and_the_seed_does() -> None:
    shuffled = list(ROWS)
    random.Random(1).shuffle(shuffled)
    assert set(said(split(shuffled, 50, 0)[1])) == set(said(split(ROWS, 50, 0)[1]))
    shared = set(said(split(ROWS, 50, 1)[1])) & set(said(split(ROWS, 50, 0)[1]))
    assert len(shared) < 20  # 5 by chance


def test_where_a_row_stands_does_not_matter() -> None:
    moved = [Example("text", Origin("t", "other", 1), text=e.text) for e in ROWS]
    assert said(split(moved, 50, 0)[1]) == said(split(ROWS, 50, 0)[1])


def test_adding_rows_moves_few() -> None:
    before = set(said(split(ROWS, 50, 0)[1]))
    after = set(said(split([*ROWS, *texts([f"new {n}" for n in range(50)])], 50, 0)[1]))
    # Ten percent new rows displace about ten percent of those held out, and no others move.
    assert len(before - after) <= 12
    assert all(name.startswith("new") for name in after - before)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=40), st.integers(1, 20), st.integers(0, 3))
def test_copies_stay_on_one_side(numbers: list[int], holdout: int, seed: int) -> None:
    rows = texts([str(number) for number in numbers])
    try:
        train, heldout = split(rows, holdout, seed)
    except RecipeError:
        smallest = min(numbers.count(number) for number in numbers)
        assert holdout >= len(rows) or len(set(numbers)) == 1 or smallest > holdout
        return
    assert not set(said(train)) & set(said(heldout))
    assert len(train) + len(heldout) == len(rows)
    assert 1 <= len(heldout) <= holdout
    assert train
    singles = sum(numbers.count(number) == 1 for number in numbers)
    if singles >= holdout:
        # Nothing that fits was left out.
        assert len(heldout) == holdout


@pytest.mark.parametrize(
    "holdout", [500, 501, -1, 1.5, float("nan"), -0.1, True, "3", float("inf")]
)
def test_impossible_holdouts_are_refused(holdout: float) -> None:
    with pytest.raises(RecipeError):
        split(ROWS, holdout, 0)


def test_only_copies_cannot_be_split() -> None:
    with pytest.raises(RecipeError, match="all 4 say the same"):
        split(texts(["a"] * 4), 1, 0)


def test_default_and_first_rows() -> None:
    assert default_holdout(1) == 1
    assert default_holdout(5000) == 200
    few = first_rows(ROWS, 20, seed=0)
    assert len(few) == 20
    assert set(said(few)) < set(said(first_rows(list(reversed(ROWS)), 40, seed=0)))
