"""What LanguageModel promises beyond its parts."""

from __future__ import annotations

import pytest
import torch
from families import model_of, network_of, tree_pack

from lehr.models.language_model import LanguageModel


def test_the_end_token_trains_where_pad_is_eos():
    """The fault: an embedding drops the gradient of its padding row, here the end token's."""
    network = network_of("Qwen2", pad_token_id=2, eos_token_id=2)
    assert network.get_input_embeddings().padding_idx == 2
    model = LanguageModel(network, None, "pad is eos")
    model.train_all()
    pack = tree_pack()
    pack.ids[4] = 2
    weight = network.get_input_embeddings().weight
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    (gradient,) = torch.autograd.grad(stats.log_probability.sum(), weight)
    assert gradient[2].abs().max() > 1e-6


def test_own_dropout_is_off_with_a_notice():
    model = model_of("GPT2")
    assert any("0.1" in notice for notice in model.notices)
    model.train()
    pack = tree_pack()
    with torch.no_grad():
        assert torch.equal(model.hidden(pack), model.hidden(pack))
    assert model.config.resid_pdrop == 0.1  # the saved configuration keeps what it was


def test_state_is_a_copy_and_loads_back():
    model = model_of("Llama")
    model.add_adapter(rank=2)
    state = model.state()
    first = next(iter(state))
    with torch.no_grad():
        model.trained()[first].add_(1)
    assert not torch.equal(state[first], model.trained()[first])
    model.load_state(state)
    assert torch.equal(state[first], model.trained()[first])


def test_misuse_is_named():
    model = model_of("Llama")
    model.add_adapter(rank=2)
    with pytest.raises(ValueError, match="fold_adapter"):
        model.add_adapter(rank=2)
    with pytest.raises(ValueError, match="fold_adapter"):
        model.train_all()
    with pytest.raises(ValueError, match="save_merged"):
        model.save_full("nowhere")
    with pytest.raises(ValueError, match="none, full, selective"):
        model.recompute("half")


def test_entropy_and_argmax_are_the_models():
    model = model_of("Gemma2")
    pack = tree_pack()
    with torch.no_grad():
        hidden = model.hidden(pack)
        stats = model.token_stats(
            hidden, pack.predict_from, pack.targets, entropy=True, argmax=True
        )
        log_p = torch.log_softmax(model.head().logits(hidden[pack.predict_from]), 1)
    assert (stats.entropy + (log_p.exp() * log_p).sum(1)).abs().max() < 1e-5
    assert torch.equal(stats.argmax, log_p.argmax(1))


def test_decode_with_a_cache_agrees_with_the_pack():
    model = model_of("Llama")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad(), model.attention():
        whole = model.network(input_ids=ids).logits[0, -1]
        first = model.network(input_ids=ids[:, :-1], use_cache=True)
        cache = first.past_key_values if "past_key_values" in first else first.cache
        name = "past_key_values" if "past_key_values" in first else "cache"
        last = model.network(input_ids=ids[:, -1:], **{name: cache}).logits[0, -1]
    assert (whole - last).abs().max() < 1e-5
