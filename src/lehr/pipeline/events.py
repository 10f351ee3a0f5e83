"""What happens in a run, as it happens: one stream for events.jsonl, terminal and notebook."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """One thing that happened. `text` is a sentence for people; `data` the numbers behind it."""

    kind: str
    text: str = ""
    stage: str = ""
    data: dict[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]


class Events:
    """Writes durable events to events.jsonl and hands every event to the listeners."""

    def __init__(self, path: Path | None = None, listeners: Sequence[Listener] = ()) -> None:
        self.path = path
        self.listeners = list(listeners)
        if path is not None:
            _cut_torn_line(path)
        self.stage = ""

    def emit(self, kind: str, text: str = "", *, durable: bool = True, **data: Any) -> None:
        """Tell everybody. `durable=False` is for progress that would only swell the file."""
        event = Event(kind=kind, text=text, stage=self.stage, data=data)
        if durable and self.path is not None:
            row = {"time": round(time.time(), 3), "stage": self.stage, "kind": kind, "text": text}
            row.update(data)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(_strict(row), ensure_ascii=False, default=str) + "\n")
        for listener in self.listeners:
            listener(event)


def _cut_torn_line(path: Path) -> None:
    """Drop a last line that a killed process left unfinished."""
    if not path.is_file():
        return
    with path.open("rb+") as stream:
        content = stream.read()
        stream.truncate(content.rfind(b"\n") + 1)


def _strict(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become null."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
