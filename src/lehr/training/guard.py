"""The guard: says which update is unusual, from its loss, gradient, step and logits.

Every signal has a window of its own past accepted values (`robust`). The verdict comes before
the optimizer moves; the step itself can only be measured afterwards, so an unusual one is a
witness: it names the batch that is to blame when the losses after it are unusual too.
Pure decisions: what follows from them (skip, rewind, stop) is in `guarding`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lehr.errors import Problem
from lehr.training.robust import Kind, Window
from lehr.training.schedules import is_number

POLICIES = ("rewind", "skip", "stop")
LOSS, GRADIENT, STEP = "loss", "gradient norm", "update norm"
SHORTEST = 32
PATIENCE, MEMORY = 3, 8  # so many unusual ones among the newest attempts: the state is to blame
FARTHEST = 64  # applied updates that may be blamed
# Of a gradient norm: what is learnt by heart leaves gradients of 1e-6, of which the tenfold is
# usual and harmless; the step that it takes is still watched.
QUIET = 1e-4

_KINDS = {
    LOSS: Kind(logarithm=False, absolute=0.03, relative=0.02),
    GRADIENT: Kind(logarithm=True, absolute=0.15),
    STEP: Kind(logarithm=True, absolute=0.15),
    "log Z": Kind(logarithm=False, absolute=0.25),
    "attention logit": Kind(logarithm=False, absolute=0.5, relative=0.05),
}
_COLUMNS = {"log_z": "log Z", "attention_logit": "attention logit"}  # of the objective's metrics
_SOURCE = "source."


@dataclass(frozen=True)
class GuardSettings:
    """How a run is guarded.

    policy   what is done about an unusual update: rewind (skip it; where that does not help,
             go back to a saved state and pass the batches to blame over), skip, stop
    limit    spreads above the median that are usual
    window   accepted values that a signal is compared with
    rewinds  how often a run may go back; then it stops
    attention_queries  of each segment and layer, whose attention logits are watched; 0 = none
    """

    policy: str = "rewind"
    limit: float = 8.0
    window: int = 128
    rewinds: int = 3
    attention_queries: int = 0

    def problems(self) -> list[Problem]:
        """Everything that is wrong with these values."""
        found = []
        if self.policy not in POLICIES:
            found.append(Problem("guard.policy", ", ".join(POLICIES), self.policy))
        if not is_number(self.limit) or self.limit < 1:
            found.append(Problem("guard.limit", "a number of spreads, at least 1", self.limit))
        if not _is_whole(self.window) or self.window < SHORTEST:
            expected = f"a whole number of updates, at least {SHORTEST}"
            found.append(Problem("guard.window", expected, self.window))
        if not _is_whole(self.rewinds) or self.rewinds < 0:
            found.append(Problem("guard.rewinds", "a whole number, at least 0", self.rewinds))
        if not _is_whole(self.attention_queries) or self.attention_queries < 0:
            value = self.attention_queries
            found.append(Problem("guard.attention_queries", "a whole number, at least 0", value))
        return found


@dataclass(frozen=True)
class Alarm:
    """A signal above its limit."""

    signal: str
    value: float
    limit: float
    usual: float

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return f"{self.signal} is not finite"
        return f"{self.signal} {self.value:.4g} (usual {self.usual:.4g}, limit {self.limit:.4g})"


def signals_of(loss: float, norm: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """The signals of an update, by name, from its loss, gradient norm and metrics.

    Where the losses of sources are known, each one's stands for itself: their mixture changes
    from update to update, and that is no spike.

    >>> signals_of(3.0, 1.0, {"log_z": -9.0})
    {'gradient norm': 1.0, 'loss': 3.0, 'log Z': 9.0}
    >>> signals_of(3.0, 1.0, {"source.a.loss": 2.0, "source.b.loss": 4.0})
    {'gradient norm': 1.0, 'loss of a': 2.0, 'loss of b': 4.0}
    """
    signals = {GRADIENT: norm}
    sources = {
        f"{LOSS} of {name.removeprefix(_SOURCE).removesuffix('.loss')}": value
        for name, value in metrics.items()
        if name.startswith(_SOURCE) and name.endswith(".loss")
    }
    signals |= sources or {LOSS: loss}
    signals |= {name: abs(metrics[key]) for key, name in _COLUMNS.items() if key in metrics}
    return signals


class Guard:
    """The windows of a run's signals, and what was unusual lately."""

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self._windows: dict[str, Window] = {}
        self._applied: list[int] = []  # the newest attempts that moved the weights
        self._unusual: list[int] = []  # among the newest MEMORY attempts
        self._suspects: dict[int, float] = {}  # attempts whose own step was unusual, and it

    def judge(self, signals: Mapping[str, float]) -> Alarm | None:
        """The signal that is furthest above its limit, if one is. Changes nothing."""
        worst, excess = None, 0.0
        for name, value in signals.items():
            if name == GRADIENT and value < QUIET:
                continue
            found = self._window(name).judge(value, self.settings.limit)
            if found is None:
                continue
            beyond = (found.value - found.usual) / max(found.limit - found.usual, 1e-30)
            if beyond > excess:
                excess, worst = beyond, Alarm(name, found.value, found.limit, found.usual)
        return worst

    def accept(self, attempt: int, signals: Mapping[str, float]) -> None:
        """The attempt with these signals was applied."""
        self._applied = [*self._applied, attempt][-FARTHEST:]
        for name, value in signals.items():
            self._window(name).accept(value)

    def moved(self, attempt: int, step: float) -> Alarm | None:
        """The weights moved by `step` (per unit of learning rate).

        Half of the limit makes a suspect, which counts only once there is trouble; above the
        limit it is an alarm. One that is not finite is both, however few came before, and the
        first suspect of all.
        """
        if not math.isfinite(step):
            self._suspects[attempt] = sys.float_info.max  # JSON has no infinity
            return Alarm(STEP, step, sys.float_info.max, 0.0)
        window, limit = self._window(STEP), self.settings.limit
        if window.judge(step, limit / 2) is not None:
            newest = {k: v for k, v in self._suspects.items() if k > attempt - 2 * MEMORY}
            self._suspects = newest | {attempt: step}
        found = window.judge(step, limit)
        if found is None:
            window.accept(step)
            return None
        return Alarm(STEP, found.value, found.limit, found.usual)

    def forget_steps(self) -> None:
        """The optimizer begins anew: the steps so far say nothing about those to come."""
        self._windows.pop(STEP, None)

    def unusual(self, attempt: int) -> bool:
        """Note an unusual attempt; True where so many were lately that skipping is no help."""
        self._unusual = [one for one in self._unusual if one > attempt - MEMORY] + [attempt]
        return len(self._unusual) >= PATIENCE

    def to_blame(self, earlier: int) -> list[int]:
        """Attempts to quarantine when the state is to blame.

        earlier  how often the run went back before: each time it looks twice as far

        At first the last applied one before the trouble, or the one among the newest with the
        largest unusual step. Once that did not help, the unusual attempts themselves too.
        """
        start = min(self._unusual) if self._unusual else None
        before = [one for one in self._applied if start is None or one < start]
        blamed = before[-(2**earlier) :]
        witnesses = [one for one in self._suspects if one in before[-MEMORY:]]
        if earlier == 0:
            return [max(witnesses, key=self._suspects.__getitem__)] if witnesses else blamed
        return sorted({*blamed, *witnesses, *self._unusual})

    def state(self) -> dict[str, Any]:
        """Everything that a resume needs, as JSON."""
        return {
            "windows": {name: window.values for name, window in self._windows.items()},
            "applied": self._applied,
            "unusual": self._unusual,
            "suspects": list(self._suspects.items()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where `state()` was; nothing: to the start."""
        length = self.settings.window
        self._windows = {
            name: Window(_kind(name), length, values)
            for name, values in state.get("windows", {}).items()
        }
        self._applied = list(state.get("applied", ()))
        self._unusual = list(state.get("unusual", ()))
        self._suspects = dict(state.get("suspects", ()))

    def _window(self, name: str) -> Window:
        if name not in self._windows:
            self._windows[name] = Window(_kind(name), self.settings.window)
        return self._windows[name]


def _kind(name: str) -> Kind:
    return _KINDS.get(name, _KINDS[LOSS])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
