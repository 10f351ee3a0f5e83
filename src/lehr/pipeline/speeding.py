"""`lehr doctor RECIPE --speed`: every stage of a recipe as it would train, for a few updates.

The stages are made ready from the base, the engine runs in a folder that is thrown away, and
nothing of it is kept but the report: a recipe's own folder is only claimed, so that no run is
under way in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lehr.data.packing import merge
from lehr.diagnosis.speed import Speed
from lehr.diagnosis.speed_probe import Workload, measure_speed
from lehr.errors import Problem, RecipeError
from lehr.models.halved import half_width
from lehr.models.language_model import LanguageModel
from lehr.objectives.base import Objective
from lehr.objectives.language import Language
from lehr.pipeline.events import Events, Listener
from lehr.pipeline.folder import LOCK, claimed, place_of
from lehr.pipeline.new_files import require_writable
from lehr.pipeline.planning import Prepared, prepare
from lehr.pipeline.stage_run import train_stage
from lehr.pipeline.staging import PlannedStage
from lehr.recipe.loading import load_recipe, recipe_notices
from lehr.recipe.resolve import resumed
from lehr.stages.context import StageContext
from lehr.training.allocator import keep_freed_memory


def speed(
    recipe: Any,
    *,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
    trace: Path | None = None,
    seconds: float = 4.0,
) -> dict[str, Speed]:
    """Where the time of each stage goes, by the stage's folder name.

    trace    a file for the profile of the last stage's updates (Chrome's format)
    seconds  of each of the three or four runs of a few updates, about

    Raises RecipeError with all problems, OutOfResources, and RecipeError where a run of this
    recipe is under way.
    """
    if trace is not None:
        require_writable(trace, "--trace: a new file (something stands there)")
    name, folder = place_of(recipe, None, out)
    recipe = resumed(recipe, folder)
    events = Events(None, listeners)
    events.emit("run_started", f"speed of {name}: {recipe.model}")
    for notice in recipe_notices(recipe):
        events.emit("notice", notice)
    found: dict[str, Speed] = {}
    keep_freed_memory()  # as the run does
    with tempfile.TemporaryDirectory() as aside:
        if (folder / LOCK).exists():
            with claimed(folder, name, fresh=False):  # two at once would measure each other
                pass
        prepared = prepare(recipe, Path(aside), events)
        for planned in prepared.stages:
            text = f"{planned.folder_name}: a few updates, timed, profiled, and changed"
            events.emit("notice", text, durable=False)
            found[planned.folder_name] = _of_stage(prepared, planned, trace, seconds, events)
    return found


def _of_stage(
    prepared: Prepared, planned: PlannedStage, trace: Path | None, seconds: float, events: Events
) -> Speed:
    base = prepared.bench.base
    found: list[Speed] = []

    def drive(context: StageContext, objective: Objective) -> None:
        keeps = planned.recompute.keeps

        def halved() -> LanguageModel | None:
            narrow = half_width(context.model)
            if narrow is not None:
                narrow.recompute(keeps)
            return narrow

        work = Workload(
            model=context.model,
            objective=objective,
            batches=context.batches,
            settings=context.settings,
            seed_names=context.seed_names,
            observers=context.observers,
            evaluate=context.evaluate,
            merge=merge,
            operations_per_token=planned.operations_per_token,
            keeps_all=lambda: context.model.recompute("none"),
            computes_again=lambda: context.model.recompute(keeps),
            halved=halved if isinstance(objective, Language) else None,
        )
        say = partial(events.emit, "notice", durable=False)
        found.append(measure_speed(work, seconds=seconds, trace=trace, say=say))

    silent = Events(None, ())
    with tempfile.TemporaryDirectory() as folder:
        train_stage(prepared, planned, Path(folder), "speed", base, silent, drive=drive)
    prepared.bench.become(base)
    return found[0]


def speed_of_file(
    path: Path,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
    trace: Path | None = None,
) -> dict[str, Speed]:
    """`speed` of a recipe file. Raises RecipeError for what is no recipe."""
    if path.is_dir():
        expected = "a recipe: of a run's folder, its recipe.yaml"
        raise RecipeError(Problem(f"{path} --speed", expected, "a folder"))
    if path.suffix not in (".yaml", ".yml"):
        expected = "a recipe (.yaml): a curve does not say what a machine waits for"
        raise RecipeError(Problem(f"{path} --speed", expected))
    return speed(load_recipe(path, overrides), out=out, listeners=listeners, trace=trace)
