"""Tiny models: sizes, determinism, a tokenizer that takes any text."""

from __future__ import annotations

import pytest
import torch

from lehr.errors import RecipeError
from lehr.models.loading import load_model
from lehr.models.precision import PRECISIONS, compute_dtype, trained_dtype
from lehr.models.probe import admission_probe
from lehr.models.tiny import count_parameters, make_tiny, parameters_of, tiny_config, vocabulary_for

CORPUS = [f"Rule {n}: the keeper of room {n} opens at {n % 12} o'clock." for n in range(200)]


@pytest.mark.parametrize("size", ["0.1m", "0.25m", "1m", "3m", "10m"])
def test_all_parameters_are_within_a_tenth_of_the_size(size):
    network, _ = make_tiny(size, CORPUS, 0)
    count = sum(p.numel() for p in network.parameters())
    assert abs(count / parameters_of(size) - 1) <= 0.10
    config = network.config
    assert count == count_parameters(
        config.hidden_size,
        config.num_hidden_layers,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
    )


@pytest.mark.parametrize("size", [100_000, 200_000, 1_000_000, 5_000_000, 10_000_000])
def test_a_full_vocabulary_leaves_room_for_layers(size):
    vocabulary = vocabulary_for(size)
    config = tiny_config(size, vocabulary)
    assert config.num_hidden_layers >= 2
    assert vocabulary * config.hidden_size < 0.5 * size


def test_same_seed_same_bits_and_the_global_stream_stays():
    torch.manual_seed(3)
    (one, tokens), (two, _), (other, _) = (make_tiny("0.1m", CORPUS, seed) for seed in (1, 1, 2))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))
    first, second, third = (list(n.parameters()) for n in (one, two, other))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    assert tokens.get_vocab() == make_tiny("0.1m", CORPUS, 9)[1].get_vocab()


def test_the_tokenizer_takes_any_text_and_adds_nothing():
    _, tokenizer = make_tiny("0.1m", CORPUS, 0)
    for text in ("Rule 12", " two  spaces\n\ttab", "naïve Ωmega 漢字 🙂", "\u2028", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id != tokenizer.pad_token_id
    assert tokenizer.chat_template is None
    assert len(tokenizer("123")["input_ids"]) == 3


@pytest.mark.parametrize("size", ["", "m", "5", "20m", "0.01m", "-1m", "1g", "nan"])
def test_other_sizes_are_refused(size):
    with pytest.raises(RecipeError, match="tiny:<size>"):
        parameters_of(size)


def test_an_empty_corpus_is_refused():
    with pytest.raises(RecipeError, match="tokenizer"):
        make_tiny("1m", ["", ""], 0)


def test_a_vocabulary_too_large_is_refused():
    with pytest.raises(RecipeError, match="room for a vocabulary"):
        tiny_config(100_000, 8192)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_is_admitted_in_every_precision(precision):
    model = load_model("tiny:0.1m", corpus=lambda: CORPUS, precision=precision)
    assert model.compute_dtype == model.network.dtype == compute_dtype(precision)
    assert admission_probe(model) == []
    model.train_all()
    assert model.network.dtype == trained_dtype(precision)
    assert admission_probe(model) == []
