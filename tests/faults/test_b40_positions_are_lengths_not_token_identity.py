"""B40: where a prompt ends is its length, never the first pad or end token in it.

The padding id (0) and the stop id both stand inside prompts here, as they do where pad = eos
and in every second turn of a chat. A mask or a position by token identity changes the answers.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lehr.generation.decode import generate

STOP = 3
PROMPTS = [
    [5, STOP, 6, 7, STOP],
    [0, 0, 5, 9],
    [STOP, STOP],
    [5, 0, 6, 0, 7, 0, 8, 0],
    [11],
]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_pad_and_stop_ids_inside_prompts_change_nothing(batch_size: int) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=STOP,
        eos_token_id=STOP,
    )
    network = LlamaForCausalLM(config).eval()
    model = SimpleNamespace(network=network)
    got = generate(model, PROMPTS, max_new_tokens=6, stop_ids={STOP}, batch_size=batch_size)
    for prompt, answer in zip(PROMPTS, got, strict=True):
        ids = list(prompt)
        for token, value in zip(answer.ids, answer.log_probabilities, strict=True):
            with torch.no_grad():
                row = network(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                ).logits[0, -1]
            row = row.log_softmax(-1)
            assert token == int(row.argmax())
            assert value == pytest.approx(float(row[token]), abs=1e-5)
            ids.append(token)
        assert answer.stopped == (answer.ids[-1] == STOP)
