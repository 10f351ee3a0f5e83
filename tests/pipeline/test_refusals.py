"""Bad input is refused before anything is trained: every problem at once, and no model/."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.small import (
    chat_rows,
    go,
    lora_recipe,
    save_base,
    stage,
    text_rows,
    weights_recipe,
    write_recipe,
    write_rows,
)

from lehr.errors import LehrError, OutOfResources, RecipeError
from lehr.models.loading import load_model
from lehr.pipeline import workbench
from lehr.pipeline.folder import claimed
from lehr.training import resources

pytestmark = pytest.mark.usefixtures("lean")


def refused(path: Path, *overrides: str, kind: type[LehrError] = RecipeError) -> str:
    """The text of the refusal; nothing was promoted, and nothing trained."""
    with pytest.raises(kind) as caught:
        go(path, *overrides)
    out = path.parent / "out"
    assert not (out / "model").exists()
    assert not list(out.rglob("metrics.jsonl"))
    assert not (out / "ledger.json").exists()
    return str(caught.value)


def test_automatic_micro_batches_of_a_model_with_batch_norms(work, monkeypatch):
    """Free memory would decide what is normalised together."""

    def load(spec: str, **keys: Any) -> Any:
        model = load_model(spec, **keys)
        model.network.between = torch.nn.BatchNorm1d(4)
        return model

    monkeypatch.setattr(workbench, "load_model", load)
    said = refused(write_recipe(work, lora_recipe()))
    assert "stages.0 micro_batch: expected a number" in said and "stages.1 micro_batch" in said
    assert "network.between" in said


# -- the recipe ---------------------------------------------------------------


def test_all_problems_of_a_recipe_come_together(work):
    text = """
model: ./base
output: out
learning_rate: 1e-4
data:
  chats: {path: nowhere.jsonl}
  pairs: {path: pairs.jsonl, holdout: .inf}
stages:
  - sft: {data: chats, learning_rate: "false", batch_sizes: 4}
  - preference: {data: pairs, beta: -1, beta: 0.1}
"""
    path = work / "recipe.yaml"
    path.write_text(text)
    said = refused(path)
    for word in (
        "recipe.yaml:4 learning_rate",
        "nowhere.jsonl",
        "holdout",
        "found 'false'",
        "batch_sizes",
        "batch_size",
        "beta",
    ):
        assert word in said, word
    assert said.count("\n") >= 5
    assert not (work / "out").exists()


def test_dropout_in_a_preference_stage(work):
    recipe = lora_recipe(adapter={"kind": "lora", "rank": 4, "dropout": 0.1})
    said = refused(write_recipe(work, recipe))
    assert "stages.1.preference.adapter.dropout" in said or "adapter.dropout" in said
    assert "dropout: 0" in said
    recipe["stages"][1]["preference"]["adapter"] = {"dropout": 0}
    recipe["stages"][1]["preference"]["max_updates"] = 1
    recipe["stages"][0]["sft"]["max_updates"] = 1
    ledger, out, _ = go(write_recipe(work, recipe | {"gates": "none", "export": "merged"}))
    config = json.loads((out / "02-preference/adapter/adapter_config.json").read_text())
    assert config["lora_dropout"] == 0.0, "the stage's own dropout, not its parent's"
    assert ledger.verdict == "promoted"


@pytest.mark.parametrize(("key", "value"), [("rank", 8), ("alpha", 4), ("targets", ["q_proj"])])
def test_another_adapter_needs_fold_parent(work, key, value):
    recipe = lora_recipe()
    recipe["stages"][1]["preference"]["adapter"] = {key: value}
    assert "fold_parent: true" in refused(write_recipe(work, recipe))


# -- the data -----------------------------------------------------------------


def test_problems_of_all_sources_come_together(work):
    write_rows(work / "empty.jsonl", [])
    write_rows(work / "bad.jsonl", [{"messages": None}] * 4)
    recipe = lora_recipe()
    recipe["data"] = {"chats": {"path": "empty.jsonl"}, "pairs": {"path": "bad.jsonl"}}
    said = refused(write_recipe(work, recipe))
    assert "data.chats: expected at least one row" in said
    assert "data.pairs: expected at least one usable row: 4 of 4 were dropped" in said
    assert "bad.jsonl:1" in said


def test_rows_of_another_kind(work):
    recipe = lora_recipe()
    recipe["data"]["pairs"] = {"path": "text.jsonl"}
    assert "a text where a pair is needed (60 rows)" in refused(write_recipe(work, recipe))


def test_a_hold_out_that_takes_everything(work):
    recipe = lora_recipe()
    recipe["data"]["chats"]["holdout"] = 400
    said = refused(write_recipe(work, recipe))
    assert "data.chats.holdout: expected fewer than the 40 usable rows" in said


def test_two_microworlds_with_other_seeds(work):
    recipe = weights_recipe()
    recipe["data"] = {
        "text": {"microworld": "text", "rows": 30, "seed": 1},
        "chats": {"microworld": "chats", "rows": 30, "seed": 2},
    }
    assert "one seed for all microworld sources" in refused(write_recipe(work, recipe))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"no_such_dial": 1}, "no_such_dial"),
        ({"over_refusal": 3.0}, "over_refusal"),
        ({"kind": "text"}, "options.kind"),
    ],
)
def test_microworld_dials(work, options, word):
    recipe = weights_recipe()
    recipe["data"] = {
        "text": {"microworld": "text", "rows": 30},
        "chats": {"microworld": "chats", "rows": 30, "options": options},
    }
    assert word in refused(write_recipe(work, recipe))


# -- gates --------------------------------------------------------------------


def test_gates_that_cannot_be_evaluated(work):
    recipe = lora_recipe(suites=["skills"])
    recipe["gates"] = {"protect": {"refusal": 0.1, "regressive_flips": 0.1}}
    said = refused(write_recipe(work, recipe))
    assert "refusal" in said and "regressive_flips" in said, "all of them at once"


def test_a_suite_that_this_run_does_not_have(work):
    said = refused(write_recipe(work, lora_recipe(suites=["skills"])))
    assert "suites" in said and "'skills'" in said and "forgetting" in said


def test_best_without_held_out_rows(work):
    recipe = lora_recipe(gates="none")
    recipe["data"]["chats"]["holdout"] = 0
    recipe["stages"][0]["sft"] |= {"promote": "best", "early_stop": 2}
    said = refused(write_recipe(work, recipe))
    assert "promote" in said and "early_stop" in said and "held-out" in said


# -- the model ----------------------------------------------------------------


def test_a_pickle_in_the_model_folder_is_named(work):
    (work / "base" / "model.safetensors").unlink()
    (work / "base" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    said = refused(write_recipe(work, lora_recipe()))
    assert "pytorch_model.bin" in said and "safetensors" in said


def test_chats_without_a_template(work):
    shutil.rmtree(work / "base")
    save_base(work / "base", template="auto")
    assert "template: chatml" in refused(write_recipe(work, lora_recipe()))


@pytest.fixture(scope="module")
def dynamic_base(tmp_path_factory: Any) -> Path:
    rotary = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return save_base(tmp_path_factory.mktemp("dynamic") / "base", rope_parameters=rotary)


def test_a_model_whose_admission_probe_fails(work, dynamic_base):
    shutil.rmtree(work / "base")
    shutil.copytree(dynamic_base, work / "base")
    recipe = lora_recipe(stages=[{"sft": stage("chats", learning_rate=2e-2)}])
    said = refused(write_recipe(work, recipe))
    assert "packing (dynamic rotary positions)" in said and "packing: false" in said
    recipe["stages"][0]["sft"] |= {"packing": False, "micro_batch": 2}
    assert "micro_batch" in refused(write_recipe(work, recipe))


def test_the_remedy_of_the_probe_works_and_nothing_is_packed(work, dynamic_base, monkeypatch):
    from lehr.models.language_model import LanguageModel

    shutil.rmtree(work / "base")
    shutil.copytree(dynamic_base, work / "base")
    recipe = lora_recipe(stages=[{"sft": stage("chats", learning_rate=2e-2, packing=False)}])
    recipe |= {"gates": {"protect": {"forgetting": 9.0}}, "export": "merged"}
    rows: list[int] = []
    plain = LanguageModel.hidden

    def watched(self: LanguageModel, pack: Any) -> Any:
        rows.append(len(pack.items))
        return plain(self, pack)

    monkeypatch.setattr(LanguageModel, "hidden", watched)
    ledger, _, _ = go(write_recipe(work, recipe))
    assert ledger.verdict == "promoted"
    probe = rows[:2]  # the probe itself packs: that is what it asks about
    assert all(count > 1 for count in probe) and set(rows[2:]) == {1}


def test_pairs_on_a_model_that_cannot_pack(work, dynamic_base):
    shutil.rmtree(work / "base")
    shutil.copytree(dynamic_base, work / "base")
    recipe = lora_recipe(stages=[{"preference": stage("pairs", packing=False)}])
    assert "packing" in refused(write_recipe(work, recipe))


def test_settings_of_generation_that_conflict_are_settled_before_training(work):
    path = work / "base" / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"do_sample": False, "temperature": 0.7}))
    recipe = lora_recipe(stages=[{"sft": stage("chats")}], gates="none", export="merged")
    _, _, heard = go(write_recipe(work, recipe))
    notices = [event.text for event in heard.of("notice")]
    place = next(n for n, event in enumerate(heard) if "temperature" in event.text)
    trained = next(n for n, event in enumerate(heard) if event.kind == "update")
    assert place < trained and any("temperature 0.7" in text for text in notices)


# -- the folder ---------------------------------------------------------------


def test_the_folder_of_another_run(finished):
    other = finished.parent / "other.yaml"
    shutil.copy(finished, other)
    before = (finished.parent / "out" / "ledger.json").read_bytes()
    with pytest.raises(RecipeError, match=r"folder of the run 'other'.*--fresh.*found 'recipe'"):
        go(other)
    assert (finished.parent / "out" / "ledger.json").read_bytes() == before


@pytest.mark.parametrize("name", ["thesis.txt", "recipe.yaml"])
def test_a_folder_of_foreign_files(work, name):
    """Also the folder that the user's own recipe.yaml lies in: it would be overwritten."""
    foreign = work / "mine"
    foreign.mkdir()
    (foreign / name).write_text("precious")
    path = write_recipe(work, lora_recipe(output="mine"))
    with pytest.raises(RecipeError, match="an empty folder or the folder of this run"):
        go(path)
    with pytest.raises(RecipeError, match="an empty folder"):
        go(path, fresh=True)
    assert (foreign / name).read_text() == "precious"
    assert [one.name for one in foreign.iterdir()] == [name]


def test_fresh_removes_what_a_run_wrote_and_nothing_else(finished):
    out = finished.parent / "out"
    (out / "notes.txt").write_text("mine")
    (out / "pictures").mkdir()
    with claimed(out, "recipe", fresh=True):
        left = {path.name for path in out.iterdir()}
    assert left == {".lock", "notes.txt", "pictures"}


def test_an_output_that_is_a_file(work):
    (work / "out").write_text("a file")
    with pytest.raises(RecipeError, match="a folder for the run, not a file"):
        go(write_recipe(work, lora_recipe()))


def test_a_plan_that_was_killed_leaves_a_folder_that_is_still_ours(work):
    with claimed(work / "out", "recipe", fresh=False):
        (work / "out" / "01-sft").mkdir()
    with claimed(work / "out", "recipe", fresh=False):
        pass
    other = claimed(work / "out", "else", fresh=False)
    with pytest.raises(RecipeError, match="belongs to another run"), other:
        pass


def hold(folder: str, ready: Any, leave: Any) -> None:
    with claimed(Path(folder), "recipe", fresh=False):
        ready.set()
        leave.wait(60)


def test_a_second_process_in_the_same_folder(work):
    process = multiprocessing.get_context("fork")
    ready, leave = process.Event(), process.Event()
    first = process.Process(target=hold, args=(str(work / "out"), ready, leave))
    first.start()
    try:
        assert ready.wait(60)
        with pytest.raises(RecipeError, match="no other lehr process"):
            go(write_recipe(work, lora_recipe()))
    finally:
        leave.set()
        first.join(60)


# -- a machine that is too small ----------------------------------------------


def test_memory_that_does_not_suffice(work):
    path = write_recipe(work, lora_recipe(memory_limit=1e-4))
    said = refused(path, kind=OutOfResources)
    assert "GiB for one pack" in said and "memory_limit" in said


def test_a_micro_batch_that_does_not_fit(work):
    recipe = lora_recipe(memory_limit=1e-4)
    for entry in recipe["stages"]:
        next(iter(entry.values()))["micro_batch"] = 4
    said = refused(write_recipe(work, recipe), kind=OutOfResources)
    assert "micro_batch 4" in said and "micro_batch: auto" in said


def test_a_disk_that_is_too_small(work, monkeypatch):
    monkeypatch.setattr(resources, "free_disk", lambda folder: 1000)
    said = refused(write_recipe(work, lora_recipe()), kind=OutOfResources)
    assert "MiB for states and checkpoints" in said and "0.00 MiB free" in said


# -- rows that are dropped and counted ----------------------------------------


def test_bad_rows_are_dropped_counted_and_named(work):
    rows: list[Any] = chat_rows()
    rows[3] = {"messages": [{"role": "user", "content": "q"}]}
    rows[5] = {"messages": None}
    path = write_rows(work / "chats.jsonl", rows)
    with path.open("ab") as stream:
        stream.write(b'{"messages": [\xff\xfe\n')
    recipe = lora_recipe(stages=[{"sft": stage("chats")}], gates="none", export="merged")
    ledger, out, heard = go(write_recipe(work, recipe))
    [source] = ledger.stages[0]["data"]
    assert source["rows"] == 41 and sum(source["dropped"].values()) == 3
    [audited] = json.loads((out / "01-sft" / "audit.json").read_text())["sources"]
    firsts = {entry["first"].rsplit(":", 1)[1] for entry in audited["dropped"].values()}
    assert firsts == {"4", "6", "41"}
    assert heard.of("data")[0].data["sources"][0]["dropped"]


def test_more_text_than_fits_is_split_and_counted(work):
    write_rows(work / "text.jsonl", [{"text": row["text"] * 20} for row in text_rows(20)])
    recipe = weights_recipe(gates="none", export="merged")
    recipe["stages"] = recipe["stages"][:1]
    ledger, _, _ = go(write_recipe(work, recipe))
    [source] = ledger.stages[0]["data"]
    assert source["kept"] + source["heldout"] == source["rows"] == 20
