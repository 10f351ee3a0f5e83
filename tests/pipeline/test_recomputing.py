"""Recomputation from the recipe to the run: settled once, reported, refused, resumed."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from tests.pipeline.small import go, lora_recipe, metrics, read, stage, weights, write_recipe
from tests.pipeline.test_interrupted import interrupted

from lehr.diagnosis.planner import LASTING
from lehr.errors import OutOfResources, RecipeError
from lehr.models.loading import load_model
from lehr.models.recompute_costs import Cost
from lehr.pipeline import four_bits, planning
from lehr.pipeline.plan import plan
from lehr.pipeline.recomputing import Settled, as_it_will_train, grouped, ungrouped
from lehr.recipe.loading import load_recipe

pytestmark = pytest.mark.usefixtures("lean")


def recipe_with(recompute, **changes):
    recipe = lora_recipe(gates="none", export="adapter")
    keys = stage("chats", learning_rate=1e-2, max_updates=4, recompute=recompute)
    recipe["stages"] = [{"sft": keys | changes.pop("stage", {})}]
    return recipe | changes


def planned(work, recompute, **changes):
    path = write_recipe(work, recipe_with(recompute, **changes))
    return plan(load_recipe(path), out=work / "planned").plan["stages"][0]


def test_the_plan_reports_every_choice(work):
    entry = planned(work, {"budget": 0.5})
    report = {line["choice"]: line for line in entry["recompute_report"]}
    assert list(report) == ["none", "selective", "full", "budget 0.5"]
    shares = {name: line["share_kept"] for name, line in report.items()}
    assert shares["none"] == 1 and shares["full"] < 0.2
    assert shares["full"] < shares["budget 0.5"] <= 0.5 * 1.05
    added = {name: line["share_added"] for name, line in report.items()}
    assert added["none"] == 0 <= added["selective"] < added["budget 0.5"] < added["full"] < 0.5
    assert entry["recompute_operations"]["uncovered"] == []
    assert "mlp.up_proj" in entry["recompute_operations"]["products"]
    assert "LlamaRMSNorm" in entry["recompute_operations"]["between"]
    assert entry["memory"]["activations"] == report["budget 0.5"]["peak_bytes"]


def test_auto_takes_the_cheapest_that_fits(work, monkeypatch):
    """Less and less room: none, selective, a budget between, full."""
    keys = {"stage": {"micro_batch": 6, "max_length": 64}}
    free = planned(work, "auto", **keys)
    assert free["recompute"] == "none" and "fits" in free["recompute_why"]
    costs = {name: Cost(**cost) for name, cost in free["recompute_costs"].items()}
    peaks = {line["choice"]: line["peak_bytes"] for line in free["recompute_report"]}
    assert peaks["full"] < peaks["selective"] < peaks["none"]

    def within(room):
        monkeypatch.setattr(planning, "room_for_activations", lambda *_: int(room))
        return planned(work, "auto", memory_limit=15 + room / 2**30, **keys)

    found = [within(peaks["none"] - 4096), within((peaks["selective"] + peaks["full"]) / 2)]
    found.append(within(peaks["full"] + 2))
    assert [found[0]["recompute"], found[2]["recompute"]] == ["selective", "full"]
    assert costs["full"].kept_bytes / costs["none"].kept_bytes < found[1]["recompute"]["budget"] < 1
    for entry in found:
        assert entry["memory"]["activations"] <= peaks["none"]


def test_tighter_limits_are_kept_by_micro_batches_and_recomputation(work, monkeypatch):
    """The update stays what it is; a limit that nothing meets is refused with one that would."""
    monkeypatch.setattr(planning, "DECODED", 1)
    monkeypatch.setattr(four_bits, "decoding_bytes", lambda *_: 0)
    free = planned(work, "auto")
    held = {}
    for share in (0.8, 0.35, 0.27):
        least = sum(free["memory"][one] for one in LASTING)
        limit = least + share * (free["memory"]["peak"] - least)
        held[share] = planned(work, "auto", memory_limit=limit / 2**30)
        assert held[share]["memory"]["peak"] <= limit
        assert held[share]["tokens_per_update"] == free["tokens_per_update"]
    assert [one["micro_batch"] for one in held.values()] == [2, 1, 1] != [free["micro_batch"]]
    assert [one["recompute"] for one in held.values()][::2] == ["none", "full"]
    assert 0 < held[0.35]["recompute"]["budget"] < 1
    with pytest.raises(OutOfResources) as refused:
        planned(work, "auto", memory_limit=0.0001)
    (would_do,) = re.findall(r"memory_limit that would do is (\d+\.\d+)", str(refused.value))
    fits = planned(work, "auto", memory_limit=float(would_do))
    assert fits["memory"]["peak"] <= float(would_do) * 2**30


def test_settled_once_and_read_back(work, monkeypatch):
    first = planned(work, {"budget": 0.4})

    def never(*_, **__):
        raise AssertionError("measured twice")

    monkeypatch.setattr(planning, "settle_recompute", never)
    assert planned(work, {"budget": 0.4}) == first
    read_back = Settled.from_json(json.loads(json.dumps(first)))
    assert read_back is not None and read_back.as_json() == {
        key: first[key] for key in read_back.as_json()
    }
    assert Settled.from_json({"recompute": "full"}) is None  # of a version before this


def test_groups_of_blocks():
    keeps = [["b", "a"], None, [], ["a", "b"]]
    assert ungrouped(grouped(keeps)) == [["a", "b"], None, [], ["a", "b"]]


def test_a_budget_that_cannot_be_kept_is_refused_before_training(work):
    path = write_recipe(work, recipe_with({"budget": 0.01}))
    with pytest.raises(
        RecipeError, match=r"stages\.0\.recompute\.budget: expected at least 0\.\d+"
    ):
        go(path)
    assert not list((work / "out").glob("01-sft/metrics.jsonl"))


@pytest.mark.parametrize("everything", [False, True])
def test_measuring_leaves_the_model_as_it_was(work, everything):
    model = load_model(str(work / "base"), precision="bf16")
    model.eval()
    adapter = None if everything else load_recipe(write_recipe(work, lora_recipe())).adapter
    names = {name: type(module) for name, module in model.network.named_modules()}
    before = {name: t.clone() for name, t in model.network.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.network.named_parameters()}
    random, notices = torch.get_rng_state(), list(model.notices)
    with as_it_will_train(model, adapter):
        assert model.trained() and model.training
        torch.rand(3)
    assert {name: type(module) for name, module in model.network.named_modules()} == names
    after = model.network.state_dict()
    assert after.keys() == before.keys()
    assert all(t.dtype == before[n].dtype and torch.equal(t, before[n]) for n, t in after.items())
    assert {name: p.requires_grad for name, p in model.network.named_parameters()} == flags
    assert torch.equal(torch.get_rng_state(), random) and model.notices == notices
    assert not model.training and not model.trains_all and model.adapter is None


@pytest.mark.parametrize("recompute", ["selective", {"budget": 0.4}])
def test_stopped_and_resumed_to_the_same_bits(work, recompute):
    """With dropout: what is computed again draws the masks of its own update."""
    recipe = recipe_with(recompute)
    recipe["adapter"]["dropout"] = 0.2
    path = write_recipe(work, recipe | {"output": "whole"})
    _, whole, _ = go(path)
    path = write_recipe(work, recipe)
    interrupted(path, 2)
    ledger, out, heard = go(path)
    assert [event.data["update"] for event in heard.of("resumed")] == [2]
    assert metrics(out / "01-sft") == metrics(whole / "01-sft") and ledger.stages
    assert weights(out) == weights(whole)


def test_dropout_has_the_losses_that_it_has_without(work):
    found = []
    for recompute in ("none", "full"):
        recipe = recipe_with(recompute, output=f"out-{recompute}")
        recipe["adapter"]["dropout"] = 0.3
        recipe["stages"][0]["sft"]["precision"] = "fp32"
        _, out, _ = go(write_recipe(work, recipe))
        rows = metrics(out / "01-sft")
        assert read(out / "plan.json")["stages"][0]["recompute"] == recompute
        found.append([row["loss"] for row in rows])
    assert found[0] == found[1] and all(math.isfinite(loss) for loss in found[0])
