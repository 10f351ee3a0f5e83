"""B59: misspelt, misplaced and hyphenated keys were dropped, and the run used defaults.

Here: each is refused with the closest valid key, all in one go, with exit status 2.
"""

from __future__ import annotations

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import loads, recipe_notices

SIX = """\
model: m
learning_rate: 1e-4
data:
  chats: {path: chats.jsonl, lora_r: 8}
stages:
  - sft:
      data: chats
      learning_rte: 1e-4
      num-epochs: 3
      beta: 0.1
      clip: 1.0
      clip: 2.0
"""


def test_all_six_are_listed_at_once(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(RecipeError) as caught:
        loads(SIX, tmp_path, name="r.yaml")
    assert caught.value.exit_status == 2
    found = [(problem.where, problem.expected) for problem in caught.value.problems]
    assert found == [
        ("r.yaml:2 learning_rate", "a key of the top level; learning_rate belongs in a stage"),
        (
            "r.yaml:4 data.chats.lora_r",
            "a key of a source in data; lora_r means adapter.rank (at the top level)",
        ),
        (
            "r.yaml:8 stages.0.sft.learning_rte",
            "a key of an sft stage; did you mean learning_rate?",
        ),
        ("r.yaml:9 stages.0.sft.num-epochs", "a key of an sft stage; num_epochs means epochs"),
        (
            "r.yaml:10 stages.0.sft.beta",
            "a key of an sft stage; beta belongs in preference stages only",
        ),
        ("r.yaml:12 stages.0.sft.clip", "each key once; clip stands in lines 11 and 12"),
    ]


def test_command_line_over_file_is_said(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{}")
    text = "model: m\nstages:\n  - sft: {data: chats.jsonl, learning_rate: 2e-4}"
    recipe = loads(text, tmp_path, ["stages.sft.learning_rate=1e-4"], name="r.yaml")
    assert recipe.stages[0].learning_rate == 1e-4
    assert recipe_notices(recipe) == [
        "--set stages.sft.learning_rate=1e-4: replaces 0.0002 (r.yaml:3 stages.0.sft.learning_rate)"
    ]


def test_keys_without_effect_are_said(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{}")
    text = (
        "model: m\ndata: {chats: chats.jsonl, spare: chats.jsonl}\n"
        "stages:\n  - sft: {data: chats, schedule: {decay: 0.5}}\n"
        "gates: {improve: {preference: chats.accuracy, sft: chats.loss}}"
    )
    assert recipe_notices(loads(text, tmp_path, name="r.yaml")) == [
        "r.yaml:4 stages.0.sft.schedule.decay: has no effect with cosine, "
        "only with wsd and infinite",
        "r.yaml:5 gates.improve.preference: has no effect: there is no preference stage",
        "r.yaml:2 data.spare: is used by no stage and no gate",
    ]


def test_bad_yaml_gives_line_and_column(tmp_path):
    with pytest.raises(RecipeError, match=r"^r\.yaml:3:1: expected readable YAML"):
        loads("model: m\nstages: [sft: {data: a}\nseed: 1", tmp_path, name="r.yaml")
