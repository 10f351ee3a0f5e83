"""Tiny models: sizes, determinism, a tokenizer that takes any text."""

from __future__ import annotations

import pytest
import torch

from lehr.errors import RecipeError
from lehr.models.loading import load_model, resolve_spec
from lehr.models.precision import PRECISIONS, compute_dtype, trained_dtype
from lehr.models.probe import admission_probe, probe_pack
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


def test_qk_norm_is_the_same_model_with_two_more_norms_a_layer():
    (plain, _), (normed, _) = (make_tiny(f"0.2m{more}", CORPUS, 3) for more in ("", "+qk_norm"))
    own, others = dict(plain.named_parameters()), dict(normed.named_parameters())
    more = sorted(others.keys() - own.keys())
    config = normed.config
    assert len(more) == 2 * config.num_hidden_layers
    assert all(name.endswith(("q_norm.weight", "k_norm.weight")) for name in more)
    assert own.keys() <= others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own), "the same bits to begin with"
    count = sum(p.numel() for p in normed.parameters())
    shape = (config.hidden_size, config.num_hidden_layers, config.intermediate_size)
    heads = (config.num_attention_heads, config.num_key_value_heads)
    assert count == count_parameters(*shape, *heads, config.vocab_size, qk_norm=True)


def test_qk_norm_bounds_the_attention_logits():
    """|q . k| scale <= sqrt(head size), however large the projections have grown."""
    bounds = {}
    for more in ("", "+qk_norm"):
        model = load_model(f"tiny:0.1m{more}", corpus=lambda: CORPUS)
        with torch.no_grad():
            for name, weight in model.network.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    weight.mul_(30.0)
        model.watch_attention(100)
        model.add_adapter(rank=2)
        model.hidden(probe_pack([(torch.arange(40), -1)]))
        bounds[more] = model.largest_attention_logit()
    size = model.config.head_dim
    assert bounds["+qk_norm"] <= size**0.5 * (1 + 1e-5) < bounds[""]


def test_a_normed_one_is_admitted_and_comes_back_from_its_folder(tmp_path):
    model = load_model("tiny:0.1m+qk_norm", corpus=lambda: CORPUS)
    assert admission_probe(model) == []
    model.save_full(tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"))
    one = probe_pack([(torch.arange(20), -1)])
    with torch.no_grad():
        assert torch.equal(again.hidden(one), model.hidden(one))


def test_its_fingerprint_is_another_one():
    kinds = [resolve_spec(f"tiny:1m{more}").fingerprint for more in ("", "+qk_norm")]
    assert kinds[0] == resolve_spec("tiny:1000k").fingerprint != kinds[1]
