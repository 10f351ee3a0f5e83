"""Preference stages: the reference is the frozen beginning, and that is asserted, not hoped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import go, lora_recipe, metrics, read, stage, weights_recipe, write_recipe

from lehr.errors import RecipeError
from lehr.stages import preference

pytestmark = pytest.mark.usefixtures("lean")


def one_stage(**keys: Any) -> dict[str, Any]:
    recipe = lora_recipe(gates="none", export="adapter")
    recipe["stages"] = [{"preference": stage("pairs", learning_rate=5e-3, max_updates=3) | keys}]
    return recipe


def test_the_first_loss_is_ln_2_after_another_stage(finished_once):
    """The reference is the stage's parent, not the base."""
    out = finished_once[0].parent / "out"
    rows = metrics(out / "02-preference")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[0]["objective.chosen_logratio"] == pytest.approx(0, abs=1e-4)
    assert rows[0]["objective.ties"] == 1.0, "rounding is no preference"
    assert rows[-1]["loss"] < 0.68 and rows[-1]["objective.margin"] > 0


def test_the_first_loss_is_ln_2_where_all_weights_train(work):
    recipe = weights_recipe(gates="none", export="merged")
    recipe["data"]["pairs"] = {"path": "pairs.jsonl", "holdout": 8}
    recipe["stages"] = [
        {"pretrain": stage("text", max_updates=2)},
        {"preference": stage("pairs", learning_rate=1e-3, max_updates=3)},
    ]
    _, out, _ = go(write_recipe(work, recipe))
    rows = metrics(out / "02-preference")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and rows[-1]["loss"] < 0.693


def test_bf16_has_a_wider_tolerance(work):
    _, out, _ = go(write_recipe(work, one_stage(precision="bf16")))
    assert metrics(out / "01-preference")[0]["loss"] == pytest.approx(math.log(2), abs=1e-2)


@pytest.mark.parametrize("precision", ["fp16", "pure_bf16"])
def test_every_16_bit_precision_starts_at_its_reference(work, precision):
    """The reference pass computes as the updates do, loss scale and rounded weights included."""
    recipe = one_stage(precision=precision, learning_rate=1e-3)
    if precision == "pure_bf16":  # of all weights: an adapter is small enough for fp32
        recipe = weights_recipe(gates="none", export="merged")
        recipe["data"]["pairs"] = {"path": "pairs.jsonl", "holdout": 8}
        keys = stage("pairs", precision=precision, learning_rate=1e-3, max_updates=3)
        recipe["stages"] = [{"preference": keys}]
    _, out, _ = go(write_recipe(work, recipe))
    rows = metrics(out / "01-preference")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-2)
    assert len(rows) == 3


def test_a_wrong_reference_stops_the_stage(work, monkeypatch):
    right = preference.log_probabilities

    def wrong(*arguments: Any) -> Any:
        return {item: (c + 1.0, r) for item, (c, r) in right(*arguments).items()}

    monkeypatch.setattr(preference, "log_probabilities", wrong)
    with pytest.raises(RecipeError, match="the reference is not the state"):
        go(write_recipe(work, one_stage()))
    assert not (work / "out" / "model").exists()
    assert read(work / "out" / "ledger.json")["verdict"] == "failed"
    monkeypatch.undo()
    go(write_recipe(work, one_stage()))  # the wrong numbers did not stay on disk


def test_reference_numbers_are_kept_for_the_parent_and_pairs_they_are_of(work, monkeypatch):
    calls = []
    compute = preference.log_probabilities

    def counted(model: Any, items: Any, *rest: Any) -> Any:
        calls.extend([1] if len(items) == 20 else [])  # the others are the held-out pairs
        return compute(model, items, *rest)

    monkeypatch.setattr(preference, "log_probabilities", counted)
    path = write_recipe(work, one_stage())
    _, out, _ = go(path)
    stored = read(out / "01-preference" / "reference.json")
    assert len(stored["reference"]) == 20 and len(calls) == 1
    (out / "01-preference" / "state.json").unlink()  # as if killed before its end
    go(path)
    assert len(calls) == 1, "read from disk"
    (out / "01-preference" / "state.json").unlink()
    (out / "01-preference" / "reference.json").write_text(json.dumps(stored | {"key": "other"}))
    go(path)
    assert len(calls) == 2, "numbers of another parent are not used"
    (out / "01-preference" / "state.json").unlink()
    stored["reference"][3][1] -= 0.5
    (out / "01-preference" / "reference.json").write_text(json.dumps(stored))
    go(path)
    assert len(calls) == 3, "damaged numbers are not used"


def test_identical_pairs_are_counted_before_training_and_teach_nothing(work: Path):
    lines = (work / "pairs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows[:4]:
        row["rejected"] = row["chosen"]
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, out, _ = go(write_recipe(work, one_stage(max_updates=4)))
    audit = read(out / "01-preference" / "audit.json")
    same = [one for one in audit["findings"] if "identical" in one["kind"] or "same" in one["kind"]]
    assert same and same[0]["count"] <= 4
    assert sum(row["objective.ties"] for row in metrics(out / "01-preference")) > 0


def test_the_held_out_loss_is_the_stages_own_and_can_choose_the_best(work):
    """Likelihood of both answers would rise while the stage improves: it must not decide."""
    _, out, heard = go(write_recipe(work, one_stage(max_updates=6, evaluate_every=1, early_stop=2)))
    rows = metrics(out / "01-preference")
    told = [row["evaluation.loss"] for row in rows]
    assert len(rows) == 6 and told[0] == pytest.approx(math.log(2), abs=0.02)
    assert told[-1] < told[0] < 0.7
    assert not heard.of("stopped_early")
