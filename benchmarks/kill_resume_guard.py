"""A `lehr run` in which one row spoils the weights, and which may kill itself while it goes back.

    python -m benchmarks.kill_resume_guard RECIPE OUT [POINT]

Child of `benchmarks.kill_resume --guard`. Once the row at line `LINE` of a stage's data has been
read, the trained matrices are another thing, as by a failing memory: its own loss is as usual,
those after it are not, and the guard goes back. POINT, one of `POINTS`, is where the process ends
itself by SIGKILL the first time that it passes there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from lehr.cli.main import main
from lehr.objectives.language import Language
from lehr.objectives.preference import Dpo
from lehr.training.metrics import MetricsFile
from lehr.training.quarantine import Quarantine
from lehr.training.store import Store

LINE = 117
SPOILT = -8.0  # factor on the trained matrices
GUARD = """
          micro_batch: 8, checkpoints_kept: 6,
          guard: {attention_queries: 2}, adaptive_clip: {kind: tensor, warmup: 10},
          restart: {every: 15, after_rewind: true, warmup: 3, initial: 0.2},"""
POINTS: dict[str, tuple[type, str, bool]] = {  # class, method, whether it dies after it
    "before the record": (Quarantine, "add", False),
    "after the record": (Quarantine, "add", True),
    "before the lines": (MetricsFile, "keep_aside", False),
    "after the lines": (MetricsFile, "keep_aside", True),
    "before the state": (Store, "resume", False),
    "after the state": (Store, "resume", True),
}


def poisoned(honest: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, after which the weights are spoilt where the row is in the pack."""

    def loss(self: Any, model: Any, pack: Any) -> Any:
        found = honest(self, model, pack)
        if torch.is_grad_enabled() and any(origin.line == LINE for origin in pack.origins):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data.mul_(SPOILT)
        return found

    return loss


def deadly(honest: Callable[..., Any], after: bool, back: bool) -> Callable[..., Any]:
    """The method, and the end; back: only where a running training goes back."""

    def method(self: Any, *values: Any, **keys: Any) -> Any:
        now = not back or keys.get("told") is False
        if now and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = honest(self, *values, **keys)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    return method


def child(recipe: str, out: str, point: str = "") -> None:
    for kind in (Language, Dpo):
        kind.loss = poisoned(kind.loss)  # type: ignore[method-assign]
    if point:
        kind, name, after = POINTS[point]
        setattr(kind, name, deadly(getattr(kind, name), after, name == "resume"))
    main(["run", recipe, "--out", out])


if __name__ == "__main__":
    child(*sys.argv[1:])
