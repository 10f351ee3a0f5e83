"""Every precision in a whole run, and every key of it seen outside the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.pipeline.small import (
    go,
    lora_recipe,
    losses,
    metrics,
    read,
    stage,
    weights_recipe,
    write_recipe,
)

from lehr.errors import Diverged, RecipeError
from lehr.pipeline.plan import plan
from lehr.recipe.loading import load_recipe

pytestmark = pytest.mark.usefixtures("lean")
SMALL = {"smallest_features": 16}  # the model's layers are 32 wide
FP8 = {"precision": "fp8", "fp8": SMALL | {"keep_first_blocks": 0, "keep_last_blocks": 0}}


def sft(**keys: Any) -> dict[str, Any]:
    recipe = lora_recipe(gates="none", export="adapter")
    recipe["stages"] = [{"sft": stage("chats", learning_rate=1e-2, max_updates=3) | keys}]
    return recipe


def trained(folder: Path, **keys: Any) -> Path:
    """The stage folder of a run; another one for each set of keys."""
    name = f"out{abs(hash(json.dumps(keys, sort_keys=True)))}"
    _, out, _ = go(write_recipe(folder, sft(**keys)), f"output={name}")
    return next(iter(sorted(out.glob("0*"))))


def with_fp8(**keys: Any) -> dict[str, Any]:
    return {"precision": "fp8", "fp8": FP8["fp8"] | keys}


def column(folder: Path, name: str) -> list[Any]:
    return [row.get(name) for row in metrics(folder)]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "pure_bf16"])
def test_each_precision_trains_all_weights_of_a_tiny_model(work, precision):
    recipe = weights_recipe(gates="none", export="merged")
    recipe["stages"] = [{"pretrain": stage("text", learning_rate=5e-3, precision=precision)}]
    if precision == "fp8":
        recipe["stages"][0]["pretrain"]["fp8"] = FP8["fp8"]
    ledger, out, heard = go(write_recipe(work, recipe))
    assert read(out / "plan.json")["precision"]["value"] == precision
    rows = metrics(out / "01-pretrain")
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    weights = load_file(out / "01-pretrain" / "weights" / "model.safetensors")
    narrow = precision == "pure_bf16"
    wanted = torch.bfloat16 if narrow else torch.float32
    assert {value.dtype for value in weights.values()} == {wanted}
    assert ledger.data["verdict"] == "promoted"
    said = heard.of("fp8")
    assert len(said) == (precision == "fp8")
    if said:
        assert "FP8 (emulated) in 14 of 15 linear layers" in said[0].text
        assert len(said[0].data["layers"]) == 15
        assert read(out / "plan.json")["stages"][0]["fp8"] == said[0].data["layers"]


def test_keys_of_the_loss_scale(work):
    fp16 = {"precision": "fp16"}
    assert column(trained(work, **fp16), "loss_scale") == [65536.0] * 3
    grown = trained(work, **fp16, loss_scale={"init": 256, "growth_interval": 1})
    assert column(grown, "loss_scale") == [256, 512, 1024]
    held = trained(work, **fp16, loss_scale={"init": 256, "growth_interval": 1, "ceiling": 512})
    assert column(held, "loss_scale") == [256, 512, 512]
    assert column(trained(work, **fp16, loss_scale=32), "loss_scale") == [32] * 3
    high = {"init": 2**40}  # what is asked for is no higher than its own ceiling
    lowered = metrics(trained(work, **fp16, loss_scale=high))
    assert lowered[0]["skipped"] and lowered[-1]["update"] == 3
    with pytest.raises(Diverged, match="smallest loss scale"):
        trained(work, **fp16, loss_scale=high | {"floor": 2**40})


def test_keys_of_fp8_that_choose_layers_show_in_the_plan(work):
    def converted(**keys: Any) -> list[str]:
        recipe = load_recipe(write_recipe(work, sft(**with_fp8(**keys))))
        lines = plan(recipe, out=work / "planned").plan["stages"][0]["fp8"]
        return [line.split(" ")[0] for line in lines if line.endswith("fp8")]

    every = converted()
    assert len(every) == 14
    assert all("layers.1." in name for name in converted(keep_first_blocks=1))
    assert all("layers.0." in name for name in converted(keep_last_blocks=1))
    assert converted(convert="q_proj") == [name for name in every if name.endswith("q_proj")]
    assert converted(keep=["*mlp*"]) == [name for name in every if "self_attn" in name]
    # k and v have 16 outputs: one head of the two that share them.
    assert len(converted(smallest_features=32)) == 10


def test_keys_of_fp8_that_change_numbers(work):
    current = losses(trained(work, **with_fp8()))
    delayed = losses(trained(work, **with_fp8(scaling="delayed")))
    assert delayed != current != losses(trained(work, **with_fp8(scaling="block")))
    assert losses(trained(work, **with_fp8(scaling="delayed", margin=8))) != delayed
    # Of two updates remembered or one: seen where the largest amax has left the window.
    short = losses(trained(work, **with_fp8(scaling="delayed", window=1)))
    assert short[:2] == delayed[:2] and short != delayed
    often = trained(work, **with_fp8(measure_every=1))
    assert None not in column(often, "fp8.worst_sqnr_db")
    seldom = trained(work, **with_fp8())
    assert column(seldom, "fp8.worst_sqnr_db")[1:] == [None, None]
    events = (trained(work, **with_fp8(backend="scaled_mm")).parent / "events.jsonl").read_text()
    assert "FP8 (scaled_mm)" in events


def test_stochastic_rounding_changes_the_weights_by_less_than_a_step(work):
    pure = {"precision": "pure_bf16", "learning_rate": 1e-4}
    chance = trained(work, **pure)
    nearest = trained(work, **pure, stochastic_rounding=False)
    assert losses(chance)[0] == losses(nearest)[0]
    assert losses(chance)[1:] != losses(nearest)[1:]
    lost = [column(one, "bf16.lost_updates")[0] for one in (chance, nearest)]
    assert lost == [0.0, 0.0], "only B moves first, and from 0 no update is too small"
    adapters = [load_file(one / "adapter" / "adapter_model.safetensors") for one in (chance,)]
    assert {value.dtype for value in adapters[0].values()} == {torch.bfloat16}


REFUSED = {
    "loss_scale: none": ({"precision": "fp16", "loss_scale": "none"}, "gradients below 2^-24"),
    "scale without fp16": ({"precision": "bf16", "loss_scale": 64}, "precision: fp16 with it"),
    "no power of two": ({"precision": "fp16", "loss_scale": 1000}, "a power of two"),
    "order": (
        {"precision": "fp16", "loss_scale": {"init": 2, "floor": 4}},
        "floor <= init <= ceiling",
    ),
    "fp8 keys": ({"precision": "bf16", "fp8": {"margin": 1}}, "precision: fp8 with it"),
    "fp8: true": ({"fp8": True}, "precision: fp8 to switch it on"),
    "rounding": ({"precision": "bf16", "stochastic_rounding": True}, "precision: pure_bf16"),
    "average": ({"precision": "pure_bf16", "ema": 0.9}, "none with pure_bf16"),
    "too small": ({"precision": "fp8"}, "at least one layer in FP8"),
    "no such layer": (with_fp8(convert="qproj"), "a pattern that matches a linear layer: q_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_before_training_with_the_remedy(work, case):
    keys, expected = REFUSED[case]
    with pytest.raises(RecipeError) as caught:
        trained(work, **keys)
    assert any(expected in str(problem) for problem in caught.value.problems)
    assert not list(work.glob("out*/0*/metrics.jsonl"))


def test_fp8_is_refused_in_a_preference_stage(work):
    recipe = sft()
    recipe["stages"] = [{"preference": stage("pairs", **FP8)}]
    with pytest.raises(RecipeError, match="compares with its reference"):
        go(write_recipe(work, recipe))


def test_shapes_follow_the_device(work, monkeypatch):
    """A layer 40 wide is no matter for a CPU; the products of a GPU refuse it by name."""
    from lehr.pipeline import precision as module

    class Gpu:
        type = "cuda"

    recipe = load_recipe(write_recipe(work, sft(**with_fp8(convert=["up", "down"]))))
    model = Narrow()
    assert module.require_precision(recipe, model, "fp8")[0][0].converted
    monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))
    model.device = Gpu()
    with pytest.raises(RecipeError, match=r"multiples of 16 on cuda.*up \[40 x 32\]"):
        module.require_precision(recipe, model, "fp8")
    monkeypatch.setattr(module, "capability_of", lambda device: (8, 0))
    with pytest.raises(RecipeError, match=r"SM 8\.9 or later"):
        module.require_precision(recipe, model, "fp8")


class Narrow:
    """As much of a LanguageModel as the refusal looks at."""

    def __init__(self) -> None:
        self.device: Any = torch.device("cpu")
        self.network = torch.nn.ModuleDict(
            {"up": torch.nn.Linear(32, 40), "down": torch.nn.Linear(40, 32)}
        )
        self.network.get_output_embeddings = lambda: None  # type: ignore[assignment]
