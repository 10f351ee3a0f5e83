"""The loss of guessing where nobody said among how many: ln N of known N, or of any vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lehr.diagnosis.doctor import doctor
from lehr.diagnosis.doctor_guess import said


def first(values, **known):
    found = doctor(list(values), **known).findings
    return found[0] if found else None


def around(level, points=120, spread=0.002, seed=0):
    return level + spread * np.random.default_rng(seed).standard_normal(points)


def falling(begin, end, points=200, spread=0.03, seed=0):
    fall = (begin - end) * np.exp(-np.arange(points) / 15)
    return end + fall + spread * np.random.default_rng(seed).standard_normal(points)


@pytest.mark.parametrize(
    ("level", "words"),
    [
        (math.log(2), "two choices"),
        (math.log(10), "ten classes"),
        (math.log(1000), "a thousand classes"),
        (math.log(50257), "GPT-2: ln 50,257 = 10.82"),
        (math.log(20000), "guessing among 20,000 tokens"),
    ],
)
def test_a_flat_loss_that_is_a_logarithm_is_that_of_guessing(level, words):
    found = first(around(level))
    assert found.name == "flat_at_chance" and words in found.seen


@pytest.mark.parametrize("level", [0.5, 1.9, 4.17, 8.0, 30.0])
def test_another_flat_loss_is_flat_from_the_start(level):
    assert first(around(level)).name == "flat_from_start"


def test_what_is_known_goes_before_what_is_presumed():
    assert first(around(math.log(50257)), vocabulary=600).name == "start_above_chance"
    assert first(around(math.log(2)), vocabulary=32000).name == "flat_from_start"
    rows = [{"step": n, "loss": value, "kl": 0.01} for n, value in enumerate(around(0.6931))]
    assert "flat_at_chance" not in [one.name for one in doctor(rows).findings]


def test_a_start_above_every_vocabulary():
    found = first(falling(43.0, 3.0))
    assert found.name == "start_above_chance" and "13.8" in found.seen
    assert found.confidence < 0.8  # the loss may be of something else
    assert first(falling(900.0, 200.0)) is None  # a sum, or a regression
    assert first(falling(11.0, 4.0)) is None


def test_the_shelf_of_the_token_frequencies():
    assert first(falling(10.8, 7.4)).name == "flat_at_unigram"
    assert first(falling(10.8, 3.4)) is None
    assert first(falling(4.2, 2.9)) is None  # characters: not known


def test_levels_in_words():
    assert said(math.log(100)) == "ln 100 = 4.605, guessing among a hundred classes"
    assert said(11.76) == "guessing among 130,000 tokens costs that (Llama 3: ln 128,256 = 11.76)"


def test_a_loss_that_begins_at_ln_2_is_one_of_pairs():
    values = falling(math.log(2), 0.01, spread=0.0005)
    found = doctor(list(values))
    assert found.healthy and "begins at ln 2" in found.notes[0]
    assert first(values, vocabulary=32000).name == "too_low_too_soon"
    assert first(falling(0.8, 0.01, spread=0.0005)).name == "too_low_too_soon"
    rows = [
        {"loss": value, "rewards/chosen": 0.0, "rewards/rejected": 0.0, "rewards/margins": 0.0}
        for value in values
    ]
    assert not doctor(rows).notes
