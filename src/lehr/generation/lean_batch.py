"""Rows under the lean pass: each has a slot, and a slot that is free is taken at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lehr.generation.lean_network import LeanNetwork
from lehr.generation.rows import Group

PREFILL_TOKENS = 2048  # of whole prompts at a time; bounds the activations, not the prompts


class LeanBatch:
    """The rows' slots and positions; row i is in slot i."""

    joins = True

    def __init__(self, network: LeanNetwork, rows: int) -> None:
        self.network = network
        self.cache = network.new_cache(rows)
        self.positions = torch.empty(0, dtype=torch.long)
        self.prefilled = 0  # prompts
        # The prompt that was admitted last: the rest of its group may be waiting.
        self._last: tuple[tuple[int, ...], Tensor, Tensor, Tensor] | None = None

    def admit(self, groups: Sequence[Group]) -> Tensor:
        logits = []
        for part in _parts(groups):
            logits.append(self._admit(part))
        return torch.cat(logits)

    def _admit(self, groups: Sequence[Group]) -> Tensor:
        known = self._last
        new = [one.prompt for one in groups if known is None or one.prompt != known[0]]
        found = {} if known is None else {known[0]: known[1:]}
        if new:
            first, keys, values = self.network.prefill(new)
            self.prefilled += len(new)
            end = 0
            for row, prompt in enumerate(new):
                start, end = end, end + len(prompt)
                found[prompt] = (first[row], keys[:, :, start:end], values[:, :, start:end])
        logits, lengths = [], []
        slot = self.positions.numel()
        for group in groups:
            own, keys, values = found[group.prompt]
            for _ in group.answers:
                self.cache.place(slot, keys, values)
                slot += 1
                logits.append(own)
                lengths.append(len(group.prompt))
        last = groups[-1].prompt
        own, keys, values = found[last]
        self._last = (last, own.clone(), keys.clone(), values.clone())
        self.positions = torch.cat([self.positions, torch.tensor(lengths)])
        return torch.stack(logits)

    def keep(self, rows: Sequence[int]) -> Sequence[int]:
        """Rows beyond those that stay move into the slots that became free."""
        staying = [row for row in rows if row < len(rows)]
        movers = [row for row in rows if row >= len(rows)]
        holes = sorted(set(range(len(rows))) - set(staying))
        order = list(range(len(rows)))
        for source, target in zip(movers, holes, strict=True):
            self.cache.move(source, target, int(self.positions[source]))
            order[target] = source
        self.positions = self.positions[order]
        return order

    def step(self, tokens: Tensor) -> Tensor:
        logits = self.network.step(tokens, self.positions, self.cache)
        self.positions = self.positions + 1
        return logits


def _parts(groups: Sequence[Group]) -> list[list[Group]]:
    parts: list[list[Group]] = []
    tokens = 0
    for group in groups:
        if not parts or tokens + len(group.prompt) > PREFILL_TOKENS:
            parts.append([])
            tokens = 0
        parts[-1].append(group)
        tokens += len(group.prompt)
    return parts
