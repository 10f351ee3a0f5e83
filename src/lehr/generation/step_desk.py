"""What a decoding step works on: views and masks made once for many steps.

A view costs a microsecond, and a layer needs several; they stay valid while the number of
rows and the cache's memory are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lehr.generation.cache import RowCache


@dataclass(frozen=True)
class LayerViews:
    """Of one layer's cache: flat [.., size] to write into; keys [lanes, size, room] and values
    [lanes, room, size] to read."""

    keys_flat: Tensor
    values_flat: Tensor
    keys: Tensor
    values: Tensor


class StepDesk:
    """For `rows` rows of a cache as long as its room is what it is; a lane is a row's group."""

    def __init__(self, rows: int, cache: RowCache) -> None:
        self.rows, self.lanes = rows, rows * cache.groups
        self.cache, self.room, self.dtype = cache, cache.room, cache.dtype
        size = cache.keys[0].shape[-1]
        self.layers = [
            LayerViews(
                keys.view(-1, size),
                values.view(-1, size),
                keys[:rows].flatten(0, 1).transpose(1, 2),
                values[:rows].flatten(0, 1),
            )
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        self._columns = torch.arange(self.room)
        self._lane_starts = torch.arange(self.lanes).view(rows, -1) * self.room

    def fits(self, rows: int, cache: RowCache) -> bool:
        """Whether a step of `rows` rows of this cache can work here."""
        return rows == self.rows and cache is self.cache and cache.room == self.room

    def places(self, positions: Tensor) -> Tensor:
        """Where position p of each row stands in a layer's flat view, lane by lane."""
        return (self._lane_starts + positions[:, None]).view(-1)

    def masks(self, positions: Tensor, windows: Iterable[int | None]) -> dict[int | None, Tensor]:
        """For each window (None: all earlier positions): additive fp32 [lanes, 1, room]."""
        masks = {}
        for window in windows:
            hidden = self._columns > positions[:, None]
            if window is not None and window < self.room:
                hidden |= self._columns <= positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=torch.float32)
            mask = mask.masked_fill_(hidden, float("-inf"))
            masks[window] = mask.repeat_interleave(self.lanes // self.rows, 0)[:, None]
        return masks
