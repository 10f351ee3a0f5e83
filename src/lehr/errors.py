"""Every error that lehr raises on purpose, with the exit status of the command line.

A problem says what, where, the value, and what was expected; problems of one
kind are collected and raised together, so that a user fixes a recipe once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `where` is `file:line key.path`, a file or a row.

    says  `expected` is a sentence by itself, where nothing else could have been given

    >>> print(Problem("a.yaml:3 seed", "a whole number", "x"))
    a.yaml:3 seed: expected a whole number (found 'x')
    """

    where: str
    expected: str
    value: object = None
    says: bool = False

    def __str__(self) -> str:
        found = "" if self.value is None else f" (found {self.value!r})"
        return f"{self.where}: {'' if self.says else 'expected '}{self.expected}{found}"

    def as_json(self) -> dict[str, Any]:
        value = self.value
        if not isinstance(value, str | int | float | bool | type(None)):
            value = repr(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = repr(value)  # JSON has no infinity and no NaN
        return {"where": self.where, "value": value, "expected": self.expected}


class LehrError(Exception):
    """Base of every error that a user can act on."""

    exit_status = 1
    kind = "error"
    says = False  # its problems are sentences

    def __init__(self, problems: Sequence[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = [Problem(where="lehr", expected=problems, says=True)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems = [replace(one, says=True) if self.says else one for one in problems]
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def as_json(self) -> dict[str, Any]:
        problems = [problem.as_json() for problem in self.problems]
        return {"error": {"kind": self.kind, "problems": problems}}


class RecipeError(LehrError):
    """The recipe, its data or its model was refused before any training."""

    exit_status = 2
    kind = "recipe"


class GateRefused(LehrError):
    """A gate refused or stayed undetermined, or an export is not what was trained."""

    exit_status = 3
    kind = "gate"


class Diverged(LehrError):
    """Training was stopped because it diverged; the last good checkpoint stands."""

    exit_status = 4
    kind = "diverged"


class OutOfResources(LehrError):
    """Memory or disk is too small: the message says what was needed and what was there."""

    exit_status = 5
    kind = "resources"


class Interrupted(LehrError):
    """INT or TERM arrived; the run can be resumed with the same command."""

    exit_status = 130
    kind = "interrupted"
    says = True
