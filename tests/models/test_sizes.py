"""Models of sizes alone keep what real ones keep, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lehr.errors import RecipeError
from lehr.models.language_model import LanguageModel
from lehr.models.meta import SizesAlone
from lehr.models.precision import loaded_dtype
from lehr.models.probe import probe_pack
from lehr.models.recompute_costs import Cost, Costs
from lehr.models.sizes import has_sizes_alone, model_of_sizes

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def described(folder: Path, kind: str, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": kind, **SHAPE, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def costs(model: LanguageModel, all_weights: bool, tokens: int) -> list[Cost]:
    if all_weights:
        model.train_all()
    else:
        model.add_adapter(rank=4)
    model.train()
    ids = torch.zeros(tokens, dtype=torch.int64)
    measured = Costs(model, probe_pack([(ids, -1), (ids[:9], -1)]))
    return [measured.of(kind) for kind in ("none", "selective", "full")]


@pytest.mark.parametrize(
    ("kind", "precision", "all_weights", "tokens"),
    [
        ("qwen3", "bf16", False, 40),
        ("qwen3", "bf16", True, 40),
        ("llama", "bf16", False, 210),  # beyond what plain products compute
        ("llama", "bf16", True, 210),
        ("llama", "fp32", True, 40),
        ("mistral", "bf16", False, 40),
    ],
)
def test_the_same_bytes_as_a_real_model(
    tmp_path: Path, kind: str, precision: str, all_weights: bool, tokens: int
) -> None:
    folder = described(tmp_path / "m", kind)
    config = AutoConfig.from_pretrained(folder)
    network = AutoModelForCausalLM.from_config(config).to(loaded_dtype(precision, all_weights))
    real = LanguageModel(network, None, "real", precision=precision)
    sizes = model_of_sizes(folder, precision)
    assert {p.device.type for p in sizes.network.parameters()} == {"meta"}
    expected = costs(real, all_weights, tokens)
    with SizesAlone(sizes):
        found = costs(sizes, all_weights, tokens)
    assert found == expected
    assert found[0].kept_bytes > found[1].kept_bytes > found[2].kept_bytes > 0


def test_a_folder_without_weights_is_known_as_such(tmp_path: Path) -> None:
    folder = described(tmp_path / "m", "llama")
    assert has_sizes_alone(folder)
    assert model_of_sizes(folder, "bf16").tokenizer is None
    (folder / "model.safetensors").touch()
    assert not has_sizes_alone(folder)
    assert not has_sizes_alone(tmp_path)
    bad = described(tmp_path / "bad", "llama", num_attention_heads=0)
    with pytest.raises(RecipeError, match=r"config\.json"):
        model_of_sizes(bad, "bf16")
