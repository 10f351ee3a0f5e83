"""`lehr plan`: everything a run would settle, and nothing trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lehr.device import choose
from lehr.errors import Problem, RecipeError
from lehr.pipeline.events import Events, Listener
from lehr.pipeline.files import read_json
from lehr.pipeline.folder import PLANNED, claimed, place_of
from lehr.pipeline.forecasting import forecast_plan, is_forecast
from lehr.pipeline.numeric_report import NumericReport, numeric_report
from lehr.pipeline.planning import prepare
from lehr.pipeline.probing import check_gradients, find_rate
from lehr.pipeline.run import announce, measured_gates, shown, write_plan
from lehr.recipe.loading import recipe_notices
from lehr.recipe.resolve import resumed
from lehr.training.resources import memory_errors


@dataclass(frozen=True)
class Plan:
    """A plan and where its files lie."""

    plan: dict[str, Any]
    masks: list[dict[str, Any]]
    strategy: str
    strategy_path: str
    numerics: NumericReport | None = None
    checks: dict[str, Any] = field(default_factory=dict)  # that were asked for, by name

    def as_json(self) -> dict[str, Any]:
        """The object of `lehr plan --json`."""
        stages = self.plan["stages"]
        peak = max((stage["memory"] for stage in stages), key=lambda memory: memory["peak"])
        return {
            "stages": stages,
            "memory": peak,
            "seconds": sum(stage["seconds"] for stage in stages),
            "masks": self.masks,
            "schedule": {stage["folder"]: stage["curve"] for stage in stages},
            "gates": self.plan["gates"],
            "findings": self.plan["findings"],
            **({} if self.numerics is None else {"numerics": self.numerics.as_json()}),
            **self.checks,
        }

    def _repr_markdown_(self) -> str:
        return self.strategy


def plan(
    recipe: Any,
    *,
    name: str | None = None,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
    numerics: bool = False,
    gradcheck: bool = False,
    find_lr: bool = False,
    gflops: float | None = None,
) -> Plan:
    """Read the data, load the model, settle every `auto`, write plan.json and strategy.md.

    numerics   the range of the first update's gradients: one backward pass in fp32
    gradcheck  compare each stage's gradient with float64 and with finite differences
    find_lr    range test of the first stage's learning rate
    gflops     of a machine elsewhere, where the model's folder has a config.json and no weights:
               then memory and time are forecast on sizes alone, and nothing is written

    Raises RecipeError with all problems, and OutOfResources.
    """
    if is_forecast(recipe):
        asked = {"numerics": numerics, "gradcheck": gradcheck, "find_lr": find_lr}
        return _forecast(recipe, [name for name, on in asked.items() if on], gflops, listeners)
    if gflops is not None:
        text = "a model folder without weights: this machine's own rate is measured"
        raise RecipeError(Problem("--tflops", text, gflops / 1e3))
    choose(recipe.device)
    name, folder = place_of(recipe, name, out)
    recipe = resumed(recipe, folder)
    with claimed(folder, name, fresh=False), memory_errors():
        events = Events(None, listeners)
        events.emit("run_started", f"plan of {name}: {recipe.model}")
        for notice in recipe_notices(recipe):
            events.emit("notice", notice)
        stored = read_json(folder / "plan.json")
        if (folder / "ledger.json").exists():  # the record of a run stays as the run left it
            folder = folder / PLANNED
        prepared = prepare(recipe, folder, events, stored=stored)
        announce(prepared, events)
        _, gates = measured_gates(prepared)
        write_plan(prepared, gates, events)
        if numerics:
            text = "one backward pass in fp32 for the range of the gradients"
            events.emit("notice", text, durable=False)
        report = numeric_report(prepared) if numerics else None
        masks = [
            {"stage": one.folder_name, "spans": audit["mask_sample"]}
            for one in prepared.stages
            if (audit := read_json(folder / one.folder_name / "audit.json"))
        ]
        checks: dict[str, Any] = {}
        if gradcheck:
            checks["gradient_check"] = check_gradients(prepared, events)
        if find_lr:
            checks["learning_rate"] = find_rate(prepared, events)
        path = folder / "strategy.md"
        strategy = path.read_text(encoding="utf-8")
        return Plan(prepared.plan, masks, strategy, shown(path), report, checks)


def _forecast(
    recipe: Any, checks: Sequence[str], gflops: float | None, listeners: Sequence[Listener]
) -> Plan:
    if checks:
        text = f"a model with weights: {recipe.model} has none here"
        raise RecipeError([Problem(f"--{one.replace('_', '-')}", text) for one in checks])
    events = Events(None, listeners)
    events.emit("run_started", f"forecast: {recipe.model}")
    for notice in recipe_notices(recipe):
        events.emit("notice", notice)
    return Plan(forecast_plan(recipe, events, gflops), [], "", "")
