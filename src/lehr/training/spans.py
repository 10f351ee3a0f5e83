"""Where a run's wall-clock goes besides its updates: a few spans, cheap enough to be always on.

`data` is the wait for the loader, `log` observers and metrics.jsonl, `evaluation` and
`checkpoint` what they say. A span inside another counts for itself only. They are told with
each update and stand in no line of metrics.jsonl, which a resume repeats bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """Seconds by name since they were last taken.

    >>> spans = Spans()
    >>> with spans("evaluation"):
    ...     with spans("log"):
    ...         pass
    >>> sorted(spans.take()), spans.take()
    (['evaluation', 'log'], {})
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self._seconds: dict[str, float] = {}
        self._inside = 0.0  # of spans that ended inside the one that is open

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count what happens inside as `name`."""
        began, outside = self.clock(), self._inside
        self._inside = 0.0
        try:
            yield
        finally:
            spent = self.clock() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + spent - self._inside
            self._inside = outside + spent

    def take(self) -> dict[str, float]:
        """The seconds; they begin anew."""
        taken, self._seconds = self._seconds, {}
        return taken
