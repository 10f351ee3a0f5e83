"""Key-value caches that are written in place: one for the lean pass, one for any network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

__all__ = ["GrowingLayer", "RowCache", "growing_cache", "select_rows"]

GRAIN = 16  # positions by which room grows


class RowCache:
    """Keys and values of each layer, [rows, groups, room, size]: a slot of its own for each row.

    Slots are left aligned, so that a row's position is its index and no row pads another. Room
    is what is written, rounded up: a step reads it whole, and what is contiguous it reads in two
    thirds of the time. To grow copies every layer, which a step's reading does anyway.
    """

    def __init__(self, layers: int, rows: int, groups: int, size: int, dtype: torch.dtype) -> None:
        self.rows, self.groups, self.room, self.dtype = rows, groups, 0, dtype
        self.keys = [torch.empty(rows, groups, 0, size, dtype=dtype) for _ in range(layers)]
        self.values = [torch.empty(rows, groups, 0, size, dtype=dtype) for _ in range(layers)]

    def reserve(self, positions: int) -> None:
        """Room for that many positions in every slot."""
        if positions <= self.room:
            return
        room = -(-positions // GRAIN) * GRAIN
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                new = old.new_zeros(*old.shape[:2], room, old.shape[3])
                new[:, :, : self.room] = old
                tensors[index] = new
        self.room = room

    def place(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Put a prompt's keys and values [layers, groups, length, size] at a slot's beginning."""
        length = keys.shape[2]
        self.reserve(length)
        for tensors, new in ((self.keys, keys), (self.values, values)):
            for cached, of_layer in zip(tensors, new, strict=True):
                cached[slot, :, :length] = of_layer

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for cached in (*self.keys, *self.values):
            cached[target, :, :length] = cached[source, :, :length]


class GrowingLayer(DynamicLayer):
    """Full-attention cache layer with room for `capacity` positions.

    `DynamicLayer` concatenates, which copies the whole cache once per new token. This
    one writes into a buffer [batch, heads, capacity, dim] and shows its filled part.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [batch, heads, new, dim] and return everything that is cached."""
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            self._grow(key_states, value_states, end)
        assert self._buffers is not None
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch, in that order; a row may be repeated."""
        if self._buffers is None:
            return
        length = self.get_seq_length()
        keys, values = self._buffers
        self._buffers = (keys.index_select(0, indices), values.index_select(0, indices))
        self._show(length)

    def _show(self, length: int) -> None:
        assert self._buffers is not None
        self.keys = self._buffers[0][:, :, :length]
        self.values = self._buffers[1][:, :, :length]

    def _grow(self, key_states: Tensor, value_states: Tensor, needed: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Past the planned capacity, room grows by half so that copies stay rare.
        capacity = self.capacity if needed <= self.capacity else needed + needed // 2
        grown = []
        for old, new in ((self.keys, key_states), (self.values, value_states)):
            batch, heads, _, dim = new.shape
            buffer = new.new_empty(batch, heads, capacity, dim)
            if old is not None and old.numel():
                buffer[:, :, : old.shape[-2]] = old
            grown.append(buffer)
        self._buffers = (grown[0], grown[1])


def growing_cache(config: Any, capacity: int) -> DynamicCache:
    """The cache that `config` asks for, its full-attention layers with room for `capacity`.

    Sliding-window and other special layers keep transformers' own classes.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def select_rows(cache: DynamicCache, rows: list[int], device: torch.device) -> None:
    """Keep (or repeat) the batch rows `rows` in every layer of `cache`."""
    cache.batch_select_indices(torch.tensor(rows, dtype=torch.long, device=device))
