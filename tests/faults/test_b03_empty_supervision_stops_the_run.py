"""B03, the whole run: all answers cut away stops before the first update, some are counted."""

from __future__ import annotations

import pytest
from tests.pipeline.fixtures import lean, one_measurement, saved_base, work  # noqa: F401
from tests.pipeline.small import go, lora_recipe, losses, metrics, stage, write_recipe, write_rows

from lehr.errors import RecipeError

pytestmark = pytest.mark.usefixtures("lean")


def row(prompt: int, n: int) -> dict:
    said = [
        {"role": "user", "content": f"{n} " + "q x " * prompt},
        {"role": "assistant", "content": "It is red."},
    ]
    return {"messages": said}


def recipe(path: str) -> dict:
    made = lora_recipe(gates="none", export="adapter")
    made["data"] = {"chats": {"path": path, "holdout": 0}}
    keys = stage("chats", max_updates=3) | {"max_length": 32, "batch_size": 8}
    return made | {"stages": [{"sft": keys}]}


def test_no_answer_left_is_refused_with_the_count_the_limit_and_a_remedy(work):  # noqa: F811
    write_rows(work / "long.jsonl", [row(60, n) for n in range(8)])
    with pytest.raises(RecipeError) as caught:
        go(write_recipe(work, recipe("long.jsonl")))
    said = str(caught.value)
    assert "8 of 8 rows were dropped under max_length 32" in said and "raise max_length" in said
    assert "long.jsonl:1" in said
    assert caught.value.exit_status == 2
    out = work / "out"
    assert not (out / "model").exists() and not list(out.rglob("metrics.jsonl"))


def test_the_rows_that_fit_train_as_if_alone(work):  # noqa: F811
    good = [row(1, n) for n in range(8)]
    write_rows(work / "good.jsonl", good)
    write_rows(work / "both.jsonl", [*[row(60, n) for n in range(8)], *good])
    _, alone, _ = go(write_recipe(work, recipe("good.jsonl")), "output=alone")
    ledger, both, _ = go(write_recipe(work, recipe("both.jsonl")), "output=both")
    [source] = ledger.stages[0]["data"]
    assert sum(source["dropped"].values()) == 8 and source["kept"] == 8
    assert losses(both / "01-sft") == losses(alone / "01-sft")
    assert all(line["loss"] for line in metrics(both / "01-sft"))
