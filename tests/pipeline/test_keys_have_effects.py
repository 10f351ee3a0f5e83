"""No dead keys: each key, changed, shows somewhere outside recipe.yaml and the hashes.

tests/recipe/test_witness.py names the witness of every key; here they are seen. Keys whose
witness is seen elsewhere: output, gates.undetermined, gates.on_refusal (test_judgement,
test_refusals), trust_remote_code and the precision of a real model (tests/models).
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.small import (
    chat_rows,
    go,
    lora_recipe,
    losses,
    metrics,
    read,
    stage,
    text_rows,
    weights_recipe,
    write_data,
    write_recipe,
    write_rows,
)

from lehr.data.rows import Row
from lehr.errors import RecipeError
from lehr.models.loading import load_model
from lehr.pipeline import run as run_module
from lehr.pipeline import showcase, workbench
from lehr.pipeline import sources as sources_module
from lehr.pipeline.plan import plan
from lehr.recipe.loading import load_recipe

ANSWERS, EXPORT = showcase.answers, run_module.export_promoted


pytestmark = pytest.mark.usefixtures("lean")


@pytest.fixture
def one_load(monkeypatch: pytest.MonkeyPatch, saved_base: Path) -> None:
    """Planning does not change the model: the same one serves every plan."""

    def load(spec: str, **keys: Any) -> Any:
        if spec != "./base":
            return load_model(spec, **keys)
        return loaded(saved_base, keys["precision"], keys["template"])

    monkeypatch.setattr(workbench, "load_model", load)


@lru_cache(maxsize=8)
def loaded(base: Path, precision: str, template: str) -> Any:
    return load_model(str(base), precision=precision, template=template)


def sft(**keys: Any) -> dict[str, Any]:
    """One sft stage over the folder `base`, nothing gated."""
    recipe = lora_recipe(gates="none", export="adapter")
    recipe["data"]["text"] = {"path": "text.jsonl", "holdout": 8}
    recipe["stages"] = [{"sft": stage("chats", learning_rate=1e-2, max_updates=4) | keys}]
    return recipe


def planned(work: Path, recipe: dict[str, Any]) -> tuple[Any, Any]:
    """(plan.json, audit.json of the first stage)."""
    found = plan(load_recipe(write_recipe(work, recipe)), out=work / "planned")
    audits = sorted((work / "planned").glob("0*/audit.json"))
    return found.plan, [read(path) for path in audits]


def sources(audits: Any) -> dict[str, Any]:
    return {one["name"]: one for audit in audits for one in audit["sources"]}


# -- seen in the plan ---------------------------------------------------------

Look = Callable[[Any, Any], Any]
IN_THE_PLAN: dict[str, tuple[dict[str, Any], Look]] = {
    "stages.0.sft.batch_size": (
        {"batch_size": 3},
        lambda plan, _: plan["stages"][0]["tokens_per_update"],
    ),
    "stages.0.sft.max_updates": ({"max_updates": 9}, lambda plan, _: plan["stages"][0]["updates"]),
    "stages.0.sft.epochs": (
        {"epochs": 2, "max_updates": None},
        lambda plan, _: plan["stages"][0]["updates"],
    ),
    "stages.0.sft.max_length": (
        {"max_length": 16},
        lambda _, audits: audits[0]["sources"][0]["dropped_tokens"],
    ),
    "stages.0.sft.packing": ({"packing": False}, lambda _, audits: audits[0]["packs"]),
    "stages.0.sft.pack_length": ({"pack_length": 256}, lambda _, audits: audits[0]["packs"]),
    "stages.0.sft.micro_batch": (
        {"micro_batch": 1},
        lambda plan, _: plan["stages"][0]["memory"]["peak"],
    ),
    "stages.0.sft.recompute": (
        {"recompute": "full"},
        lambda plan, _: plan["stages"][0]["memory"]["peak"],
    ),
    "stages.0.sft.recompute.budget": (
        {"recompute": {"budget": 0.4}},
        lambda plan, _: plan["stages"][0]["recompute_keeps"],
    ),
    "stages.0.sft.learning_rate": (
        {"learning_rate": 1e-3},
        lambda plan, _: plan["stages"][0]["curve"],
    ),
    "stages.0.sft.scale_rate": (
        {"scale_rate": {"found_at": 24}},
        lambda plan, _: plan["stages"][0]["curve"],
    ),
    "stages.0.sft.schedule.kind": (
        {"schedule": {"kind": "linear"}},
        lambda plan, _: plan["stages"][0]["curve"],
    ),
    "stages.0.sft.schedule.warmup": (
        {"schedule": {"warmup": 3}},
        lambda plan, _: plan["stages"][0]["curve"],
    ),
    "stages.0.sft.schedule.final": (
        {"schedule": {"final": 0.7}},
        lambda plan, _: plan["stages"][0]["curve"],
    ),
    "stages.0.sft.name": ({"name": "polish"}, lambda plan, _: plan["stages"][0]["folder"]),
    "stages.0.sft.data": ({"data": ["chats", "more"]}, lambda _, audits: list(sources(audits))),
    "stages.0.sft.keep.replay": (
        {"keep": {"replay": {"text": 0.4}}},
        lambda _, audits: list(sources(audits)),
    ),
    "stages.0.sft.adapter": (
        {"adapter": {"rank": 32}},
        lambda plan, _: plan["stages"][0]["memory"]["peak"],
    ),
    "stages.0.sft.precision": ({"precision": "bf16"}, lambda plan, _: plan["precision"]),
    "stages.0.sft.checkpoints_kept": (
        {"checkpoints_kept": 9},
        lambda plan, _: plan["stages"][0]["disk"],
    ),
}


@pytest.fixture
def folder(work: Path, one_load: None) -> Path:
    write_rows(work / "more.jsonl", chat_rows(50)[40:])
    return work


@pytest.fixture
def plain(folder: Path) -> tuple[Any, Any]:
    recipe = sft()
    recipe["data"]["more"] = {"path": "more.jsonl", "holdout": 2}
    return planned(folder, recipe)


@pytest.mark.parametrize("key", IN_THE_PLAN)
def test_keys_of_a_stage_show_in_the_plan(folder, plain, key):
    keys, look = IN_THE_PLAN[key]
    recipe = sft(**keys)
    recipe["data"]["more"] = {"path": "more.jsonl", "holdout": 2}
    if "epochs" in keys:
        del recipe["stages"][0]["sft"]["max_updates"]
    assert look(*planned(folder, recipe)) != look(*plain)


def test_a_rate_of_another_batch_size_is_scaled_and_the_reason_said(folder):
    peaks = []
    for rule in ("auto", "linear"):
        plan, _ = planned(folder, sft(scale_rate={"found_at": 24, "rule": rule}))
        peaks.append(plan["stages"][0]["learning_rate"])
        assert any("found at batch size 24 becomes" in line for line in plan["findings"])
    assert peaks == pytest.approx([1e-2 / 2, 1e-2 / 4])


def test_overflow_says_what_becomes_of_long_rows(folder):
    rows: list[Any] = chat_rows()
    rows[7]["messages"][1]["content"] = "It is red." * 40
    write_rows(folder / "chats.jsonl", rows)
    for overflow, dropped in (("truncate", 0), ("drop", 1)):
        _, audits = planned(folder, sft(overflow=overflow))
        counts = [one["rows"] for one in audits[0]["sources"][0]["dropped"].values()]
        assert sum(counts) == dropped
    long = [{"text": "The door is red. " * 30}] * 20
    write_rows(
        folder / "text.jsonl", [row | {"text": f"{n} {row['text']}"} for n, row in enumerate(long)]
    )
    tokens = []
    for overflow in ("split", "truncate"):
        recipe = sft()
        keys = stage("text", overflow=overflow) | {"max_length": 32}
        recipe["stages"] = [{"pretrain": keys}]
        tokens.append(planned(folder, recipe)[1][0]["sources"][0]["tokens"])
    assert tokens[0] > 2 * tokens[1]


def test_decay_shows_with_wsd(folder):
    curves = []
    for decay in (0.25, 0.75):
        schedule = {"kind": "wsd", "warmup": 0, "decay": decay}
        curves.append(planned(folder, sft(schedule=schedule))[0]["stages"][0]["curve"])
    assert curves[0] != curves[1]


IN_THE_DATA: dict[str, tuple[dict[str, Any], Look]] = {
    "holdout": ({"holdout": 5}, lambda _, audits: audits[0]["sources"][0]["heldout"]),
    "rows": ({"rows": 20}, lambda _, audits: audits[0]["sources"][0]["kept"]),
    "train_on": (
        {"train_on": "last"},
        lambda _, audits: audits[0]["sources"][0]["supervised_tokens"],
    ),
    "path": ({"path": "more.jsonl"}, lambda _, audits: audits[0]["sources"][0]["files"]),
}


@pytest.mark.parametrize("key", IN_THE_DATA)
def test_keys_of_a_source_show_in_the_audit(folder, key):
    turns = [row["messages"] for row in chat_rows(40)]
    rows = [{"messages": one + two} for one, two in pairwise(turns)]
    write_rows(folder / "chats.jsonl", rows)
    changes, look = IN_THE_DATA[key]
    before = planned(folder, sft())
    recipe = sft()
    recipe["data"]["chats"] |= {"holdout": 4, **changes}
    if key != "holdout":
        base = sft()
        base["data"]["chats"]["holdout"] = 4
        before = planned(folder, base)
    assert look(*planned(folder, recipe)) != look(*before)


def test_the_format_of_a_source_is_believed(folder):
    recipe = sft()
    recipe["data"]["chats"]["format"] = "alpaca"
    with pytest.raises(RecipeError, match="40 of 40 were dropped"):
        planned(folder, recipe)


def test_a_bad_row_stops_where_the_recipe_says_so(folder):
    rows: list[Any] = chat_rows()
    rows[2] = {"messages": None}
    write_rows(folder / "chats.jsonl", rows)
    planned(folder, sft())
    recipe = sft()
    recipe["data"]["chats"]["on_bad_row"] = "stop"
    with pytest.raises(RecipeError, match=r"chats\.jsonl:3"):
        planned(folder, recipe)


def test_microworld_builtin_seed_and_options(folder):
    def shown(**source: Any) -> Any:
        recipe = weights_recipe(gates="none", export="merged")
        recipe["data"]["chats"] = {"holdout": 4, **source}
        recipe["stages"] = [{"sft": stage("chats", max_length=96)}]
        _, audits = planned(folder, recipe)
        return audits[0]["sources"][0]["files"], audits[0]["mask_sample"]

    world = {"microworld": "chats", "rows": 24}
    seen = [
        shown(**world),
        shown(**world, seed=1),
        shown(**world, options={"seed": 4}),
        shown(microworld="claims", rows=24),
    ]
    assert len({json.dumps(one) for one in seen}) == 4


def test_the_docstrings_of_python(folder, monkeypatch):
    rows = [Row({"text": row["text"]}, n) for n, row in enumerate(text_rows(20), 1)]
    monkeypatch.setattr(sources_module, "docstring_rows", lambda: (rows, "f" * 64))
    recipe = weights_recipe(gates="none", export="merged")
    recipe["data"] = {"docs": {"builtin": "python-docstrings", "rows": 20, "holdout": 4}}
    recipe["stages"] = [{"pretrain": stage("docs")}]
    _, audits = planned(folder, recipe)
    assert audits[0]["sources"][0]["files"][0]["path"] == "builtin:python-docstrings"


def test_template_system_and_date(folder):
    system = {"role": "system", "content": "Be brief."}
    rows = [{"messages": [system, *row["messages"]]} for row in chat_rows()]
    write_rows(folder / "chats.jsonl", rows)
    (folder / "dated.jinja").write_text(
        "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def text(**keys: Any) -> str:
        _, audits = planned(folder, sft() | keys)
        return "".join(span["text"] for span in audits[0]["mask_sample"])

    plain = text()
    assert "Be brief." in plain
    assert "Be brief." not in text(system="drop")
    dated = text(template="dated.jinja", date="2024-02-29")
    assert "2024-02-29" in dated and dated != plain
    assert "2023-01-31" in text(template="dated.jinja", date="2023-01-31")


def test_threads_and_memory_limit(folder):
    before = torch.get_num_threads()
    try:
        assert planned(folder, sft() | {"threads": 2})[0]["machine"]["threads"] == 2
        assert planned(folder, sft() | {"threads": 1})[0]["machine"]["threads"] == 1
    finally:
        torch.set_num_threads(before)
    why = [
        planned(folder, sft() | {"memory_limit": limit})[0]["stages"][0]["micro_batch_why"]
        for limit in (1, 2)
    ]
    assert why[0].endswith("1.00 GiB") and why[1].endswith("2.00 GiB")


def test_gates_of_the_plan(folder):
    def gates(**keys: Any) -> Any:
        found = planned(folder, sft() | {"gates": keys})[0]["gates"]
        return {(gate["kind"], gate["name"]): (gate["limit"], gate["n"]) for gate in found}

    few = {"improve": {"sft": "chats.loss"}, "protect": {"forgetting": 0.3}}
    assert gates(**few).keys() == {("improve", "chats.loss"), ("protect", "forgetting")}
    assert gates(**few)["protect", "forgetting"][0] == 0.3
    assert gates(improve={}, protect={}) == {}
    more = gates()
    assert ("protect", "over_refusal") in more and ("protect", "sycophancy") in more
    assert gates(**few, items=3)["improve", "chats.loss"][1] == 3


# -- seen in a run ------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: Any, saved_base: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    shutil.copytree(saved_base, folder / "base")
    return folder


def trained(folder: Path, name: str, recipe: dict[str, Any]) -> Path:
    """The stage folder of a run of a one-stage recipe."""
    _, out, _ = go(write_recipe(folder, recipe), f"output=out-{name}", fresh=True)
    return next(iter(sorted(out.glob("0*"))))


@pytest.fixture(scope="module")
def usual(run_dir: Path) -> Path:
    return trained(run_dir, "usual", sft())


@pytest.fixture(scope="module")
def usual_in_fp32(run_dir: Path) -> Path:
    return trained(run_dir, "usual-fp32", sft(precision="fp32"))


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": {"betas": [0.5, 0.6]}},
        {"optimizer": {"eps": 1e-2}},
        {"optimizer": {"weight_decay": 0.9}},
        {"clip": 1e-4, "optimizer": {"eps": 1e-4}},
        {"learning_rate": 3e-3},
    ],
    ids=["betas", "eps", "weight_decay", "clip", "learning_rate"],
)
def test_what_changes_the_updates_changes_the_losses(run_dir, usual, keys):
    changed = losses(trained(run_dir, "changed", sft(**keys)))
    assert changed[0] == losses(usual)[0], "the first loss is before any update"
    assert changed[1:] != losses(usual)[1:]


def test_the_seed_changes_the_order_of_rows(run_dir, usual):
    other = metrics(trained(run_dir, "changed", sft() | {"seed": 9}))
    assert [row["loss"] for row in other] != losses(usual)


def test_replay_shows_by_source(run_dir):
    rows = metrics(trained(run_dir, "changed", sft(keep={"replay": {"text": 0.5}})))
    tokens = sum(row["tokens"] for row in rows)
    usual_tokens = sum(row["supervised_tokens"] for row in rows)
    assert tokens and usual_tokens / tokens > 0.4, "text trains every token, chats a fifth"


def test_adapter_keys_stand_in_the_adapters_config(run_dir):
    adapter = {"rank": 2, "alpha": 3, "dropout": 0.25, "targets": ["q_proj", "v_proj"]}
    place = trained(run_dir, "changed", sft() | {"adapter": {"kind": "lora", **adapter}})
    config = read(place / "adapter" / "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 3, 0.25)
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]


def test_qlora_lays_the_base_out_in_four_bits(work):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: lehr[quant]")
    plain, _ = planned(work, sft())
    four, _ = planned(work, sft() | {"adapter": {"kind": "qlora"}})
    assert four["model"]["four_bits"] == "nf4" and "four_bits" not in plain["model"]
    assert four["model"]["weight_bytes"] < plain["stages"][0]["memory"]["weights"]


def test_kind_none_trains_all_weights(run_dir):
    recipe = sft() | {"adapter": {"kind": "none"}, "export": "merged"}
    place = trained(run_dir, "changed", recipe)
    assert (place / "weights" / "model.safetensors").is_file()
    assert not (place / "adapter").exists()


def test_evaluations_checkpoints_best_and_early_stop(run_dir):
    keys = {"evaluate_every": 1, "checkpoint_every": 2, "checkpoints_kept": 3, "max_updates": 7}
    place = trained(run_dir, "changed", sft(**keys))
    rows = metrics(place)
    assert all("evaluation.loss" in row for row in rows)
    names = sorted(path.name for path in (place / "checkpoints").glob("update-*"))
    assert names == ["update-000004", "update-000006", "update-000007"]
    harm = {"learning_rate": 5.0, "clip": None, "evaluate_every": 1, "max_updates": 9}
    recipe = sft(**harm, promote="best", early_stop=2) | {"adapter": {"kind": "none"}}
    place = trained(run_dir, "changed", recipe | {"export": "merged"})
    rows = metrics(place)
    assert len(rows) < 9, "stopped early"
    best = min(range(len(rows)), key=lambda n: rows[n]["evaluation.loss"])
    events = [json.loads(line) for line in (place.parent / "events.jsonl").read_text().splitlines()]
    assert [e["update"] for e in events if e["kind"] == "best"] == [rows[best]["update"]]


def test_beta_and_label_smoothing(run_dir):
    def told(**keys: Any) -> list[dict[str, Any]]:
        recipe = sft()
        recipe["stages"] = [
            {"preference": stage("pairs", learning_rate=5e-3, max_updates=3) | keys}
        ]
        return metrics(trained(run_dir, "changed", recipe))

    plain, sharper, smoothed = told(), told(beta=0.4), told(label_smoothing=0.3)
    assert {"objective.margin", "objective.chosen_reward"} <= set(plain[0])
    for other in (sharper, smoothed):
        assert other[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert [row["loss"] for row in other[1:]] != [row["loss"] for row in plain[1:]]


def test_fold_parent_makes_a_new_base_and_is_reused(run_dir):
    recipe = sft()
    second = stage("chats", name="more", max_updates=2, fold_parent=True, adapter={"rank": 2})
    recipe["stages"].append({"sft": second})
    path = write_recipe(run_dir, recipe)
    ledger, out, _ = go(path, "output=out-fold", "export=merged")
    assert (out / "02-more" / "folded" / "weights" / "model.safetensors").is_file()
    assert read(out / "02-more" / "adapter" / "adapter_config.json")["r"] == 2
    again, _, heard = go(path, "output=out-fold", "export=merged")
    assert heard.updates() == 0
    assert [one["produced"] for one in again.stages] == [one["produced"] for one in ledger.stages]


def test_suites_show_and_export(run_dir, monkeypatch):
    monkeypatch.setattr(showcase, "answers", ANSWERS)
    monkeypatch.setattr(run_module, "export_promoted", EXPORT)
    recipe = sft() | {
        "suites": ["forgetting", "over_refusal"],
        "show": ["Which colour has lamp 2?", "And boat 1?"],
        "export": ["merged"],
    }
    place = trained(run_dir, "changed", recipe)
    evaluation = read(place / "evaluation.json")
    assert {"forgetting", "over_refusal"} <= set(evaluation["suites"])
    assert [p["prompt"] for p in evaluation["prompts"]] == recipe["show"]
    assert [path.name for path in (place.parent / "exports").iterdir()] == ["merged"]


# -- exact options: a witness, and the same losses ----------------------------


@pytest.mark.parametrize(
    "keys",
    [{"micro_batch": 1}, {"micro_batch": 6}, {"packing": False}, {"pack_length": 256},
     {"recompute": "full"}, {"recompute": "selective"}, {"recompute": {"budget": 0.3}}],
    ids=["micro_batch-1", "micro_batch-6", "packing", "pack_length", "full", "selective",
         "budget"],
)  # fmt: skip
def test_exact_options_change_no_loss(run_dir, usual_in_fp32, keys):
    recipe = copy.deepcopy(sft(precision="fp32", **keys))
    place = trained(run_dir, "exact", recipe)
    assert losses(place) == pytest.approx(losses(usual_in_fp32), abs=1e-5)
    plans = [read(one.parent / "plan.json")["stages"][0] for one in (place, usual_in_fp32)]
    audits = [read(one / "audit.json") for one in (place, usual_in_fp32)]
    witness = [
        (plan["micro_batch"], plan["recompute"], plan["memory"]["peak"], audit["packs"])
        for plan, audit in zip(plans, audits, strict=True)
    ]
    assert witness[0] != witness[1]
