"""Which suites a run has, and which gates its stages must pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lehr.data.shapes import Example
from lehr.errors import Problem, RecipeError
from lehr.evaluation.claims import FactClaims
from lehr.evaluation.default_gates import PROTECTIONS, PlannedGate, plan_gates
from lehr.evaluation.gates import Against
from lehr.evaluation.heldout import HeldoutBits, HeldoutLoss, PairAccuracy
from lehr.evaluation.refusals import BenignRequests
from lehr.evaluation.suites import Suite
from lehr.evaluation.world_suites import (
    MicroworldChoice,
    MicroworldSkills,
    OverRefusal,
    Refusal,
    Sycophancy,
)
from lehr.pipeline.sources import ReadSource, overflow_of
from lehr.recipe.resolve import improve_gate


def run_suites(
    recipe: Any, sources: Mapping[str, ReadSource], own: Suite | None = None
) -> dict[str, Suite]:
    """Suites that apply to this model and data, by name; a source has one of its own name.

    own: what `forgetting` is where the run does not pretrain its model itself.
    """
    found: dict[str, Suite] = {}
    for stage in recipe.stages:
        for name in stage.mixture():
            suite = _source_suite(sources[name], stage)
            if suite is not None:
                found.setdefault(name, suite)
    world = next((source.world for source in sources.values() if source.world), None)
    if world is not None:
        found |= {
            "skills": MicroworldSkills(world),
            "facts": MicroworldSkills(world, kind="facts"),
            "choice": MicroworldChoice(world),
            "refusal": Refusal(world),
            "over_refusal": OverRefusal(world),
            "sycophancy": Sycophancy(world),
        }
    elif not recipe.model.startswith("tiny:"):
        found |= {"over_refusal": BenignRequests(), "sycophancy": FactClaims()}
    if own is not None:
        found["forgetting"] = own
    elif recipe.model.startswith("tiny:") and (texts := _pretrained_text(recipe, sources)):
        found["forgetting"] = HeldoutBits("forgetting", texts)
    return found


def _source_suite(source: ReadSource, stage: Any) -> Suite | None:
    if not source.heldout:
        return None
    settings: dict[str, Any] = {
        "train_on": source.spec.train_on,
        "max_length": stage.max_length,
        "overflow": overflow_of(source, stage),
    }
    if source.kind == "text":
        return HeldoutBits(source.name, source.heldout, **settings)
    if source.kind == "pair":
        return PairAccuracy(source.name, source.heldout, **settings)
    return HeldoutLoss(source.name, source.heldout, **settings)


def _pretrained_text(recipe: Any, sources: Mapping[str, ReadSource]) -> list[Example]:
    names = [name for stage in recipe.stages if stage.kind == "pretrain" for name in stage.data]
    return [example for name in dict.fromkeys(names) for example in sources[name].heldout]


def stage_gates(
    recipe: Any, index: int, suites: Mapping[str, Suite], has_parent: bool
) -> list[PlannedGate]:
    """The gates of stage `index`: improve against the parent, protect against parent and base.

    has_parent: a stage ran before, so that parent and base are two things. The first stage
    of a tiny model has nothing to protect, and no later one is held to its random base.
    Raises RecipeError for gates that ask for what this run cannot measure, all at once.
    """
    stage = recipe.stages[index]
    wanted = improve_gate(recipe, index)
    improve = None if wanted is None else ".".join(wanted)
    sides: list[Against] = ["parent", "base"] if has_parent else ["parent"]
    if recipe.model.startswith("tiny:"):
        sides = ["parent"] if has_parent else []
    budgets = {name: min(recipe.gates.items, len(one.items)) for name, one in suites.items()}
    asked = recipe.gates.protect
    limited = {} if asked is None else {n: limit for n, limit in asked.items() if limit is not None}
    defaults = None if asked is None else _figures(n for n, limit in asked.items() if limit is None)
    planned: list[PlannedGate] = []
    problems: list[Problem] = []
    groups: list[tuple[str | None, Mapping[str, float] | None, bool]] = [(improve, limited, False)]
    if defaults is None or defaults:
        groups.append((None, defaults, True))
    for wish, limits, widen in groups:
        try:
            planned += plan_gates(
                stage.kind,
                suites,
                improve=wish,
                protect=limits if sides else {},
                widen=widen,
                against=sides or ["parent"],
                budgets=budgets,
            )
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return planned


def _figures(names: Iterable[str]) -> dict[str, float]:
    """Default limits of protect gates that the recipe asks for without a figure."""
    return {name: PROTECTIONS[name].figure or 0.0 for name in names}
