"""B26: inherited generation settings fail validation only when the finished model is saved.

huggingface/transformers#29988. The first test shows that the inherited settings do
fail transformers' strict validation.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from families import network_of

from lehr.errors import RecipeError
from lehr.models.language_model import LanguageModel
from lehr.models.loading import load_model
from lehr.models.saving import validate_generation_config
from lehr.models.tiny import train_tokenizer

CONFLICT = '{"do_sample": false, "temperature": 0.7, "top_p": 0.8, "eos_token_id": 2}'


@pytest.fixture
def base(tmp_path):
    tokenizer = train_tokenizer(["some text to train on"] * 3, 270)
    network = network_of("Llama", vocab_size=len(tokenizer))
    LanguageModel(network, tokenizer, "base").save_full(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(CONFLICT)
    return tmp_path / "base"


def test_the_fault_is_there_without_lehr(base):
    plain = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(ValueError, match="temperature"):
        plain.generation_config.validate(strict=True)


def test_it_is_settled_with_a_notice_before_training_and_saves(base, tmp_path):
    model = load_model(str(base))
    notices = [notice for notice in model.notices if "generation config" in notice]
    assert len(notices) == 2
    assert "temperature 0.7" in notices[0]
    model.add_adapter(rank=2)
    model.save_merged(tmp_path / "merged")
    model.save_adapter(tmp_path / "adapter")
    model.fold_adapter()
    model.save_full(tmp_path / "full")
    for name in ("merged", "full", "adapter"):
        GenerationConfig.from_pretrained(tmp_path / name).validate(strict=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain.generation_config.eos_token_id == 2
    assert torch.isfinite(plain(torch.tensor([[1, 2]])).logits).all()


def test_sampling_settings_stay_where_sampling_is_on():
    network = network_of("Llama")
    network.generation_config.update(do_sample=True, temperature=0.7, top_p=0.8)
    assert validate_generation_config(network) == []
    assert network.generation_config.temperature == 0.7


def test_what_cannot_be_settled_is_refused_at_once():
    network = network_of("Llama")
    network.generation_config.max_new_tokens = -4
    with pytest.raises(RecipeError, match="generation_config"):
        validate_generation_config(network)


def test_a_conflict_that_appears_later_still_saves(tmp_path):
    tokenizer = train_tokenizer(["some text"] * 3, 270)
    model = LanguageModel(network_of("Llama", vocab_size=len(tokenizer)), tokenizer, "base")
    model.network.generation_config.temperature = 0.3
    model.save_full(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    GenerationConfig.from_pretrained(tmp_path / "out").validate(strict=True)
