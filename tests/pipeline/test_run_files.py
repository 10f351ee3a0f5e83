"""A finished run: the ledger, and the files that are promised, in strict JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.small import Heard, go, lora_recipe, read, write_recipe

from lehr.pipeline.ledger import Ledger
from lehr.pipeline.plan import plan
from lehr.pipeline.run import shown
from lehr.recipe.loading import load_recipe, recipe_hash
from lehr.streams import file_hash

GATE = {"suite", "measure", "base", "tuned", "difference", "low", "high", "limit", "n", "verdict"}
ENTRY = {
    *("kind", "key", "parent", "produced", "recipe_hash", "data", "seed", "versions", "gates"),
    *("promoted", "why"),
}
ROW = {
    *("stage", "attempt", "update", "epoch", "tokens", "supervised_tokens", "loss"),
    *("learning_rate", "grad_norm", "seconds", "skipped"),
}
STAGES = ("01-sft", "02-preference")


@pytest.fixture(scope="module")
def out(finished_once: tuple[Path, Ledger, Heard]) -> Path:
    return finished_once[0].parent / "out"


@pytest.fixture(scope="module")
def ledger(out: Path) -> Any:
    return read(out / "ledger.json")


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_the_files_of_a_run_are_there(out):
    for name in ("recipe.yaml", "plan.json", "strategy.md", "ledger.json", "report.html"):
        assert (out / name).stat().st_size > 0, name
    for stage in STAGES:
        for name in ("metrics.jsonl", "audit.json", "evaluation.json", "flips.jsonl"):
            assert (out / stage / name).is_file(), f"{stage}/{name}"
        assert (out / stage / "adapter" / "adapter_model.safetensors").is_file()
        assert sorted(p.name for p in (out / stage / "checkpoints").glob("update-*"))
    for name in ("adapter_config.json", "tokenizer.json", "README.md", "lehr.json"):
        assert (out / "model" / name).is_file(), name


def test_every_json_file_is_strict(out):
    for path in out.rglob("*.json"):
        read(path)
    for path in out.rglob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line:
                json.loads(line, parse_constant=pytest.fail)
    assert "-0.0," not in (out / "ledger.json").read_text()


def test_the_ledger_has_the_contracts_keys(ledger, out, finished_once):
    assert [stage["kind"] for stage in ledger["stages"]] == ["sft", "preference"]
    assert ledger["verdict"] == "promoted" and ledger["sentence"].startswith("Promoted preference")
    for stage in ledger["stages"]:
        assert set(stage) >= ENTRY
        for gate in stage["gates"]:
            assert set(gate) >= GATE
            assert gate["verdict"] in ("passed", "refused", "undetermined")
        for source in stage["data"]:
            assert {"path", "sha256", "rows", "kept", "dropped", "tokens"} <= set(source)
            assert file_hash(Path(source["path"])) == source["sha256"]
            gone = sum(source["dropped"].values())
            assert source["kept"] + source["heldout"] + gone == source["rows"]
        assert stage["updates"] == 6 and stage["tokens"] > 0 and stage["seconds"] > 0
    first, second = ledger["stages"]
    assert second["parent"] == first["key"] != first["parent"]
    recipe = load_recipe(finished_once[0])
    assert ledger["recipe_hash"] == recipe_hash(recipe) == first["recipe_hash"]
    again = load_recipe(out / "recipe.yaml")
    assert recipe_hash(again) == ledger["recipe_hash"]
    assert {"lehr", "torch", "transformers", "python"} <= set(ledger["versions"])
    for stage in ledger["stages"]:
        for name, known in stage["produced"]["files"].items():
            assert file_hash(out / stage["folder"] / "adapter" / name) == known


def test_metrics_have_a_line_an_update(out):
    for stage in STAGES:
        rows = lines(out / stage / "metrics.jsonl")
        assert [row["update"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert all(set(row) >= ROW and row["stage"] == stage for row in rows)
    assert "objective.margin" in rows[0]


def test_evaluation_and_flips(out):
    for stage in STAGES:
        found = read(out / stage / "evaluation.json")
        assert {"stage", "kind", "suites", "gates", "prompts", "kl"} <= set(found)
        for measures in found["suites"].values():
            for entry in measures.values():
                assert {"unit", "direction", "base", "parent", "tuned"} <= set(entry)
        assert found["kl"]["value"] >= 0
        assert [set(prompt) for prompt in found["prompts"]] == [
            {"kind", "prompt", "base", "parent", "tuned"}
        ]
    flips = [row for stage in STAGES for row in lines(out / stage / "flips.jsonl")]
    for flip in flips:
        assert {"suite", "measure", "id", "prompt", "before", "after", "direction"} <= set(flip)


def test_plan_and_audit(out):
    plan = read(out / "plan.json")
    assert {"recipe_hash", "machine", "precision", "model", "stages", "gates", "findings"} <= set(
        plan
    )
    for stage in plan["stages"]:
        assert stage["memory"]["peak"] > 0 and len(stage["curve"]) == 6
    for gate in plan["gates"]:
        assert {"name", "limit", "resolves", "n", "can_pass", "note"} <= set(gate)
    for stage in STAGES:
        audit = read(out / stage / "audit.json")
        assert audit["every_end_token"] is True and audit["answers"] > 0
        assert any(span["supervised"] for span in audit["mask_sample"])


def test_events_tell_the_story_in_order(out):
    rows = lines(out / "events.jsonl")
    assert all({"time", "stage", "kind", "text"} <= set(row) for row in rows)
    kinds = [row["kind"] for row in rows]
    assert kinds[0] == "run_started" and kinds[-1] == "finished"
    assert kinds.count("stage_started") == 2 == kinds.count("verdict")


def test_undetermined_promote_is_said_everywhere(ledger, out):
    last = ledger["stages"][-1]
    assert {gate["verdict"] for gate in last["gates"]} >= {"undetermined"}
    assert "although undetermined" in last["why"]
    assert "although undetermined" in ledger["sentence"]
    assert "although undetermined" in (out / "model" / "README.md").read_text()
    assert "although undetermined" in (out / "report.html").read_text()


def test_the_promoted_model_loads_with_plain_peft(out):
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(out / "model")
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    lineage = read(out / "model" / "lehr.json")
    assert [stage["kind"] for stage in lineage["stages"]] == ["sft", "preference"]


def test_a_folder_is_shown_as_a_person_would_type_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs" / "a") == "runs/a"
    assert shown(Path("/elsewhere/a")) == "/elsewhere/a"


def test_a_plan_leaves_the_record_of_a_run_as_it_is(finished):
    out = finished.parent / "out"
    before = {path: path.read_bytes() for path in out.rglob("*.json")}
    changed = lora_recipe()
    changed["stages"] = changed["stages"][:1]
    found = plan(load_recipe(write_recipe(finished.parent, changed)))
    assert len(found.plan["stages"]) == 1 and found.strategy_path.endswith("planned/strategy.md")
    assert {path: path.read_bytes() for path in before} == before
    assert (out / "planned" / "plan.json").is_file()


def test_the_recipe_that_a_run_wrote_is_that_run(finished):
    out, moved = finished.parent / "out", finished.parent / "moved"
    _, folder, heard = go(out / "recipe.yaml")
    assert folder == out and heard.updates() == 0
    out.rename(moved)
    _, folder, heard = go(moved / "recipe.yaml")
    assert folder == moved and heard.updates() == 0 and not out.exists()
