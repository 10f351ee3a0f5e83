"""`lehr plan --gradcheck` and `--find-lr`: reports of every stage, and nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import Heard, lora_recipe, read, weights_recipe, write_recipe

from lehr.pipeline.plan import plan
from lehr.recipe.loading import load_recipe

pytestmark = pytest.mark.usefixtures("lean")


def checked(work: Path, recipe: dict[str, Any], **checks: bool) -> tuple[Any, Heard]:
    heard = Heard()
    found = plan(
        load_recipe(write_recipe(work, recipe)), out=work / "planned", listeners=[heard], **checks
    )
    assert not list((work / "planned").rglob("metrics.jsonl")), "nothing is trained"
    return found, heard


def test_the_gradient_of_every_stage_is_checked(work):
    found, heard = checked(work, lora_recipe(), gradcheck=True)
    reports = found.as_json()["gradient_check"]
    assert [one["stage"] for one in reports] == ["01-sft", "02-preference"]
    assert all(one["ok"] for one in reports) and not any(one["missing"] for one in reports)
    assert all("lora" in tensor["name"] for one in reports for tensor in one["tensors"])
    assert read(work / "planned" / "gradient_check.json") == reports
    assert all("gradient agrees" in event.text for event in heard.of("gradient_check"))


def test_all_weights_of_a_model_made_from_scratch(work):
    found, _ = checked(work, weights_recipe(), gradcheck=True)
    (first, second) = found.as_json()["gradient_check"]
    assert first["ok"] and second["ok"] and first["worst"]["error"] < 1e-3
    assert any("embed" in tensor["name"] for tensor in first["tensors"])


def test_the_learning_rate_of_the_first_stage(work):
    found, heard = checked(work, lora_recipe(), find_lr=True)
    report = found.as_json()["learning_rate"]
    assert (report["stage"], report["recipe"]) == ("01-sft", 2e-2)
    assert 1e-4 < report["recommended"] < 1.0 and len(report["rates"]) == len(report["changes"])
    assert report["changes"][0] == 0.0 and min(report["changes"]) < -0.1
    assert read(work / "planned" / "learning_rate.json") == report
    (event,) = heard.of("learning_rate")
    assert "the recipe says 0.02" in event.text


def test_without_being_asked_the_plan_has_no_checks(work):
    found, _ = checked(work, lora_recipe())
    assert not {"gradient_check", "learning_rate"} & found.as_json().keys()
    assert not list((work / "planned").glob("gradient_check.json"))
