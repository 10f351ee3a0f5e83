"""INT and TERM, from the first line of the command to its last: status 130, one answer.

Only what costs nothing to import: it runs before everything else. In a process that only calls
lehr's functions nothing here happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

STATUS = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_owned = False
_seen = False


def expected(words: Sequence[str]) -> str:
    """What the same command does after an interrupt: a run has checkpoints.

    >>> expected(["run", "r.yaml"]), expected(["doctor", "run.csv"])
    ('the same command goes on from here', 'the same command begins again')
    """
    verb = next((word for word in words if not word.startswith("-")), "")
    return f"the same command {'goes on from here' if verb == 'run' else 'begins again'}"


def leave_at_once(_signal: int, _frame: FrameType | None) -> None:
    """While modules load an exception would surface as another one: answer and end here."""
    told = expected(sys.argv[1:])
    if "--json" in sys.argv[1:]:
        problem = {"where": "interrupted", "value": None, "expected": told}
        answer = {"error": {"kind": "interrupted", "problems": [problem]}}
        os.write(1, json.dumps(answer).encode() + b"\n")
    os.write(2, f"\n  interrupted: {told}\n".encode())
    os._exit(STATUS)


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """While a verb works: as Ctrl-C, so that files are closed and ledgers written."""
    global _seen
    _seen = True
    raise KeyboardInterrupt


def own() -> None:
    """The process is a command: its signals are answered here from now on."""
    global _owned
    _owned = True
    _set(leave_at_once)


def working() -> None:
    """A verb begins."""
    global _seen
    _seen = False
    if _owned:
        _set(interrupt)


def deaf() -> None:
    """The answer is being given: a signal must not add a second one."""
    if _owned:
        for name in _SIGNALS:
            signal.signal(name, signal.SIG_IGN)


def seen() -> bool:
    """A signal arrived: an error after it may be how a library passed it on."""
    return _seen


def _set(handler: object) -> None:
    for name in _SIGNALS:
        if signal.getsignal(name) is not signal.SIG_IGN:  # nohup and its like stay
            signal.signal(name, handler)  # type: ignore[arg-type]
