"""An unchanged stage is never run twice; what changed, and what follows it, is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import (
    Heard,
    go,
    lora_recipe,
    metrics,
    pair_rows,
    read,
    stage,
    weights,
    write_data,
    write_recipe,
    write_rows,
)

import lehr
from lehr.pipeline import own_text
from lehr.pipeline.events import Event
from lehr.pipeline.run import run
from lehr.recipe.loading import load_recipe

pytestmark = pytest.mark.usefixtures("lean")


def three_stages() -> dict[str, Any]:
    recipe = lora_recipe(export="merged")
    recipe["stages"] = [
        {"sft": stage("chats", learning_rate=2e-2, max_updates=4)},
        {"sft": stage("chats", name="more", learning_rate=1e-2, max_updates=4)},
        {"preference": stage("pairs", learning_rate=5e-3, max_updates=4)},
    ]
    return recipe


def trained(heard: Heard) -> list[str]:
    """Folders of the stages that made updates."""
    return list(dict.fromkeys(event.stage for event in heard.of("update")))


@pytest.fixture(scope="module")
def ran(tmp_path_factory, saved_base):
    folder = tmp_path_factory.mktemp("three")
    write_data(folder)
    shutil.copytree(saved_base, folder / "base")
    _, _, heard = go(write_recipe(folder, three_stages()))
    assert trained(heard) == ["01-sft", "02-more", "03-preference"]
    return folder


@pytest.fixture
def again(ran: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be changed and run again."""
    shutil.copytree(ran, tmp_path / "again")
    return tmp_path / "again"


def test_the_same_recipe_trains_nothing_and_says_the_same(again):
    before = read(again / "out" / "ledger.json")
    files = weights(again / "out")
    ledger, out, heard = go(again / "recipe.yaml")
    assert trained(heard) == [] and len(heard.of("reused")) == 3
    assert all(entry["reused"] for entry in ledger.stages)
    assert ledger.sentence == before["sentence"]
    for now, then in zip(ledger.stages, before["stages"], strict=True):
        assert now == then | {"reused": True, "data": now["data"]}  # the copy's own paths
    assert weights(out) == files


def test_an_unchanged_run_does_not_lead_model_through_its_early_states(again):
    seen = []

    def watch(event: Event) -> None:
        seen.append(read(again / "out" / "model" / "lehr.json")["promoted_from"])

    run(load_recipe(again / "recipe.yaml"), listeners=[watch])
    assert set(seen) == {"03-preference"}


def test_the_last_stage_changed(again):
    before = metrics(again / "out" / "03-preference")
    _, out, heard = go(again / "recipe.yaml", "stages.2.preference.beta=0.5")
    assert trained(heard) == ["03-preference"]
    assert metrics(out / "03-preference") != before


def test_the_middle_stage_changed_and_all_that_follows(again):
    _, _, heard = go(again / "recipe.yaml", "stages.1.sft.learning_rate=3e-3")
    assert trained(heard) == ["02-more", "03-preference"]


def test_gates_changed_are_judged_again_without_training(again):
    ledger, _, heard = go(again / "recipe.yaml", "gates.protect.forgetting=1e-9")
    assert trained(heard) == []
    assert ledger.verdict == "refused" and "forgetting" in ledger.stages[0]["why"]
    assert len(ledger.stages) == 1, "on_refusal: stop"
    assert ledger.data["promoted_from"] is None
    assert "still what an earlier recipe promoted" in ledger.sentence
    lineage = read(again / "out" / "model" / "lehr.json")
    assert lineage["promoted_from"] == "03-preference", "model/ stays what was promoted before"


def test_a_data_file_changed(again):
    write_rows(again / "pairs.jsonl", pair_rows(27))
    _, _, heard = go(again / "recipe.yaml")
    assert trained(heard) == ["03-preference"]


def test_what_does_not_change_a_number_does_not_train(again):
    shutil.move(again / "out", again / "elsewhere")
    text = (again / "recipe.yaml").read_text()
    (again / "recipe.yaml").write_text("# a comment\n" + text)
    _, out, heard = go(
        again / "recipe.yaml",
        "output=elsewhere",
        "memory_limit=64",
        "export=[adapter, merged]",
        "suites=[forgetting]",
        "stages.0.sft.checkpoints_kept=3",
        "stages.0.sft.evaluate_every=2",
    )
    assert out == again / "elsewhere" and trained(heard) == []
    shutil.move(again, again.parent / "moved")
    _, _, heard = go(again.parent / "moved" / "recipe.yaml", "output=elsewhere")
    assert trained(heard) == [], "a run that moved with its data is the same run"


def test_a_stage_that_was_renamed_is_the_same_stage(again):
    ledger, out, heard = go(again / "recipe.yaml", "stages.1.sft.name=polish")
    assert trained(heard) == []
    assert [entry["folder"] for entry in ledger.stages] == ["01-sft", "02-polish", "03-preference"]
    assert (out / "02-polish" / "adapter" / "adapter_model.safetensors").is_file()
    report = (out / "report.html").read_text()
    assert "02-polish" in report and "02-more" not in report


def test_a_stage_that_lost_its_files_is_made_again(again):
    (again / "out" / "02-more" / "adapter" / "adapter_model.safetensors").unlink()
    before = weights(again / "out")
    _, out, heard = go(again / "recipe.yaml")
    assert trained(heard) == [], "its last checkpoint is whole: nothing is left to train"
    after = weights(out)
    assert after.keys() - before.keys() == {"02-more/adapter/adapter_model.safetensors"}
    assert [name for name in before if after[name] != before[name]] == []


def test_fresh_starts_over_and_gives_the_same_bits(again):
    before = weights(again / "out")
    _, out, heard = go(again / "recipe.yaml", fresh=True)
    assert trained(heard) == ["01-sft", "02-more", "03-preference"]
    assert weights(out) == before


def test_the_base_writes_its_own_texts_once(again, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the base was asked again for texts that it wrote before")

    monkeypatch.setattr(own_text, "own_texts", never)
    go(again / "recipe.yaml")
    shutil.rmtree(again / "out" / ".cache")
    with pytest.raises(AssertionError, match="asked again"):
        go(again / "recipe.yaml")


def test_the_recipe_may_lie_in_python(again, ran):
    """A run that the command line began is the same run for lehr.run."""
    recipe = lehr.load_recipe(again / "recipe.yaml")
    heard = Heard()
    assert lehr.run(recipe, listeners=[heard]).verdict == "promoted"
    assert trained(heard) == []
