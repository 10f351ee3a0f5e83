"""Averaged weights leave a stage: the state that is judged and exported is their average."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tests.pipeline.small import go, lora_recipe, stage, write_recipe

pytestmark = pytest.mark.usefixtures("lean")


def test_a_stage_leaves_the_average_of_its_adapter_and_of_nothing_else(work):
    """Computed again from the weights of every update, which the checkpoints kept."""
    decay = 0.6
    recipe = lora_recipe(gates="none", export="adapter")
    ema = {"decay": decay, "warmup": False, "start_after": 1}
    keys = {"max_updates": 4, "checkpoint_every": 1, "checkpoints_kept": 9, "ema": ema}
    recipe["stages"] = [{"sft": stage("chats", learning_rate=1e-2, **keys)}]
    _, out, _ = go(write_recipe(work, recipe))
    folders = sorted((out / "01-sft" / "checkpoints").glob("update-*"))
    walk = [load_file(one / "weights.safetensors") for one in folders if one.name > "update-000000"]
    assert len(walk) == 4
    averages = [name for name in load_tensors(folders[-1]) if name.startswith("parameter.")]
    assert averages and all("lora" in name for name in averages), "of the adapter only"
    expected = walk[0]
    for weights in walk[1:]:
        expected = {k: v.lerp(weights[k], 1 - decay) for k, v in expected.items()}
    left = load_file(out / "01-sft" / "adapter" / "adapter_model.safetensors")
    last = sorted_values(walk[-1])
    for found, wanted, raw in zip(sorted_values(left), sorted_values(expected), last, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        assert not torch.equal(found, raw) or not bool(raw.any())
    files = sorted(path.name for path in (out / "01-sft" / "adapter").iterdir())
    assert "adapter_config.json" in files


def load_tensors(folder):
    (path,) = folder.glob("average*.safetensors")
    return load_file(path)


def sorted_values(tensors):
    """By the layer's name: the file has PEFT's prefix and suffix."""

    def plain(name):
        name = name.split(".", 1)[1] if name.startswith("parameter.") else name
        return name.removeprefix("base_model.model.").replace(".weight", "").lower()

    return [tensors[name] for name in sorted(tensors, key=plain)]
