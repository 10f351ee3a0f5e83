"""Small random networks of many architectures, and packs to try them on."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from lehr.data.shapes import Pack
from lehr.models.language_model import LanguageModel
from lehr.models.probe import probe_pack

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OWN: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {
        "head_dim": 8,
        "sliding_window": 5,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "Gemma3Text": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "GPT2": {},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 6.0},
    "Phi3": {},
    "Olmo2": {},
}
FAMILIES = tuple(_OWN)


def config_of(family: str, **changes: Any) -> Any:
    """A small configuration of an architecture."""
    kind = getattr(transformers, f"{family}Config")
    if family == "GPT2":
        settings = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        return kind(**{**settings, "bos_token_id": 1, "eos_token_id": 2, **changes})
    return kind(**{**_SMALL, **_OWN.get(family, {}), **changes})


def network_of(family: str, seed: int = 0, **changes: Any) -> Any:
    """A small network with random weights; norms and biases are random too."""
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(config_of(family, **changes)).float()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return network.eval()


def model_of(family: str, seed: int = 0, precision: str = "fp32", **changes: Any) -> LanguageModel:
    """The same as a LanguageModel without a tokenizer."""
    network = network_of(family, seed, **changes)
    if precision == "bf16":
        network.to(torch.bfloat16)
    return LanguageModel(network, None, family.lower(), precision=precision)


def tree_pack(seed: int = 0, vocabulary: int = 97) -> Pack:
    """Two plain sequences and a prompt with three branches, one of a single token."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (count,), generator=generator)

    parts = [(some(11), -1), (some(7), -1), (some(9), -1)]
    return probe_pack([*parts, (some(6), 2), (some(4), 2), (some(1), 2)])
