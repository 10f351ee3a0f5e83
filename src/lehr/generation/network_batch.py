"""Rows under a network's own forward pass: any architecture, batch by batch.

Prompts of like length share a batch, left padded, masked, with explicit positions. A
finished row leaves; a new batch begins when all have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lehr.generation.cache import growing_cache, select_rows
from lehr.generation.rows import Group
from lehr.models.attention import attention


@contextmanager
def decoding_network(network: Any) -> Iterator[None]:
    """`network` in evaluation mode under an attention that knows padding and a cache.

    Training packs run under lehr's attention over segments, which refuses both. Soft-capped
    attention runs under transformers' eager code: its sdpa function refuses the cap.
    """
    capped = getattr(network.config, "attn_logit_softcapping", None) is not None
    training = [module for module in network.modules() if module.training]
    if training:
        network.eval()
    try:
        with attention(network, "eager" if capped else None):
            yield
    finally:
        for module in training:
            module.training = True


class NetworkBatch:
    """The rows' cache, mask and positions; `budget` gives new tokens by a prompt's length."""

    joins = False

    def __init__(self, network: Any, budget: Callable[[int], int]) -> None:
        self.network, self.budget = network, budget

    def admit(self, groups: Sequence[Group]) -> Tensor:
        """Run the prompts once; then each is repeated for its answers."""
        device = self.network.device
        lengths = [len(group.prompt) for group in groups]
        longest = max(lengths)
        capacity = longest + max(self.budget(length) for length in lengths)
        ids = torch.zeros(len(groups), longest, dtype=torch.long)
        mask = torch.ones(len(groups), capacity, dtype=torch.long)
        positions = torch.zeros(len(groups), longest, dtype=torch.long)
        for row, group in enumerate(groups):
            padding = longest - len(group.prompt)
            ids[row, padding:] = torch.tensor(group.prompt)
            mask[row, :padding] = 0
            positions[row, padding:] = torch.arange(len(group.prompt))
        # Without padding there is nothing to mask, and attention takes its fast path.
        padded = bool((mask == 0).any())
        self._mask = mask.to(device) if padded else None
        self._cache = growing_cache(self.network.config, capacity)
        self._seen = longest
        logits = self._logits(ids.to(device), positions.to(device))
        owner = [row for row, group in enumerate(groups) for _ in group.answers]
        self._positions = torch.tensor([lengths[row] for row in owner], device=device)
        if len(owner) != len(groups):
            self._select(owner)
            logits = logits[owner]
        return logits

    def keep(self, rows: Sequence[int]) -> Sequence[int]:
        if rows:
            self._select(list(rows))
            self._positions = self._positions[list(rows)]
        return rows

    def step(self, tokens: Tensor) -> Tensor:
        self._seen += 1
        logits = self._logits(tokens[:, None], self._positions[:, None])
        self._positions = self._positions + 1
        return logits

    def _select(self, rows: list[int]) -> None:
        select_rows(self._cache, rows, self.network.device)
        self._mask = None if self._mask is None else self._mask[rows]

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One forward pass -> fp32 logits [n, V] of the last position."""
        output = self.network(
            input_ids=ids,
            attention_mask=None if self._mask is None else self._mask[:, : self._seen],
            position_ids=positions,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits
