"""Where a run stands, and what it has done when it is finished."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class Progress:
    """Where a run stands; saved in every checkpoint.

    update                      applied updates
    attempt, skipped            tried updates, and those that were passed over
    nonfinite_in_a_row          of the newest attempts
    tokens, supervised_tokens   of applied updates, all ranks
    seconds                     in attempts, over all processes of the run; no evaluation
    loss                        of the last applied update
    best_value                  lowest first value of the evaluations, at `best_update`
    evaluations                 (update, {name: value or None if not finite}) in order
    """

    update: int = 0
    attempt: int = 0
    skipped: int = 0
    nonfinite_in_a_row: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    best_update: int | None = None
    best_value: float | None = None
    evaluations_without_improvement: int = 0
    stopped_early: bool = False
    evaluations: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)

    def applied(self, tokens: int, supervised_tokens: int, loss: float) -> None:
        """The weights moved."""
        self.attempt += 1
        self.update += 1
        self.nonfinite_in_a_row = 0
        self.tokens += tokens
        self.supervised_tokens += supervised_tokens
        self.loss = loss

    def passed_over(self, finite: bool) -> None:
        """The weights did not move; `finite`: nothing counts against the non-finite limit."""
        self.attempt += 1
        self.skipped += 1
        self.nonfinite_in_a_row = 0 if finite else self.nonfinite_in_a_row + 1

    def overflowed(self) -> None:
        """The loss scale was too large: the weights did not move, and nothing is wrong."""
        self.attempt += 1
        self.skipped += 1

    def evaluated(self, values: Mapping[str, float]) -> bool:
        """Note an evaluation; True where its first value is the lowest so far.

        A value that is not finite is never best.
        """
        stored = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.evaluations.append((self.update, stored))
        decisive = next(iter(values.values()))
        best = self.best_value
        if not math.isfinite(decisive) or (best is not None and decisive >= best):
            self.evaluations_without_improvement += 1
            return False
        self.best_update, self.best_value = self.update, decisive
        self.evaluations_without_improvement = 0
        return True

    def state(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where `state()` was."""
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])
        self.evaluations = [(update, dict(values)) for update, values in state["evaluations"]]


@dataclass(frozen=True)
class TrainingResult:
    """What a finished run did, over all processes that worked on it.

    Fields are those of `Progress`, and:
    promoted_update  whose weights the model holds now
    averaged         updates in their average; 0 = the weights themselves
    resumed_from     update that this process began at
    """

    updates: int
    attempts: int
    skipped: int
    tokens: int
    supervised_tokens: int
    seconds: float
    loss: float | None
    best_update: int | None
    best_value: float | None
    promoted_update: int
    stopped_early: bool
    resumed_from: int
    evaluations: tuple[tuple[int, Mapping[str, float | None]], ...]
    averaged: int = 0


def result_of(
    progress: Progress, promoted_update: int, resumed_from: int, averaged: int = 0
) -> TrainingResult:
    """The result of a run that ended with `progress`."""
    return TrainingResult(
        updates=progress.update,
        attempts=progress.attempt,
        skipped=progress.skipped,
        tokens=progress.tokens,
        supervised_tokens=progress.supervised_tokens,
        seconds=progress.seconds,
        loss=progress.loss,
        best_update=progress.best_update,
        best_value=progress.best_value,
        promoted_update=promoted_update,
        stopped_early=progress.stopped_early,
        resumed_from=resumed_from,
        evaluations=tuple(progress.evaluations),
        averaged=averaged,
    )
