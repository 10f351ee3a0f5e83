"""Where a stage's time went: the engine's spans, added up over all starts of the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lehr.pipeline.files import read_json, write_json
from lehr.training import events as engine

RECORD = "time.json"


class TimeKeeper:
    """An observer that keeps time.json: seconds of the attempts, and of each span.

    Written with every checkpoint, so that what a killed start did counts as far as it was kept.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.seconds: dict[str, float] = {}

    def __call__(self, event: Any) -> None:
        if isinstance(event, engine.RunStarted):
            self.seconds = self._earlier() if event.attempt else {}
        elif isinstance(event, engine.UpdateDone):
            self._add({"attempts": float(event.row["seconds"]), **event.spans})
        elif isinstance(event, engine.RunDone):
            self._add(dict(event.spans))
            self._write()
        elif isinstance(event, engine.CheckpointWritten):
            self._write()

    def _add(self, seconds: dict[str, float]) -> None:
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def _write(self) -> None:
        write_json(self.path, {name: round(value, 3) for name, value in self.seconds.items()})

    def _earlier(self) -> dict[str, float]:
        found = read_json(self.path)
        if not isinstance(found, dict):
            return {}
        return {name: float(v) for name, v in found.items() if isinstance(v, int | float)}
