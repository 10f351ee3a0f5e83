"""Gates decide: a harmed stage is refused, its parent kept, and everything says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.pipeline.small import (
    chat_rows,
    go,
    lora_recipe,
    read,
    stage,
    weights,
    weights_recipe,
    write_data,
    write_recipe,
    write_rows,
)

HARM = {"learning_rate": 3.0, "clip": None, "schedule": {"kind": "constant", "warmup": 0}}


def harmed_recipe(**gates: Any) -> dict[str, Any]:
    """A good stage, then one whose learning rate destroys what was there."""
    recipe = weights_recipe(export="merged")
    recipe["stages"].append({"sft": stage("chats", name="harm", **HARM)})
    recipe["gates"] = {"protect": {"forgetting": 0.5}, **gates}
    return recipe


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("harm")
    write_data(folder)
    ledger, out, heard = go(write_recipe(folder, harmed_recipe()))
    return folder, ledger, out, heard


def test_planted_harm_is_refused_and_the_parent_kept(stopped):
    _, ledger, out, _ = stopped
    first, second, third = ledger.stages
    assert first["promoted"] and second["promoted"] and not third["promoted"]
    assert ledger.verdict == "refused"
    assert "kept the parent" in third["why"] and "forgetting" in third["why"]
    assert "Promoted sft" in ledger.sentence and "refused harm" in ledger.sentence
    assert ledger.data["promoted_from"] == "02-sft"
    assert weights(out / "model") == weights(out / "02-sft" / "weights")
    assert "02-sft" in read(out / "model" / "lehr.json")["promoted_from"]
    evaluation = read(out / "03-harm" / "evaluation.json")
    refused = [gate for gate in evaluation["gates"] if gate["verdict"] == "refused"]
    assert refused and all(gate["low"] is not None for gate in refused)


def test_what_is_exported_is_what_was_promoted(stopped):
    _, ledger, out, _ = stopped
    [entry] = ledger.data["exports"]
    assert entry["parity"]["problem"] == ""
    assert weights(out / "exports" / "merged") == weights(out / "model")


def test_a_stage_after_the_refused_one_begins_from_the_parent_that_was_kept(stopped):
    folder, _, _, _ = stopped
    recipe = harmed_recipe(on_refusal="continue")
    recipe["stages"].append({"sft": stage("chats", name="repair", learning_rate=5e-3)})
    ledger, out, heard = go(write_recipe(folder, recipe))
    assert len(heard.of("reused")) == 3
    _, second, third, fourth = ledger.stages
    assert fourth["parent"] == second["key"] and not third["promoted"]
    assert ledger.verdict == "promoted" and "refused harm" in ledger.sentence
    assert weights(out / "model") == weights(out / "04-repair" / "weights")


def test_nothing_promoted_leaves_no_model(work):
    recipe = weights_recipe(export="merged")
    recipe["stages"] = [{"pretrain": stage("text", **HARM)}]
    ledger, out, heard = go(write_recipe(work, recipe))
    assert ledger.verdict in ("refused", "undetermined")
    assert ledger.sentence.startswith("Nothing was promoted: ")
    assert not (out / "model").exists() and not (out / "exports").exists()
    assert ["what now", "lehr explain evaluation"] in [
        list(step) for step in heard.of("finished")[0].data["next"]
    ]


def test_a_stage_that_changes_nothing_is_not_promoted(work):
    recipe = lora_recipe(export="adapter")
    recipe["stages"] = [{"sft": stage("chats", learning_rate=0, max_updates=2)}]
    recipe["gates"] = {"protect": {}}
    path = write_recipe(work, recipe)
    ledger, out, heard = go(path)
    assert ledger.verdict in ("refused", "undetermined") and not (out / "model").exists()
    assert any("this stage changes nothing" in event.text for event in heard.of("notice"))


def test_undetermined_keeps_the_parent(work):
    recipe = lora_recipe(export="adapter")
    recipe["stages"] = [{"preference": stage("pairs", learning_rate=1e-3)}]
    recipe["gates"] = {"protect": {}}
    ledger, out, _ = go(write_recipe(work, recipe))
    [entry] = ledger.stages
    assert ledger.verdict == "undetermined" and not entry["promoted"]
    assert "kept the parent" in entry["why"]
    assert not (out / "model").exists()


def test_a_gate_links_to_the_items_that_changed_side(work):
    rows = [  # answers of one length: the base is right about some of them by chance
        {"prompt": f"{n}?", "chosen": f"It is {n % 3}.", "rejected": f"It is {n % 3 + 5}."}
        for n in range(28)
    ]
    write_rows(work / "pairs.jsonl", rows)
    recipe = lora_recipe(export="adapter")
    recipe["stages"] = [{"preference": stage("pairs", learning_rate=3e-2, max_updates=12)}]
    recipe["gates"] = {"protect": {}, "undetermined": "promote"}
    _, out, _ = go(write_recipe(work, recipe))
    lines = (out / "01-preference" / "flips.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    [gate] = read(out / "01-preference" / "evaluation.json")["gates"]
    gained = [row for row in rows if row["direction"] == "gained"]
    lost = [row for row in rows if row["direction"] == "lost"]
    assert (len(gained), len(lost)) == (gate["gained"], gate["lost"])
    assert gained and all(row["before"] != row["after"] for row in gained)


def test_more_items_are_taken_until_the_budget_ends(work):
    write_rows(work / "chats.jsonl", chat_rows(120))
    recipe = lora_recipe(export="adapter")
    recipe["data"]["chats"]["holdout"] = 60
    recipe["stages"] = [{"sft": stage("chats", learning_rate=2e-2)}]
    recipe["gates"] = {"protect": {}, "items": 20}
    path = write_recipe(work, recipe)
    ledger, _, _ = go(path)
    assert ledger.stages[0]["gates"][0]["n"] <= 20


def test_the_plan_says_which_gate_cannot_pass(work):
    recipe = lora_recipe(export="adapter")
    recipe["data"]["chats"]["holdout"] = 1
    recipe["stages"] = recipe["stages"][:1]
    _, out, _ = go(write_recipe(work, recipe))
    plan = read(out / "plan.json")
    assert [gate["name"] for gate in plan["gates"] if not gate["can_pass"]] == ["chats.loss"]
    assert any("cannot pass with the items at hand" in line for line in plan["findings"])
