"""A clock that stands still while other programs have this thread's processor.

On Linux the kernel counts how long a thread was ready to run and was not let (run delay, second
number of /proc/thread-self/schedstat). Elsewhere the clock is the plain one.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

_SCHEDSTAT = "/proc/thread-self/schedstat"
_open: dict[int, int] = {}  # by process


def run_delay() -> float:
    """Seconds that this thread (the first one to ask) was ready and did not run; 0.0 elsewhere."""
    here = os.getpid()
    if here not in _open:
        _open[here] = -1
        with suppress(OSError):
            _open[here] = os.open(_SCHEDSTAT, os.O_RDONLY)
    if _open[here] < 0:
        return 0.0
    try:
        return int(os.pread(_open[here], 100, 0).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def fair_clock() -> float:
    """Seconds, as of `time.perf_counter`, without those that other programs took."""
    return time.perf_counter() - run_delay()
