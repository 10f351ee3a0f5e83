"""A model at half its width: each block's products are a quarter, all else is as it was."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, model_of, tree_pack

from lehr.models.halved import half_width
from lehr.models.language_model import LanguageModel


def inner(model: LanguageModel) -> int:
    """Elements of the matrices inside the blocks."""
    named = model.network.named_parameters()
    return sum(p.numel() for name, p in named if ".layers." in name and p.dim() == 2)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "GPT2"])
def test_every_family_has_a_half(family):
    model = model_of(family)
    model.train_all()
    model.train()
    state = torch.get_rng_state()
    narrow = half_width(model)
    assert narrow is not None and torch.equal(torch.get_rng_state(), state)
    assert narrow.vocabulary_size == model.vocabulary_size and narrow.training
    assert narrow.trains_all and narrow.precision == model.precision
    assert inner(narrow) * 4 == inner(model)
    pack = tree_pack()
    stats = narrow.token_stats(narrow.hidden(pack), pack.predict_from, pack.targets)
    assert torch.isfinite(stats.log_probability).all()


def test_the_adapter_comes_along():
    model = model_of("Llama", precision="bf16")
    model.add_adapter(rank=3, alpha=5.0, dropout=0.1)
    narrow = half_width(model)
    assert narrow is not None and narrow.adapter == model.adapter
    assert narrow.trained().keys() == model.trained().keys()
    weight = narrow.network.get_input_embeddings().weight
    assert weight.dtype == torch.bfloat16 and narrow.training == model.training


@pytest.mark.parametrize(
    "changed", [{"intermediate_size": 33}, {"head_dim": 6}, {"hidden_size": 0}, {"head_dim": 7}]
)
def test_a_width_that_has_no_half(changed):
    model = model_of("Llama")
    for name, value in changed.items():
        setattr(model.config, name, value)
    assert half_width(model) is None


def test_an_architecture_without_these_names_is_left_alone():
    assert half_width(model_of("GPT2")) is None
