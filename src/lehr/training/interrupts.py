"""INT and TERM: finish what is being done, write a checkpoint, stop.

The first signal only leaves a note that the engine reads between two micro-batches.
The second raises at once, wherever the program is: checkpoints are atomic, so the last
one stands.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from lehr import signals
from lehr.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Context in which INT and TERM are noted instead of ending the program.

    requested  name of the signal that arrived, or None

    Python lets only the main thread handle signals; elsewhere the context does nothing.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if signals.seen():  # its exception was lost: Python ignores one in a finalizer
            self.requested = "a signal"
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is not None:
            raise Interrupted(f"{name} arrived a second time: stopped without a new checkpoint")
        # Nothing else: a handler that writes could meet the write that it interrupted.
        self.requested = name
