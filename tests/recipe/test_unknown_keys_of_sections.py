"""An unknown key of any section is a refusal that says what it may be, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import load_recipe
from lehr.recipe.suggestions import SECTIONS, explain_unknown

OF_STAGES = [name for name in SECTIONS if name not in ("recipe", "source", "stage", "gates")]


def refused(folder: Path, stage: Any) -> str:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "d.jsonl").write_text(json.dumps(row) + "\n")
    recipe = {"model": "tiny:100k", "output": "out", "data": {"d": {"path": "d.jsonl"}}}
    recipe["stages"] = [{"sft": {"data": "d", **stage}}]
    (folder / "r.yaml").write_text(json.dumps(recipe))
    with pytest.raises(RecipeError) as error:
        load_recipe(folder / "r.yaml", [])
    return str(error.value)


@pytest.mark.parametrize("section", OF_STAGES)
def test_an_unknown_key(tmp_path: Path, section: str) -> None:
    assert "zzz" in refused(tmp_path, {section: {"zzz": 1}})


@pytest.mark.parametrize("section", OF_STAGES)
def test_a_slip_of_the_hand(section: str) -> None:
    for key in SECTIONS[section][1].model_fields:
        if len(key) > 5:
            assert key in explain_unknown(key[:-2] + key[-1], section, {}, "sft")


@pytest.mark.parametrize(
    ("stage", "bound"),
    [
        ({"guard": {"window": 1}}, "at least 32"),
        ({"adaptive_clip": {"kind": "tensor", "warmup": 1}}, "at least 2"),
    ],
)
def test_a_refusal_names_the_bound_that_holds(tmp_path: Path, stage: Any, bound: str) -> None:
    assert bound in refused(tmp_path, stage)
