"""B28: an adapter with a grown vocabulary cannot be loaded, or lost its new rows.

huggingface/peft#1300. Base vocabulary 270, four tokens added, LoRA and new rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from families import network_of

from lehr.errors import RecipeError
from lehr.models.language_model import LanguageModel
from lehr.models.loading import load_model
from lehr.models.probe import probe_pack
from lehr.models.tiny import train_tokenizer
from lehr.models.vocabulary import add_control_tokens

NEW = ["<|a|>", "<|b|>", "<|c|>", "<|d|>"]
IDS = [5, 270, 6, 271, 7, 272, 8, 273, 9]


@pytest.fixture
def trained(tmp_path):
    """20 updates of AdamW on rows that hold the new tokens."""
    tokenizer = train_tokenizer(["some text to train the tokenizer on " * 3] * 3, 270)
    assert len(tokenizer) == 270
    network = network_of("Llama", vocab_size=270)
    LanguageModel(network, tokenizer, "base").save_full(tmp_path / "base")
    model = load_model(str(tmp_path / "base"))
    model.new_rows = tuple(add_control_tokens(model.network, model.tokenizer, NEW))
    model.add_adapter(rank=4)
    start = model.state()
    pack = probe_pack([(torch.tensor(IDS), -1)])
    optimizer = torch.optim.AdamW(model.trained().values(), lr=1e-2)
    for _ in range(20):
        stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
        (-stats.log_probability.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_adapter(tmp_path / "adapter")
    return model, start, tmp_path


def _logits(network) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=torch.tensor([IDS])).logits


def test_plain_peft_loads_it_from_the_files_without_a_manual_resize(trained):
    model, start, folder = trained
    network = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    theirs = _logits(network)
    with model.attention():
        assert (theirs - _logits(model.network)).abs().max() <= 1e-5
    assert len(AutoTokenizer.from_pretrained(folder / "adapter")) == 274
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    moved = (model.state()[name] - start[name]).abs().amax(1)
    assert moved.shape == (4,)
    assert (moved > 1e-3).all()
    old = load_file(folder / "base" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.network.get_input_embeddings().weight[:270], old)


def test_a_base_without_the_rows_is_refused_with_both_sizes(trained):
    _, _, folder = trained
    base = load_model(str(folder / "base"))
    with pytest.raises(RecipeError, match=r"274 vocabulary rows.*270"):
        base.load_adapter(folder / "adapter")


def test_an_adapter_that_lost_its_rows_is_refused(trained):
    """The fault put in: the new rows are missing from the file."""
    _, _, folder = trained
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if "token_adapter" not in k}
    save_file(tensors, path)
    with pytest.raises(RecipeError, match="1 tensors missing"):
        load_model(str(folder / "adapter"))


def test_training_without_the_new_rows_is_a_warning(trained):
    _, _, folder = trained
    model = load_model(str(folder / "base"), template="chatml")
    model.add_adapter(rank=2, rows=())
    assert any("not train" in notice for notice in model.notices)
