"""Decoding through a LanguageModel: adapters, `as_of`, and the attention that comes back."""

from __future__ import annotations

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from lehr.generation.decode import generate
from lehr.models.attention import NAME
from lehr.models.language_model import LanguageModel

COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
PROMPTS = [[1, 2, 4, 5], [7], [9, 9, 3, 1, 0, 2]]


def test_adapters_and_as_of_change_what_is_generated() -> None:
    torch.manual_seed(0)
    model = LanguageModel(LlamaForCausalLM(LlamaConfig(**COMMON)), None, "tiny")
    model.add_adapter(rank=2, dropout=0.5)
    model.train()

    def answers() -> list[list[int]]:
        return [one.ids for one in generate(model, PROMPTS, max_new_tokens=8, stop_ids=set())]

    before = answers()
    start = model.state()
    with torch.no_grad():
        for parameter in model.trained().values():
            parameter.normal_(std=0.5)
    tuned = answers()
    assert tuned != before and tuned == answers(), "adapter on, its dropout off"
    with model.as_of(start):
        assert answers() == before
    with model.as_of(None):
        assert answers() == before
    assert answers() == tuned
    assert model.training and model.network.config._attn_implementation == NAME


def test_soft_capped_attention_decodes_like_full_passes() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**COMMON, head_dim=8, sliding_window=4, attn_logit_softcapping=5.0)
    model = LanguageModel(Gemma2ForCausalLM(config).eval(), None, "tiny")
    got = generate(model, PROMPTS, max_new_tokens=8, stop_ids=set(), batch_size=3)
    for prompt, answer in zip(PROMPTS, got, strict=True):
        ids = list(prompt)
        for token in answer.ids:
            with torch.no_grad(), model.attention("eager"):
                logits = model.network(torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            ids.append(token)
