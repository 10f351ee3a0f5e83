"""`--verify` finds what is no longer what the ledger says; a good run passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import (
    go,
    lora_recipe,
    read,
    stage,
    weights,
    weights_recipe,
    write_recipe,
)

from lehr.errors import RecipeError
from lehr.pipeline.verifying import verify
from lehr.recipe.loading import load_recipe


def verified(path: Path, *overrides: str) -> dict[str, Any]:
    return verify(load_recipe(path, overrides), path.parent / "out")


def failed(found: dict[str, Any]) -> set[str]:
    return {check["name"] for check in found["checks"] if not check["ok"]}


def test_a_good_run(finished):
    before = weights(finished.parent / "out")
    found = verified(finished)
    assert found["ok"] and failed(found) == set()
    said = {check["name"]: check["found"] for check in found["checks"]}
    assert said["resume of 01-sft"].startswith("bit for bit the same from update-")
    assert said["resume of 02-preference"].startswith("bit for bit the same from update-")
    assert said["exports"] == "adapter, merged: files and parity agree"
    assert weights(finished.parent / "out") == before, "nothing was changed"


def flip(path: Path) -> None:
    """Change one byte in the middle; size and header stay. Links are cut first."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 8] ^= 0x10
    path.unlink()
    path.write_bytes(bytes(content))


def edit_config(out: Path) -> None:
    path = out / "model" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 1}))


TAMPERED: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "weights in model/": (lambda out: flip(out / "model" / "adapter_model.safetensors"), {"model"}),
    "a small file in model/": (edit_config, {"model"}),
    "an export": (
        lambda out: flip(out / "exports" / "merged" / "model.safetensors"),
        {"exports"},
    ),
    "an export's tokenizer": (
        lambda out: (out / "exports" / "merged" / "tokenizer.json").write_text("{}"),
        {"exports"},
    ),
    "the newest checkpoint": (
        lambda out: flip(max((out / "01-sft" / "checkpoints").iterdir()) / "weights.safetensors"),
        {"checkpoints"},
    ),
    "a stage's result": (
        lambda out: flip(out / "01-sft" / "adapter" / "adapter_model.safetensors"),
        # The second stage began from it: neither can be repeated from a file that changed.
        {"files of the stages", "resume of 01-sft", "resume of 02-preference"},
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_tampered_with_is_found(finished, what):
    spoil, wanted = TAMPERED[what]
    spoil(finished.parent / "out")
    found = verified(finished)
    assert not found["ok"] and failed(found) == wanted


def test_an_older_checkpoint_is_not_passed_over_in_silence(finished):
    """The replay would begin at an earlier one, reach the same bits, and look like proof."""
    checkpoints = sorted((finished.parent / "out" / "01-sft" / "checkpoints").iterdir())
    flip(checkpoints[-2] / "optimizer.safetensors")
    assert "checkpoints" in failed(verified(finished))


def test_data_that_changed(finished):
    with (finished.parent / "pairs.jsonl").open("a") as stream:
        stream.write("\n")
    assert failed(verified(finished)) == {"recipe", "data", "resume and exports"}


def test_a_recipe_that_changed(finished):
    found = verified(finished, "stages.0.sft.learning_rate=1e-3")
    assert failed(found) == {"recipe", "resume and exports"}


def test_no_finished_run(work):
    with pytest.raises(RecipeError, match="a finished run; run the recipe first"):
        verified(write_recipe(work, lora_recipe()))


def test_a_run_that_promoted_nothing_is_fine_as_it_is(work):
    recipe = weights_recipe(export="merged")
    recipe["stages"] = [{"pretrain": stage("text", learning_rate=0, max_updates=2)}]
    path = write_recipe(work, recipe)
    ledger, _, _ = go(path)
    assert ledger.verdict != "promoted"
    found = verified(path)
    assert found["ok"]
    assert read(work / "out" / "ledger.json")["verdict"] == ledger.verdict


def test_the_best_weights_can_be_replayed(work):
    """The best checkpoint may be older than the one that the replay begins from."""
    recipe = weights_recipe(gates="none", export="merged")
    harm = {"learning_rate": 3.0, "clip": None, "schedule": {"kind": "constant", "warmup": 0}}
    keys = harm | {"promote": "best", "evaluate_every": 1}
    recipe["stages"] = [{"pretrain": stage("text", **keys)}]
    path = write_recipe(work, recipe)
    _, _, heard = go(path)
    assert heard.of("best")[0].data["update"] < 4
    assert verified(path)["ok"]
