"""Mixture: token shares come true after every draw, and impossible shares are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.data.mixture import checked_shares, next_source
from lehr.errors import RecipeError


def test_the_rule_alternates_equal_sources_in_order() -> None:
    shares = {"a": 0.5, "b": 0.5}
    drawn = {"a": 0, "b": 0}
    order = ""
    for _ in range(6):
        name = next_source(shares, drawn, {"a": 10, "b": 10})
        drawn[name] += 10
        order += name
    assert order == "ababab"


def test_a_share_is_of_tokens_and_not_of_rows() -> None:
    shares = {"long": 0.5, "short": 0.5}
    drawn = {"long": 0, "short": 0}
    rows = {"long": 0, "short": 0}
    for _ in range(1100):
        name = next_source(shares, drawn, {"long": 100, "short": 10})
        drawn[name] += {"long": 100, "short": 10}[name]
        rows[name] += 1
    assert rows == {"long": 100, "short": 1000}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.lists(st.integers(1, 500), min_size=1, max_size=30),
)
def test_every_source_is_within_one_example_of_its_share_after_every_draw(
    weights: list[int], lengths: list[int]
) -> None:
    names = [f"s{i}" for i in range(len(weights))]
    shares = {n: w / sum(weights) for n, w in zip(names, weights, strict=True)}
    drawn = dict.fromkeys(names, 0)
    count = dict.fromkeys(names, 0)
    for _ in range(300):
        upcoming = {n: lengths[(count[n] + i) % len(lengths)] for i, n in enumerate(names)}
        name = next_source(shares, drawn, upcoming)
        drawn[name] += upcoming[name]
        count[name] += 1
        total = sum(drawn.values())
        for n in names:
            assert abs(drawn[n] - shares[n] * total) <= max(lengths) + 1e-6


def test_a_source_of_share_zero_is_left_out_even_when_it_is_empty() -> None:
    assert checked_shares({"a": 1.0, "b": 0}, {"a": [1], "b": []}) == {"a": 1.0}


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 0.7, "b": 0.4}, "sum is 1.1"),
        ({"a": 0.5, "b": 0.4}, "sum is 0.9"),
        ({"a": 0.0, "b": 0.0}, "sum is 0"),
        ({"a": -0.5, "b": 1.0}, "share of a"),
        ({"a": math.nan, "b": 1.0}, "share of a"),
        ({"a": math.inf}, "share of a"),
        ({"a": True}, "share of a"),
        ({"a": 0.5, "empty": 0.5}, "source empty"),
        ({"a": 0.5, "elsewhere": 0.5}, "one of the sources a, b, empty, bare"),
        ({"a": 0.5, "bare": 0.5}, "at least one token"),
        ({}, "at least one source"),
    ],
)
def test_impossible_shares_are_refused(shares: dict[str, float], message: str) -> None:
    sizes = {"a": [1, 2], "b": [3], "empty": [], "bare": [0]}
    with pytest.raises(RecipeError, match=message):
        checked_shares(shares, sizes)


def test_all_problems_come_together() -> None:
    with pytest.raises(RecipeError) as raised:
        checked_shares({"a": -1, "b": math.nan, "c": 0.5}, {"a": [1], "b": [1]})
    assert len(raised.value.problems) == 3
