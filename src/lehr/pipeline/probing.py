"""Checks of `lehr plan` that need the stage as it would train: gradients, learning rate.

Each stage is made ready from the base as for training, and its own objective is handed to
the check instead of the engine. Nothing is trained, and nothing of it is kept but a report.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lehr.data.packing import merge
from lehr.diagnosis.gradient_check import check_gradient
from lehr.diagnosis.learning_rate_finder import find_learning_rate
from lehr.objectives.base import Objective
from lehr.pipeline.events import Events
from lehr.pipeline.files import write_json
from lehr.pipeline.planning import Prepared
from lehr.pipeline.stage_run import strict, train_stage
from lehr.pipeline.staging import PlannedStage
from lehr.stages.context import StageContext

GRADIENT_PACKS = 2  # the shortest of the first update: a slice, which float64 can afford


def check_gradients(prepared: Prepared, events: Events) -> list[dict[str, Any]]:
    """`lehr plan --gradcheck`: each stage's gradient, from the base; gradient_check.json."""
    reports = []
    for planned in prepared.stages:

        def check(context: StageContext, objective: Objective) -> None:
            packs = sorted(context.batches.next(), key=lambda one: one.tokens)[:GRADIENT_PACKS]
            precision, seed = context.settings.precision, context.seed
            found = check_gradient(context.model, objective, packs, precision, seed)
            events.emit("gradient_check", f"{context.name}: {found}", **found.as_json())
            reports.append({"stage": context.name, **found.as_json()})

        _drive(prepared, planned, events, check)
    write_json(prepared.folder / "gradient_check.json", strict(reports))
    return list(strict(reports))


def find_rate(prepared: Prepared, events: Events) -> dict[str, Any]:
    """`lehr plan --find-lr`: the first stage's range test; learning_rate.json.

    Later stages begin from weights that are not trained yet: they have no test.
    """
    report: dict[str, Any] = {}

    def find(context: StageContext, objective: Objective) -> None:
        def told(step: int, rate: float, change: float) -> None:
            text = f"range test: rate {rate:.2g}, loss {change:+.4f}"
            events.emit("notice", text, durable=False)

        found = find_learning_rate(
            context.model,
            objective,
            context.batches,
            context.settings,
            (context.seed, context.stage.kind),
            merge=merge,
            progress=told,
        )
        asked = context.settings.learning_rate
        text = f"{context.name}: {found} (the recipe says {asked:g})"
        events.emit("learning_rate", text, recommended=found.recommended)
        report.update({"stage": context.name, "recipe": asked, **found.as_json()})

    _drive(prepared, prepared.stages[0], events, find)
    write_json(prepared.folder / "learning_rate.json", strict(report))
    return dict(strict(report))


def _drive(
    prepared: Prepared,
    planned: PlannedStage,
    events: Events,
    drive: Callable[[StageContext, Objective], None],
) -> None:
    base = prepared.bench.base
    with tempfile.TemporaryDirectory() as folder:
        train_stage(prepared, planned, Path(folder), "check", base, events, drive=drive)
    prepared.bench.become(base)  # an adapter that was made for the check is gone
