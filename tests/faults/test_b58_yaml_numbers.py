"""B58: `2e-5` read as text, "false" read as true, `.inf` accepted (YAML 1.1 typing).

Here: YAML 1.2 and types per key, so that a number is a number or is refused with its
place, before any model is loaded.
"""

from __future__ import annotations

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import dump_recipe, loads, recipe_hash


def load(tmp_path, keys):
    (tmp_path / "chats.jsonl").write_text("{}")
    return loads(
        f"model: m\nstages:\n  - sft: {{data: chats.jsonl, {keys}}}", tmp_path, name="r.yaml"
    )


@pytest.mark.parametrize(
    "keys, name, expected",
    [
        ("learning_rate: 2e-5", "learning_rate", 2e-5),
        ("learning_rate: 1e-5", "learning_rate", 1e-5),
        ('learning_rate: "1e-5"', "learning_rate", 1e-5),
        ("learning_rate: 1E-5", "learning_rate", 1e-5),
        ("clip: 1e5", "clip", 1e5),
        ("clip: 1.0e5", "clip", 1e5),
        ("clip: 1e+5", "clip", 1e5),
        ("clip: None", "clip", None),
        ("clip: null", "clip", None),
        ("clip: ~", "clip", None),
        ("max_updates: 1e3", "max_updates", 1000),
        ("max_updates: 1_000", "max_updates", 1000),
        ('max_updates: "1_000"', "max_updates", 1000),
        ("max_updates: 010", "max_updates", 10),
        ('packing: "false"', "packing", False),
        ("packing: no", "packing", False),
        ("packing: off", "packing", False),
        ('packing: "true"', "packing", True),
        ("name: no", "name", "no"),
        ("name: None", "name", None),
    ],
)
def test_values_mean_what_they_say(tmp_path, keys, name, expected):
    recipe = load(tmp_path, keys)
    value = getattr(recipe.stages[0], name)
    assert value == expected and type(value) is type(expected)
    assert recipe_hash(loads(dump_recipe(recipe))) == recipe_hash(recipe)


def test_a_warmup_of_1e3_is_a_thousand_updates(tmp_path):
    assert load(tmp_path, "schedule: {warmup: 1e3}").stages[0].schedule.warmup == 1000


@pytest.mark.parametrize(
    "keys, expected",
    [
        ("learning_rate: 1e-5x", "learning_rate: expected a number, at least 0 (found '1e-5x')"),
        ('learning_rate: "false"', "learning_rate: expected a number, at least 0 (found 'false')"),
        ("learning_rate: true", "learning_rate: expected a number, at least 0 (found True)"),
        (
            "max_updates: true",
            "max_updates: expected a whole number, at least 1 or none (found True)",
        ),
        ("learning_rate: .inf", "learning_rate: expected a finite number, at least 0 (found inf)"),
        (
            "learning_rate: -.inf",
            "learning_rate: expected a finite number, at least 0 (found -inf)",
        ),
        ("learning_rate: .nan", "learning_rate: expected a finite number, at least 0 (found nan)"),
        (
            'learning_rate: "inf"',
            "learning_rate: expected a finite number, at least 0 (found 'inf')",
        ),
        (
            'learning_rate: "nan"',
            "learning_rate: expected a finite number, at least 0 (found 'nan')",
        ),
        ("learning_rate: -1e-5", "learning_rate: expected a number, at least 0 (found -1e-05)"),
        (
            "schedule: {warmup: 1.5}",
            "schedule.warmup: expected a share below 1, or a whole number of",
        ),
        (
            "max_updates: 1.5",
            "max_updates: expected a whole number, at least 1 or none (found 1.5)",
        ),
        ("name: true", "quote it to make it text (found True)"),
        ("packing: 3", "packing: expected true or false (found 3)"),
    ],
)
def test_what_is_no_number_is_refused_with_its_place(tmp_path, keys, expected):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, keys)
    (problem,) = caught.value.problems
    assert expected in str(problem)
    assert problem.where.startswith("r.yaml:3 stages.0.sft.")
