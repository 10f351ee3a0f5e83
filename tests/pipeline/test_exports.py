"""Exports are what was trained, by plain PEFT and transformers, or they are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.small import go, lora_recipe, read, stage, weights_recipe, write_recipe

from lehr.errors import RecipeError
from lehr.models.saving import stored_dtype
from lehr.pipeline import exporting, parity
from lehr.pipeline.reopening import export


@pytest.fixture(scope="module")
def folder(finished_once: Any) -> Path:
    return finished_once[0].parent / "out"


def logits(network: Any) -> torch.Tensor:
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        return network.eval()(input_ids=ids).logits


def test_adapter_and_merged_are_one_model_for_plain_tools(folder):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = AutoPeftModelForCausalLM.from_pretrained(folder / "exports" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(folder / "exports" / "merged")
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    assert (logits(adapter) - logits(merged)).abs().max() < 1e-4
    assert (logits(base) - logits(merged)).abs().max() > 1e-2
    talk = [{"role": "user", "content": "Which colour has door 3?"}]
    texts = {
        AutoTokenizer.from_pretrained(folder / place).apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True
        )
        for place in ("exports/adapter", "exports/merged", "model", "../base")
    }
    assert len(texts) == 1


def test_the_ledger_holds_the_parity(folder):
    exports = read(folder / "ledger.json")["exports"]
    assert [one["kind"] for one in exports] == ["adapter", "merged"]
    for one in exports:
        parity = one["parity"]
        assert parity["problem"] == "" and parity["gap"] <= 1e-4 and parity["positions"] > 50
        assert parity["same_ids"] and parity["same_text"]


def test_an_export_that_was_checked_is_not_made_again(finished):
    ledger, _, heard = go(finished)
    assert not heard.of("exported") and len(ledger.data["exports"]) == 2


def spoil(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of the written file is not the trained one."""
    read_plain = exporting.read_plain

    def spoilt(path: Path, asked: str, *how: Any) -> Any:
        network, tokenizer = read_plain(path, asked, *how)
        if asked == kind:
            name, weight = next(
                (name, p) for name, p in network.named_parameters() if "q_proj" in name
            )
            assert weight.dim() == 2, name
            with torch.no_grad():
                weight.mul_(1.5)
        return network, tokenizer

    monkeypatch.setattr(exporting, "read_plain", spoilt)


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_an_export_that_is_not_what_was_trained_is_refused(finished, kind, monkeypatch):
    spoil(kind, monkeypatch)
    _, gap = export(finished.parent / "out", [kind])
    assert gap == "", "it was checked before and its files did not change"
    shutil.rmtree(finished.parent / "out" / "exports")
    entries, gap = export(finished.parent / "out", [kind])
    assert gap.startswith(f"{kind}: log-probabilities differ by")
    assert entries[0]["parity"]["gap"] > 1e-4
    ledger, _, _ = go(finished)
    assert ledger.verdict == "refused"
    assert "An export is not what was trained" in ledger.sentence


def test_other_ids_are_a_gap(finished, monkeypatch):
    read_plain = exporting.read_plain

    def other_template(path: Path, kind: str, *how: Any) -> Any:
        network, tokenizer = read_plain(path, kind, *how)
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "model")
        return network, tokenizer

    monkeypatch.setattr(exporting, "read_plain", other_template)
    out = finished.parent / "out"
    (out / "exports" / "merged" / "lehr-export.json").unlink()
    _, gap = export(out, ["merged"])
    assert gap == "merged: its rendered prompts have other ids"


def test_what_cannot_be_exported_is_refused_at_once(finished):
    out = finished.parent / "out"
    with pytest.raises(RecipeError) as caught:
        export(out, ["gguf", "onnx"])
    said = str(caught.value)
    assert "GGUF export is not in this version" in said and "adapter, merged" in said
    with pytest.raises(RecipeError, match="the folder of a run"):
        export(finished.parent / "base", ["merged"])
    ledger = out / "ledger.json"
    ledger.write_text(json.dumps(read(ledger) | {"promoted_from": None}))
    with pytest.raises(RecipeError, match="promoted none"):
        export(out, ["merged"])


def test_an_adapter_of_a_stage_that_trained_everything(work):
    recipe = weights_recipe(export=["adapter"])
    with pytest.raises(RecipeError, match="merged: no stage trains an adapter"):
        go(write_recipe(work, recipe))


def test_a_bf16_base_exports_bf16_with_its_loss_measured(work):
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.bfloat16)
    network.save_pretrained(work / "base")
    recipe = lora_recipe(stages=[{"sft": stage("chats", learning_rate=2e-2)}], gates="none")
    for entry in recipe["stages"]:
        entry["sft"]["precision"] = "bf16"
    ledger, out, _ = go(write_recipe(work, recipe | {"export": ["merged", "adapter"]}))
    merged, adapter = ledger.data["exports"]
    assert merged["parity"]["cast"] and 0 <= merged["parity"]["kl"] < 1e-3
    assert not adapter["parity"]["cast"]
    config = read(out / "exports" / "merged" / "config.json")
    assert config["dtype"] == "bfloat16"


@pytest.fixture
def brain_floats(work: Path) -> Path:
    """A recipe over a base that is stored in bf16; its SFT is enough."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.bfloat16)
    base.save_pretrained(work / "base")
    recipe = lora_recipe(export=["merged"], gates="none")
    recipe["stages"] = recipe["stages"][:1]
    return write_recipe(work, recipe)


@pytest.mark.parametrize(("limit", "dtype"), [(1.0, torch.bfloat16), (0.0, torch.float32)])
def test_merged_has_the_dtype_of_the_base_unless_that_loses_too_much(
    brain_floats, monkeypatch, limit, dtype
):
    monkeypatch.setattr(parity, "CAST_KL_NATS", limit)
    monkeypatch.setattr(parity, "CLEAR_MARGIN_NATS", 1e9)
    ledger, folder, heard = go(brain_floats)
    assert ledger.verdict == "promoted"
    assert stored_dtype(folder / "exports" / "merged") == dtype
    entry = read(folder / "ledger.json")["exports"][0]
    assert entry["parity"]["cast"] == (dtype == torch.bfloat16) and entry["parity"]["kl"] < 1e-3
    assert (entry["cast_refused"] is None) == (dtype == torch.bfloat16)
    text = heard.of("exported")[0].text
    assert ("in fp32, because" in text) == (dtype == torch.float32)
    if dtype == torch.bfloat16:
        assert entry["parity"]["kl"] > 0 and "rounded to the base's dtype" in text
