"""Control tokens that a chat template needs: added to the tokenizer, with rows to train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def add_control_tokens(network: Any, tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """Make every one of `tokens` a single control token; returns ids whose rows are untrained.

    Tokens that the tokenizer has are reused. The embedding grows only where the new
    ids do not fit; existing rows stay bitwise the same, new ones (and unused padding
    rows that are taken) begin as the mean of the rows before them.
    """
    known = tokenizer.get_vocab()
    rows_before = int(network.get_input_embeddings().weight.shape[0])
    used_before = min(max(known.values(), default=-1) + 1, rows_before)
    new = [token for token in tokens if token not in known]
    # A token that is in the vocabulary but not marked would be split at by no tokenizer.
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(tokens)}, replace_extra_special_tokens=False
    )
    ids = sorted(int(i) for i in tokenizer.convert_tokens_to_ids(new)) if new else []
    if not ids:
        return []
    if ids[-1] >= rows_before:
        network.resize_token_embeddings(ids[-1] + 1, mean_resizing=False)
    with torch.no_grad():
        seen: set[int] = set()
        for layer in (network.get_input_embeddings(), network.get_output_embeddings()):
            if layer is None or id(layer.weight) in seen:
                continue
            seen.add(id(layer.weight))
            mean = layer.weight[:used_before].float().mean(0)
            layer.weight[ids] = mean.to(layer.weight.dtype)
            bias = getattr(layer, "bias", None)
            if bias is not None:
                bias[ids] = bias[:used_before].float().mean().to(bias.dtype)
    return ids


def add_stop_id(network: Any, token_id: int) -> None:
    """Make `token_id` one more id at which generation stops."""
    generation = network.generation_config
    stops = generation.eos_token_id
    known = [] if stops is None else list(stops) if isinstance(stops, list | tuple) else [stops]
    if token_id not in known:
        known.append(token_id)
    generation.eos_token_id = known
