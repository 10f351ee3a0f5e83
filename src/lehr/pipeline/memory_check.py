"""After a stage's first update: what was forecast of it beside what it took, said once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch

from lehr.diagnosis.planner import resident_bytes
from lehr.pipeline.events import Events
from lehr.training import events as engine
from lehr.training.resources import mark_peak_memory, peak_since_mark

TOLERANCE = 0.2  # docs/planner.md: resident memory is forecast within so much


def compared(forecast: int, measured: int) -> str:
    """One sentence.

    >>> compared(2 * 2**30, 2 * 2**30)
    '2.00 GiB taken, at most 2.00 GiB forecast'
    >>> compared(2**30, 3 * 2**30)
    '3.00 GiB taken, at most 1.00 GiB forecast: 3.0 times as much'
    """
    said = f"{measured / 2**30:.2f} GiB taken, at most {forecast / 2**30:.2f} GiB forecast"
    beyond = measured > forecast * (1 + TOLERANCE)
    return f"{said}: {measured / forecast:.1f} times as much" if beyond else said


class MemoryCheck:
    """An observer that compares the plan of a stage with its first update.

    memory   the stage's forecast: of its largest micro-batch, so that update 1 may take less
    seconds  forecast of an update

    On a CPU resident memory is compared; what the process holds before training (libraries, what
    an earlier stage left in the heap) counts on both sides. Says nothing where nothing can be
    measured, after a resume, and where the first update is skipped.
    """

    def __init__(
        self, events: Events, memory: Mapping[str, int], seconds: float, device: torch.device
    ) -> None:
        self.events, self.memory, self.seconds, self.device = events, memory, seconds, device
        self.forecast = 0
        self.waiting = False

    def __call__(self, event: Any) -> None:
        if isinstance(event, engine.RunStarted):
            self.waiting = not event.attempt and bool(self.memory) and self._begin()
        elif isinstance(event, engine.UpdateDone) and self.waiting:
            self.waiting = False
            if not event.row.get("skipped"):
                self._say(float(event.row["seconds"]))

    def _begin(self) -> bool:
        if self.device.type == "cuda":
            self.forecast = self.memory["peak"]
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        before = int(psutil.Process().memory_info().rss)
        self.forecast = max(resident_bytes(self.memory), before)
        return mark_peak_memory()

    def _say(self, seconds: float) -> None:
        cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else peak_since_mark()
        text = (
            f"after update 1: {compared(self.forecast, peak)}; "
            f"{seconds:.1f} s, {self.seconds:.1f} s forecast"
        )
        self.events.emit(
            "forecast_checked",
            text,
            memory={"forecast": self.forecast, "measured": int(peak)},
            seconds={"forecast": round(self.seconds, 3), "measured": round(seconds, 3)},
        )
