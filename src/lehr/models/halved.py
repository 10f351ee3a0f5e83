"""A language model of half the width: what products cost shows in what becomes of them there.

Layers, heads, vocabulary, adapter and precision stay; hidden states, heads and the inner layer of
the MLP are half as wide, so that a block's products are a quarter. Its weights are random.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from lehr.models.language_model import LanguageModel
from lehr.models.nf4 import quantised_layers


def half_width(model: LanguageModel) -> LanguageModel | None:
    """The model at half its width; None for an architecture whose width cannot be halved.

    What is computed again (`recompute`) is not taken over.
    """
    from transformers import AutoModelForCausalLM

    config = _half(model.config)
    if config is None or quantised_layers(model.network):
        return None
    weight = model.network.get_input_embeddings().weight
    try:
        with torch.random.fork_rng(devices=[]), torch.device(model.device):
            network = AutoModelForCausalLM.from_config(config).to(weight.dtype)
    except Exception:  # other architectures: any value of a config reaches arithmetic somewhere
        return None
    twin = LanguageModel(
        network, model.tokenizer, f"{model.name}, half as wide", precision=model.precision,
        seed=model.seed, stored_dtype=model.stored_dtype,
    )  # fmt: skip
    twin.head_chunk = model.head_chunk
    if model.adapter is not None:
        spec = model.adapter
        twin.add_adapter(spec.rank, spec.alpha, spec.targets, spec.dropout, spec.rows)
    elif model.trains_all:
        twin.train_all()
    return twin.train(model.training)


def _half(config: Any) -> Any:
    """The config with half of each width; None where one is missing or cannot be halved."""
    made = copy.deepcopy(config)
    heads = getattr(made, "num_attention_heads", None)
    hidden = getattr(made, "hidden_size", None)
    if not heads or not hidden or not getattr(made, "intermediate_size", None):
        return None
    head = getattr(made, "head_dim", None) or hidden // heads
    if head % 4 or hidden % 2 or made.intermediate_size % 2:  # rotary positions need an even half
        return None
    made.hidden_size = hidden // 2
    made.intermediate_size //= 2
    if getattr(made, "head_dim", None):
        made.head_dim = head // 2
    return made
