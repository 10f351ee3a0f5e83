"""The order in which a card adds: fixed, so that a resume has the same bits, or said not to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lehr.device import repeatable, without_order
from lehr.training import events
from lehr.training.update import StopNow


class FixedOrder:
    """Surrounds the backward passes of an update, before any weight moves.

    On a CPU it does nothing: sums have one order there anyway.
    """

    def __init__(self, device: torch.device, emit: Callable[[events.Event], None]) -> None:
        self._device, self._emit = device, emit
        self.kept = True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Raises StopNow where an operation has no such order: the attempt begins again without."""
        try:
            with repeatable(self._device, self.kept):
                yield
        except RuntimeError as error:
            name = without_order(error) if self.kept else ""
            if not name:
                raise
            self.kept = False
            self._emit(events.OrderUnknown(name))
            raise StopNow from error
