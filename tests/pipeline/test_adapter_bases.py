"""A recipe whose model is an adapter: it is what both of its folders hold, and it can be left."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.pipeline.small import go, lora_recipe, stage, weights, write_recipe

from lehr.errors import RecipeError
from lehr.models.loading import load_model, resolve_spec
from lehr.pipeline.reopening import export, model_of
from lehr.recipe.loading import load_recipe, recipe_hash


def adapter_over(work: Path, base: str = "./base") -> Path:
    """A trained LoRA in `ad`, as peft names its base: by a relative path."""
    model = load_model("./base", folder=work)
    model.add_adapter(rank=2, alpha=4.0)
    with torch.no_grad():
        for name, tensor in model.state().items():
            if "lora_B" in name:
                tensor.copy_(torch.randn_like(tensor) * 0.05)
    model.save_adapter(work / "ad")
    config = work / "ad" / "adapter_config.json"
    content = json.loads(config.read_text()) | {"base_model_name_or_path": base}
    config.write_text(json.dumps(content))
    return work / "ad"


def over_adapter(**changes: object) -> dict:
    recipe = lora_recipe(model="./ad", gates={"protect": {}, "undetermined": "promote"}, **changes)
    recipe["stages"] = [{"sft": stage("chats", learning_rate=2e-2, max_updates=3)}]
    return recipe


def nudge(path: Path) -> None:
    """Other weights of the same shapes, size and times."""
    stat = path.stat()
    tensors = load_file(path)
    name = min(one for one in tensors if one.endswith("weight"))
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_base_under_an_adapter_is_part_of_its_fingerprint(work):
    adapter_over(work)
    path = write_recipe(work, over_adapter())
    before = resolve_spec("./ad", work).fingerprint, recipe_hash(load_recipe(path))
    nudge(work / "base" / "model.safetensors")
    assert resolve_spec("./ad", work).fingerprint != before[0]
    assert recipe_hash(load_recipe(path)) != before[1]


def test_a_changed_base_under_an_adapter_trains_again(work, lean):
    adapter_over(work)
    path = write_recipe(work, over_adapter())
    go(path)
    assert go(path)[2].updates() == 0
    nudge(work / "base" / "model.safetensors")
    assert go(path)[2].updates() == 3


@pytest.mark.parametrize("kind", ["itself", "another adapter", "tiny"])
def test_an_adapter_without_a_whole_base_is_refused(work, kind):
    adapter_over(work, {"itself": "./ad", "another adapter": "./ad2", "tiny": "tiny:100k"}[kind])
    shutil.copytree(work / "ad", work / "ad2")
    said = "names its base" if kind == "itself" else "whose base is a whole model"
    with pytest.raises(RecipeError, match=said):
        resolve_spec("./ad", work)
    recipe_hash(load_recipe(write_recipe(work, over_adapter())))  # ends


def test_an_adapter_over_an_adapter_is_exported_and_loads_anywhere(work, tmp_path, monkeypatch):
    from peft import AutoPeftModelForCausalLM

    adapter_over(work)
    path = write_recipe(work, over_adapter())
    ledger, out, heard = go(path)
    assert ledger.verdict == "promoted", ledger.sentence
    entries, gap = export(out, ["adapter", "merged"])
    assert gap == "" and [one["kind"] for one in entries] == ["adapter", "merged"]
    assert any("was added to its base in fp32" in event.text for event in heard.of("notice"))
    monkeypatch.chdir(tmp_path.parent)
    plain = AutoPeftModelForCausalLM.from_pretrained(out / "exports" / "adapter")
    ours = load_model(model_of(str(out)))
    ids = torch.arange(3, 23)[None]
    with torch.no_grad(), ours.attention():
        gap = plain.eval()(input_ids=ids).logits - ours.network.eval()(input_ids=ids).logits
    assert gap.abs().max() < 1e-4
    before = weights(out)
    _, _, heard = go(path)
    assert any("was added to its base in fp32" in event.text for event in heard.of("notice"))
    assert heard.updates() == 0 and weights(out) == before


def test_a_folded_base_that_was_changed_is_made_again(work, lean):
    adapter_over(work)
    path = write_recipe(work, over_adapter())
    _, out, _ = go(path)
    before = weights(out / "folded-base")
    nudge(out / "folded-base" / "model.safetensors")
    assert go(path)[2].updates() == 0
    assert weights(out / "folded-base") == before
