"""Weights in the files that the network does not take are refused, or named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.pipeline.small import save_base
from transformers import GPT2Config, GPT2LMHeadModel

from lehr.errors import RecipeError
from lehr.models.loading import load_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


def add(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


def edit(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_config_with_fewer_layers_than_the_weights(base):
    edit(base, num_hidden_layers=1)
    with pytest.raises(RecipeError, match=r"not in that model: model\.layers\.1\..*and 4 more"):
        load_model(str(base))


def test_one_weight_too_many_is_named(base):
    add(base, zzz=torch.zeros(2))
    with pytest.raises(RecipeError, match=r"not in that model: zzz \(does config"):
        load_model(str(base))


def test_a_bias_that_the_config_leaves_out(base):
    add(base, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    with pytest.raises(RecipeError, match=r"q_proj\.bias"):
        load_model(str(base))


def test_what_is_computed_from_the_config_may_lie_there(base):
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    head = {"lm_head.weight": embedding.clone()}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    add(base, **head, **old)
    assert load_model(str(base)).notices == []


def test_old_attention_masks_may_lie_there(base):
    tokenizer_size = json.loads((base / "config.json").read_text())["vocab_size"]
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=tokenizer_size)
    GPT2LMHeadModel(config).save_pretrained(base)
    mask = torch.ones(1, 1, 64, 64)
    names = {
        "transformer.h.0.attn.bias": mask,
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    add(base, **names)
    load_model(str(base))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "old.pt", "consolidated.safetensors"])
def test_weight_files_that_are_not_read_are_named(base, name):
    (base / name).write_bytes(b"\x80\x04x")
    [said] = load_model(str(base)).notices
    assert said.startswith(f"{name} in base: not read")
