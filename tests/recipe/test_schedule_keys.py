"""Lengths of a schedule: the key that is too long is named, and keys without effect are said."""

from __future__ import annotations

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import loads

RECIPE = """
model: tiny:100k
data:
  world: {microworld: text, rows: 20}
stages:
  - pretrain: {data: world, max_updates: 6, KEYS}
"""


def load(keys: str):
    return loads(RECIPE.replace("KEYS", keys))


@pytest.mark.parametrize(
    "schedule, key",
    [
        ("{warmup: 7}", "warmup"),
        ("{kind: wsd, decay: 7}", "decay"),
        ("{kind: wsd, decay: 7, warmup: 8}", "warmup"),
        ("{kind: wsd, decay: 4, warmup: 3}", "decay"),
        ("{kind: wsd, decay: 0.6, warmup: 0.5}", "decay"),
    ],
)
def test_the_length_that_does_not_fit_is_named(schedule, key):
    with pytest.raises(RecipeError, match=rf"schedule\.{key}: .*(max_updates \(6\)|at most 1)"):
        load(f"schedule: {schedule}")


@pytest.mark.parametrize(
    "keys, said",
    [
        ("schedule: {kind: constant, final: 0}", "final: has no effect with constant"),
        ("schedule: {warmup: 0, initial: 0.5}", "initial: has no effect without a warmup"),
        ("precision: fp8, fp8: {margin: 2}", "margin: has no effect with current scaling"),
        ("precision: fp8, fp8: {scaling: block, window: 2}", "window: has no effect with block"),
    ],
)
def test_keys_without_effect_are_said(keys, said):
    assert any(said in notice for notice in load(keys)._notices)
    assert not load("precision: fp8, fp8: {scaling: delayed, margin: 2, window: 2}")._notices
