"""Restarts: the optimizer begins anew within a run, by plan or where the run went back.

Its moments remember: after a spike AdamW's second one holds steps short for about 1 / (1 - beta2)
updates, and its first one goes on pulling. A restart empties them (SPAM, arXiv 2501.06842, does so
every 500 updates) and may let the rate climb again. From the last restart r on, update u has

    rate = schedule(u) (initial + (1 - initial) (u - r + 1) / warmup)     while u - r < warmup

Both follow from the update's number and the quarantine's record alone, so a resume repeats them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

from lehr.errors import Problem
from lehr.training.schedules import is_number


@dataclass(frozen=True)
class RestartSettings:
    """When the optimizer begins anew, and how.

    every         updates between two restarts; None = none by plan
    after_rewind  one at the state that a guarded run goes back to
    moments       empty them
    warmup        updates in which the rate climbs again
    initial       share of the rate that it climbs from
    """

    every: int | None = None
    after_rewind: bool = False
    moments: bool = True
    warmup: int = 0
    initial: float = 0.0

    def problems(
        self, has_moments: bool, goes_back: bool, updates: int | None = None
    ) -> list[Problem]:
        """Everything that is wrong with these values.

        has_moments  the optimizer holds a state; goes_back: the guard may rewind
        updates      of the stage, where that is known
        """
        found = []
        if self.every is not None and not _is_whole(self.every, 1):
            found.append(Problem("restart.every", "a whole number, at least 1", self.every))
        if not _is_whole(self.warmup, 0):
            found.append(Problem("restart.warmup", "a whole number of updates", self.warmup))
        if not is_number(self.initial) or not 0 <= self.initial <= 1:
            found.append(Problem("restart.initial", "a share from 0 to 1", self.initial))
        if found:
            return found
        if self.every is None and not self.after_rewind:
            found.append(Problem("restart", "every: updates, or after_rewind: true"))
        if not self.moments and not self.warmup:
            found.append(Problem("restart", "moments: true, or a warmup: else nothing restarts"))
        if self.moments and not has_moments:
            expected = "false: this optimizer has no moments"
            found.append(Problem("restart.moments", expected, self.moments))
        if self.after_rewind and not goes_back:
            expected = "guard: rewind, which is what goes back"
            found.append(Problem("restart.after_rewind", expected, self.after_rewind))
        if self.every is not None and self.warmup > self.every:
            expected = f"at most restart.every ({self.every}), or the rate never gets up"
            found.append(Problem("restart.warmup", expected, self.warmup))
        elif updates is not None and self.warmup and self.warmup >= updates:
            expected = f"less than the stage's {updates} updates, or the rate never gets up again"
            found.append(Problem("restart.warmup", expected, self.warmup))
        if updates is not None and self.every is not None and self.every >= updates:
            expected = f"less than the stage's {updates} updates, or nothing restarts"
            found.append(Problem("restart.every", expected, self.every))
        return found


def climb(since: int, warmup: int, initial: float) -> float:
    """Share of the schedule's rate, `since` updates after a restart.

    >>> [climb(since, 4, 0.2) for since in (0, 1, 3, 4)]
    [0.4, 0.6000000000000001, 1.0, 1.0]
    """
    if since >= warmup:
        return 1.0
    return initial + (1.0 - initial) * ((since + 1) / warmup)


class Restarts:
    """The restarts of one run; None as settings: there are none.

    returned_to  gives the update that the run went back to last, or None
    """

    def __init__(
        self, settings: RestartSettings | None, returned_to: Callable[[], int | None]
    ) -> None:
        self._settings, self._returned_to = settings, returned_to

    def last(self, update: int) -> int | None:
        """Where the last restart up to applied update `update` (from 0) lies; None before one."""
        settings = self._settings
        if settings is None:
            return None
        found = []
        if settings.every is not None and update >= settings.every:
            found.append(update - update % settings.every)
        returned_to = self._returned_to() if settings.after_rewind else None
        if returned_to is not None and returned_to <= update:
            found.append(returned_to)
        return max(found, default=None)

    def share(self, update: int) -> float:
        """Factor on the schedule's rate of applied update `update`."""
        last, settings = self.last(update), self._settings
        if last is None or settings is None:
            return 1.0
        return climb(update - last, settings.warmup, settings.initial)

    def begin(self, optimizer: Optimizer, update: int) -> bool:
        """Before the step of applied update `update`; True where the optimizer begins anew."""
        settings = self._settings
        if settings is None or self.last(update) != update:
            return False
        if settings.moments:
            optimizer.state.clear()
        return True


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
