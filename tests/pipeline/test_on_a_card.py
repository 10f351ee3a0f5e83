"""A whole run with `device: cuda`, on a pretended card (tests/card.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.small import go, lora_recipe, measured_once, metrics, read, write_recipe

from card import NAME, pretended_card
from lehr.diagnosis.machine import Machine
from lehr.errors import OutOfResources, RecipeError
from lehr.pipeline import planning
from lehr.pipeline.plan import plan
from lehr.pipeline.verifying import verify
from lehr.recipe.loading import load_recipe, recipe_hash
from lehr.training.resources import memory_errors

pytestmark = pytest.mark.usefixtures("lean", "described")


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine by the device that is asked for; its speed was measured before."""
    measured = measured_once()

    def known(measure: bool = False, device: torch.device | None = None) -> Machine:
        found = replace(measured, threads=torch.get_num_threads(), device=str(device))
        if device is not None and device.type == "cuda":
            found = replace(found, accelerator=NAME, accelerator_gib=64.0)
        return found

    monkeypatch.setattr(planning, "describe_machine", known)


def short(**changes: Any) -> dict[str, Any]:
    recipe = lora_recipe(gates="none", export="adapter", **changes)
    recipe["adapter"]["dropout"] = 0.2
    recipe["stages"][1]["preference"]["adapter"] = {"dropout": 0.0}
    for entry in recipe["stages"]:
        next(iter(entry.values())).update(max_updates=2, checkpoint_every=1, precision="fp32")
    return recipe


def test_a_run_on_a_card_has_the_cpus_numbers_and_says_where_it_was(work: Path) -> None:
    path = write_recipe(work, short())
    _, plain, _ = go(path, "device=cpu")
    with pretended_card():
        ledger, out, heard = go(path, "device=cuda", "output=card")
        again = verify(load_recipe(path, ["device=cuda", "output=card"]), out)
    pairs = zip(metrics(out / "01-sft"), metrics(plain / "01-sft"), strict=True)
    # Adam's first step is the sign of a gradient, also of one that is only rounding.
    for (one, other), close in zip(pairs, (1e-5, 5e-2), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=close / 10)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=close)
    first, _ = metrics(out / "02-preference")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    for name in ("plan.json", "ledger.json"):
        assert read(out / name)["machine"]["device"] == "cuda:0"
        assert read(out / name)["machine"]["accelerator"] == NAME
    assert f"cuda:0: {NAME}, 64 GiB" in heard.of("machine")[0].text
    assert "peak_accelerator_gib" in ledger.data
    assert not heard.of("order_unknown") and not heard.of("resume_inexact")
    resumes = [one for one in again["checks"] if "bit for bit" in str(one["found"])]
    assert len(resumes) == 2 and all(one["ok"] for one in resumes)


def test_the_memory_that_counts_is_the_cards(work: Path) -> None:
    """What the plan allows follows the card, not the machine around it."""
    recipe = load_recipe(write_recipe(work, short(device="cuda")))
    with pretended_card(memory_gib=2):
        found = plan(recipe, out=work / "planned").plan["stages"][0]
        assert found["micro_batch_why"].endswith("of 1.60 GiB")
    with pretended_card(memory_gib=1e-4), pytest.raises(OutOfResources, match="one pack"):
        plan(recipe, out=work / "small")


def test_auto_is_the_card_where_there_is_one(work: Path) -> None:
    recipe = load_recipe(write_recipe(work, short()))
    found = plan(recipe, out=work / "without").plan["machine"]
    assert found["device"] == "cpu" and "accelerator_gib" not in found
    with pretended_card():
        assert plan(recipe, out=work / "with").plan["machine"]["device"] == "cuda:0"
        assert (
            plan(load_recipe(work / "recipe.yaml", ["device=cpu"]), out=work / "asked").plan[
                "machine"
            ]["device"]
            == "cpu"
        )


def test_a_card_that_is_not_there_is_refused_before_anything(work: Path) -> None:
    path = write_recipe(work, short(device="cuda"))
    with pytest.raises(RecipeError, match="device: expected auto or cpu: torch finds no CUDA"):
        go(path)
    assert not (work / "out").exists()


@pytest.mark.parametrize("asked", ["mps", "gpu", "cuda:x", "cuda:", "cuda:-1"])
def test_other_words_are_refused_with_the_ones_that_are_known(work: Path, asked: str) -> None:
    with pytest.raises(RecipeError, match="auto, cpu, cuda"):
        load_recipe(write_recipe(work, short(device=asked)))


def test_a_recipe_without_the_key_has_the_hash_that_it_had(work: Path) -> None:
    plain = recipe_hash(load_recipe(write_recipe(work, short())))
    assert recipe_hash(load_recipe(write_recipe(work, short(device="auto")))) == plain
    assert recipe_hash(load_recipe(write_recipe(work, short(device="cpu")))) != plain


def test_a_card_without_room_is_out_of_resources() -> None:
    with (
        pytest.raises(OutOfResources, match=r"memory of the card.*Tried to allocate"),
        memory_errors(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nmore")
