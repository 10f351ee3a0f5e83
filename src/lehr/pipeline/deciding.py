"""`lehr doctor RECIPE|RUN --run-tests`: the decisive tests of findings, or of a recipe to come.

Each stage is made ready as for training and handed to the tests instead of the engine. A
recipe's stages begin from the base; a run's stage from its parent, where it did begin.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lehr.data.packing import merge, pack
from lehr.diagnosis.decisive import CONFIRMS, WITHDRAWS, Answer, Desk, timed
from lehr.diagnosis.decisive_tests import BESIDE, TESTS
from lehr.diagnosis.doctor import Finding
from lehr.diagnosis.doctor_table import TABLE
from lehr.errors import Problem, RecipeError
from lehr.objectives.base import Objective
from lehr.pipeline.branches import branch_in_fp32, branch_of_half, fp32, resume
from lehr.pipeline.events import Events, Listener
from lehr.pipeline.examining import examine
from lehr.pipeline.files import read_json
from lehr.pipeline.folder import at_rest
from lehr.pipeline.planning import Prepared, prepare
from lehr.pipeline.run_stages import key_of, parent_of, stage_folder
from lehr.pipeline.stage_run import train_stage
from lehr.pipeline.staging import PlannedStage
from lehr.pipeline.states import State
from lehr.recipe.loading import load_recipe
from lehr.stages.context import StageContext

UPDATES, HELDOUT = 8, 16  # updates that are drawn; held-out examples
GENERAL = (*TESTS, "resume", "fp32")  # what a recipe is asked before its run


@dataclass(frozen=True)
class Decided:
    """One finding (or stage) with the answers of its tests.

    finding  None for a recipe that has not run
    answers  empty where the doctor's table names no test that can be run
    """

    stage: str
    finding: Finding | None
    answers: tuple[Answer, ...]

    @property
    def verdict(self) -> str:
        """confirmed, withdrawn, or open."""
        said = [one.verdict for one in self.answers]
        if CONFIRMS in said:
            return "confirmed"
        return "withdrawn" if WITHDRAWS in said else "open"

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "finding": None if self.finding is None else self.finding.as_json(),
            "verdict": self.verdict,
            "tests": [one.as_json() for one in self.answers],
        }


@dataclass(frozen=True)
class Report:
    """Everything that was decided; `notes`: what could not be tested."""

    decided: tuple[Decided, ...]
    notes: tuple[str, ...] = ()

    @property
    def confirmed(self) -> bool:
        return any(one.verdict == "confirmed" for one in self.decided)

    def as_json(self) -> dict[str, Any]:
        """The object of `lehr doctor ... --run-tests --json`."""
        return {
            "confirmed": self.confirmed,
            "decided": [one.as_json() for one in self.decided],
            "notes": list(self.notes),
        }


def run_tests(target: Path, *, stage: str = "", listeners: Sequence[Listener] = ()) -> Report:
    """The tests that the findings of a run name; of a recipe the general set, stage by stage.

    stage  only the one of this name

    Nothing is written beside `target`. Raises RecipeError for what is neither recipe nor run.
    """
    events = Events(None, listeners)
    if target.is_dir():
        return _of_run(target.absolute(), stage, events)
    if target.suffix not in (".yaml", ".yml", ".json"):
        expected = "a recipe (.yaml) or the folder of a run: tests need the model and the data"
        raise RecipeError(Problem(str(target), expected))
    return _of_recipe(target, stage, events)


def _of_recipe(path: Path, stage: str, events: Events) -> Report:
    decided = []
    with tempfile.TemporaryDirectory() as name:
        aside = Path(name)
        recipe = load_recipe(path)
        names = [
            f"{number:02d}-{one.name or one.kind}" for number, one in enumerate(recipe.stages, 1)
        ]
        chosen = [name for name in names if not stage or stage in (name, name[3:])]
        if not chosen:  # said before a model is loaded
            expected = f"a stage of the recipe: {', '.join(names)}"
            raise RecipeError(Problem("--stage", expected, stage))
        prepared = prepare(recipe, aside, events, None, write=False)
        for planned in prepared.stages:
            if planned.folder_name not in chosen:
                continue
            base = prepared.bench.base
            work = _Stage(prepared, planned, base, "check", aside, events)
            decided.append(Decided(planned.folder_name, None, work.answers(GENERAL)))
            prepared.bench.become(base)
    return Report(tuple(decided))


def _of_run(folder: Path, stage: str, events: Events) -> Report:
    if not (folder / "recipe.yaml").is_file() or not (folder / "plan.json").is_file():
        expected = "the folder of a run (with recipe.yaml and plan.json), or a recipe"
        raise RecipeError(Problem(str(folder), expected))
    if stage:
        stage = stage_folder(folder, stage).name
    diagnosis = examine(folder)
    findings = [one for one in diagnosis.findings if not stage or stage in ("", one.stage)]
    if not findings:
        said = (
            "nothing suspicious in the run's curves: no test to run "
            "(of a recipe instead of a run, all tests are performed)"
        )
        return Report((), (said,))
    decided: list[Decided] = []
    with at_rest(folder), tempfile.TemporaryDirectory() as name:
        aside = Path(name)
        recipe = load_recipe(folder / "recipe.yaml")
        plan = read_json(folder / "plan.json")
        prepared = prepare(recipe, folder, events, plan, write=False, cache=aside / "rows")
        for finding in findings:
            place = stage_folder(folder, finding.stage)
            probe = TABLE[finding.name].probe
            if not probe:
                decided.append(Decided(place.name, finding, ()))
                continue
            planned = next(one for one in prepared.stages if one.folder_name == place.name)
            parent = parent_of(prepared, planned, place)
            work = _Stage(prepared, planned, parent, key_of(place), aside, events)
            names = (probe, *BESIDE.get(probe, ()))
            decided.append(Decided(place.name, finding, work.answers(names, place, finding)))
    return Report(tuple(decided))


class _Stage:
    """One stage, made ready for its tests."""

    def __init__(
        self,
        prepared: Prepared,
        planned: PlannedStage,
        parent: State,
        key: str,
        aside: Path,
        events: Events,
    ) -> None:
        self.prepared, self.planned, self.parent = prepared, planned, parent
        self.key, self.aside, self.events = key, aside, events

    def answers(
        self, names: Sequence[str], place: Path | None = None, finding: Finding | None = None
    ) -> tuple[Answer, ...]:
        found: list[Answer] = []

        def drive(context: StageContext, objective: Objective) -> None:
            begin = context.batches.state()
            desk = desk_of(context, objective, self.planned, self._untrained)
            for name in names:
                self.events.emit("notice", f"{context.name}: test {name}", durable=False)
                context.batches.load(begin)
                found.append(self._answer(name, desk, context, objective, place, finding))

        with self._folder() as folder:
            train_stage(
                self.prepared, self.planned, folder, self.key, self.parent, self.events,
                drive=drive,
            )  # fmt: skip
        return tuple(found)

    def _answer(
        self,
        name: str,
        desk: Desk,
        context: StageContext,
        objective: Objective,
        place: Path | None,
        finding: Finding | None,
    ) -> Answer:
        test: Callable[[Desk], Answer] | None = TESTS.get(name)
        if name == "rate_halved" and place is not None and finding is not None:
            test = lambda _: branch_of_half(context, objective, place, self.aside, finding)  # noqa: E731
        elif name == "resume":
            test = lambda _: resume(context, objective, self.aside)  # noqa: E731
        elif name == "fp32":
            test = lambda _: self._fp32(desk, place, finding)  # noqa: E731
        assert test is not None, name
        return timed(test, desk)

    def _fp32(self, desk: Desk, place: Path | None, finding: Finding | None) -> Answer:
        """The stage again, in fp32: a second model."""
        if desk.settings.precision == "fp32":
            return fp32(desk, None)
        recipe = self.prepared.recipe
        stages = [one.model_copy(update={"precision": "fp32"}) for one in recipe.stages]
        other = recipe.model_copy(update={"stages": stages})
        prepared = prepare(
            other, self.prepared.folder, self.events, None, write=False, cache=self.aside / "rows"
        )
        planned = prepared.stages[self.planned.index]
        parent = prepared.bench.base if self.parent.kind == "base" else self.parent
        answers: list[Answer] = []

        def drive(context: StageContext, objective: Objective) -> None:
            if place is not None and finding is not None:
                found = branch_in_fp32(context, objective, place, self.aside, finding)
                if found is not None:
                    answers.append(found)
                    return
            answers.append(fp32(desk, desk_of(context, objective, planned, self._untrained)))

        with self._folder() as folder:
            train_stage(prepared, planned, folder, self.key, parent, self.events, drive=drive)
        return answers[0]

    @property
    def _untrained(self) -> bool:
        return self.prepared.bench.is_tiny and self.parent.kind == "base"

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.aside) as name:
            yield Path(name)


def desk_of(
    context: StageContext, objective: Objective, planned: PlannedStage, untrained: bool
) -> Desk:
    """What the tests work on; the batches stand after the updates that were drawn."""
    pairs = context.stage.kind == "preference"
    known = dict(context.batches.items())
    updates = [context.batches.next() for _ in range(min(UPDATES, context.settings.updates))]
    examples = [
        one
        for packs in updates
        for each in packs
        for one in pack([(item, known[item]) for item in each.items], context.pack_length, False)
    ]
    heldout = []
    if not pairs:  # the reference of held-out pairs is not computed
        rows = list(enumerate(planned.heldout()[:HELDOUT]))
        heldout = pack(rows, context.pack_length, context.stage.packing) if rows else []
    names = (context.seed, context.stage.kind, context.parent_key)
    chance = math.log(2.0) if pairs else math.log(context.model.vocabulary_size)
    # A test moves weights by itself: averages, guards and their files are the engine's.
    settings = replace(context.settings, precision=context.model.precision)
    return Desk(
        context.model, objective, settings, names, merge, updates, examples, heldout, chance,
        untrained, pairs,
    )  # fmt: skip
