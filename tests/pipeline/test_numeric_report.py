"""`lehr plan --numerics`: the shares by hand, the true gradient, and a model left as it was."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.small import Heard, lora_recipe, stage, weights_recipe, write_recipe

from lehr.objectives.language import Language
from lehr.pipeline.events import Events
from lehr.pipeline.numeric_report import numeric_report, report_of
from lehr.pipeline.plan import plan
from lehr.pipeline.planning import prepare
from lehr.recipe.loading import load_recipe

pytestmark = pytest.mark.usefixtures("lean")


def prepared_for(folder: Path, recipe: dict[str, Any]) -> Any:
    return prepare(load_recipe(write_recipe(folder, recipe)), folder / "p", Events(None, [Heard()]))


def bits(model: Any) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.network.state_dict().items()):
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_shares_by_hand() -> None:
    small = torch.tensor([2.0**-26, 2.0**-26, 2.0**-20, 0.0])
    large = torch.tensor([2.0**-30])
    report = report_of("s", 1.0, {"small": small, "large": large})
    assert report.lost_fp16 == 3 / 4, "of the four that are not 0, one survives fp16"
    assert report.suggested_loss_scale == 2.0**33, "2^-20 comes to 2^13"
    assert report.lost_fp16_scaled == report.lost_bf16 == 0
    assert [one.name for one in report.worst_first()] == ["large", "small"]
    assert report.as_json()["tensors"][0]["zeros"] == 1


@pytest.mark.parametrize("kind", ["weights", "adapter", "preference"])
def test_gradients_of_the_first_update_and_nothing_moved(work, kind):
    recipe = weights_recipe(gates="none") if kind == "weights" else lora_recipe(gates="none")
    if kind == "preference":
        recipe["stages"] = [{"preference": stage("pairs")}]
    prepared = prepared_for(work, recipe)
    model = prepared.bench.model
    before, random = bits(model), torch.get_rng_state()
    report = numeric_report(prepared)
    assert bits(model) == before and torch.equal(torch.get_rng_state(), random)
    assert not any(value.requires_grad for value in model.network.parameters())
    lines = {one.name: one for one in report.ranges}
    assert all(one.nonfinite == 0 for one in report.ranges)
    if kind == "preference":
        assert report.loss == pytest.approx(0.6931, abs=1e-4), "ln 2: its own reference"
    if kind == "weights":
        largest = _by_plain_autograd(prepared)
        assert {name: one.largest for name, one in lines.items()} == pytest.approx(largest)
    else:
        assert all(line.values == 0 for name, line in lines.items() if ".lora_A." in name), (
            "B is 0 at the start, so A has no gradient"
        )
        assert all(line.values > 0 for name, line in lines.items() if ".lora_B." in name)


def _by_plain_autograd(prepared: Any) -> dict[str, float]:
    model = prepared.bench.in_fp32(prepared.bench.base)
    model.train_all()
    packs = prepared.stages[0].first_packs(prepared.recipe.seed)
    total = sum(Language().weight(one) for one in packs)
    (sum(Language().loss(model, one).total for one in packs) / total).backward()
    return {name: float(value.grad.abs().max()) for name, value in model.trained().items()}


def test_the_plan_holds_it_where_it_is_asked_for(work):
    recipe = load_recipe(write_recipe(work, weights_recipe(gates="none")))
    assert "numerics" not in plan(recipe).as_json()
    found = plan(recipe, numerics=True).as_json()["numerics"]
    assert found["stage"] == "01-pretrain" and found["suggested_loss_scale"] >= 1
    assert {"name", "smallest", "largest", "fp16_underflow", "bf16_underflow"} <= set(
        found["tensors"][0]
    )
