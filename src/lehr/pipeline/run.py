"""The main job: stages in order, each judged, each promoted or its parent kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lehr.device import choose, peak_of_card
from lehr.errors import Diverged, Interrupted, LehrError, Problem, RecipeError
from lehr.evaluation.default_gates import PlannedGate
from lehr.evaluation.forgetting import OwnText
from lehr.evaluation.scoring import ScoreStore
from lehr.evaluation.suites import Suite
from lehr.pipeline.events import Events, Listener
from lehr.pipeline.exporting import export_promoted
from lehr.pipeline.files import read_json, write_json, write_text
from lehr.pipeline.folder import claimed, place_of
from lehr.pipeline.judging import Judge
from lehr.pipeline.keys import origin_of, versions
from lehr.pipeline.ledger import Ledger
from lehr.pipeline.measuring import record_run
from lehr.pipeline.own_text import texts_of_base
from lehr.pipeline.planning import Prepared, prepare
from lehr.pipeline.promotion import describe, promote, sentence
from lehr.pipeline.showcase import AnswerBook, shown_prompts
from lehr.pipeline.stage_run import Outcome, StageRun
from lehr.pipeline.suites import run_suites, stage_gates
from lehr.recipe.loading import dump_recipe, recipe_hash, recipe_notices
from lehr.recipe.resolve import resumed
from lehr.report.html import write_report
from lehr.report.strategy import write_strategy
from lehr.report.wording import time_words
from lehr.training.allocator import keep_freed_memory
from lehr.training.resources import memory_errors, peak_memory_gib, reset_peak_memory


def run(
    recipe: Any,
    *,
    name: str | None = None,
    out: Path | None = None,
    fresh: bool = False,
    listeners: Sequence[Listener] = (),
) -> Ledger:
    """Run every stage of `recipe`, judge each, export what was promoted; returns the ledger.

    The same call resumes an interrupted run and reuses what is unchanged. A refusal is no
    exception here: `ledger.verdict` says it (the command line turns it into status 3).
    Raises RecipeError, OutOfResources, Diverged and Interrupted.
    """
    choose(recipe.device)
    name, folder = place_of(recipe, name, out)
    recipe = resumed(recipe, folder)
    with claimed(folder, name, fresh), memory_errors():
        keep_freed_memory()
        events = Events(folder / "events.jsonl", listeners)
        events.emit("run_started", f"{name}: {recipe.model} → {shown(folder)}", folder=str(folder))
        for notice in recipe_notices(recipe):
            events.emit("notice", notice)
        prepared = prepare(recipe, folder, events)
        return _Run(recipe, name, prepared, events).go()


def shown(folder: Path) -> str:
    """A folder as a person would type it."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


def measured_gates(prepared: Prepared) -> tuple[dict[str, Suite], list[list[PlannedGate]]]:
    """The run's suites and each stage's gates; gates that cannot be evaluated are refused here."""
    recipe, bench = prepared.recipe, prepared.bench
    own = None
    if not bench.is_tiny:
        own = OwnText(bench.base.key, partial(texts_of_base, bench, prepared.folder / ".cache"))
    suites = run_suites(recipe, prepared.sources, own)
    gates: list[list[PlannedGate]] = []
    problems: list[Problem] = []
    for planned in prepared.stages:
        try:
            gates.append(stage_gates(recipe, planned.index, suites, planned.index > 0))
        except LehrError as error:
            problems += [one for one in error.problems if one not in problems]
    unknown = [name for name in recipe.suites if name not in suites and name != "kl"]
    known = ", ".join(suites)
    problems += [
        Problem("suites", f"a suite that applies to this model: {known}", name) for name in unknown
    ]
    if problems:
        raise RecipeError(problems)
    return suites, gates


def write_plan(prepared: Prepared, gates: Sequence[Sequence[PlannedGate]], events: Events) -> None:
    """plan.json, recipe.yaml and strategy.md of a run; says which gates cannot pass."""
    recipe, plan, folder = prepared.recipe, prepared.plan, prepared.folder
    entries = [one.as_json() for stage in gates for one in stage]
    plan["gates"] = list({(one["name"], one["kind"]): one for one in entries}.values())
    for entry in plan["gates"]:
        if not entry["can_pass"]:
            text = f"gate {entry['name']} cannot pass with the items at hand: {entry['note']}"
            plan["findings"].append(text)
            events.emit("finding", text)
    write_json(folder / "plan.json", plan)
    write_text(folder / "recipe.yaml", dump_recipe(recipe, folder))
    write_text(folder / "strategy.md", write_strategy(plan, recipe.model_dump(mode="json")))


def announce(prepared: Prepared, events: Events) -> None:
    """Stages, data and one conversation with its trained tokens, before anything is trained."""
    stages = prepared.stages
    events.emit("plan", "", durable=False, stages=prepared.plan["stages"])
    events.emit("data", "", durable=False, sources=prepared.plan["data"])
    chat = next((one for one in stages if one.stage.kind != "pretrain"), stages[0])
    audit = read_json(prepared.folder / chat.folder_name / "audit.json")
    events.emit("mask", "", durable=False, spans=audit["mask_sample"], **audit)
    notes = [note for source in prepared.plan["data"] for note in source["notes"]]
    for line in dict.fromkeys(notes):
        events.emit("notice", line)
    for line in prepared.plan["findings"]:
        events.emit("finding", line)


class _Run:
    """One run from its plan to its last sentence."""

    def __init__(self, recipe: Any, name: str, prepared: Prepared, events: Events) -> None:
        self.recipe, self.prepared, self.events = recipe, prepared, events
        self.folder, self.bench = prepared.folder, prepared.bench
        self.started = time.time()
        self.earlier = Ledger.read(self.folder)
        before = self.earlier.data if self.earlier else {}
        head = {
            "name": name,
            "model": recipe.model,
            "started": before.get("started") or self.started,
            "recipe_hash": recipe_hash(recipe),
            "versions": versions(),
            "machine": prepared.plan["machine"],
            "trust_remote_code": recipe.trust_remote_code,
            "promoted_from": before.get("promoted_from"),
        }
        self.ledger = Ledger(self.folder, head)

    def go(self) -> Ledger:
        announce(self.prepared, self.events)
        suites, gates = measured_gates(self.prepared)
        write_plan(self.prepared, gates, self.events)
        wanted = {one.gate.suite for stage in gates for one in stage} | set(self.recipe.suites)
        cache = self.folder / ".cache"
        judge = Judge(
            self.bench,
            suites,
            sorted(wanted),
            ScoreStore(cache / "scores"),
            self.recipe.gates.items,
            self.recipe.seed,
            self.events,
        )
        book = AnswerBook(
            self.bench, shown_prompts(self.recipe, self.prepared.sources), cache / "answers"
        )
        with self._ending():
            if self.bench.is_tiny:  # made again for every look: look while it is here
                book.of(self.bench.base)
                judge.score_all(self.bench.base, "measuring the base")
            reset_peak_memory()
            stages = StageRun(self.prepared, judge, book, self.events)
            return self._finish(self._stages(stages, gates))

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """However the run ends, its ledger says so; what was promoted before stays."""
        self.ledger.save()
        try:
            yield
        except (Interrupted, KeyboardInterrupt):
            self._close("interrupted", "Interrupted; the same command goes on from here.")
            raise
        except BaseException as error:
            verdict = "diverged" if isinstance(error, Diverged) else "failed"
            first = str(error).partition("\n")[0] or type(error).__name__
            with suppress(OSError):  # a full disk must not hide what went wrong
                self._close(verdict, f"Stopped: {first}")
            raise

    def _stages(self, stages: StageRun, gates: Sequence[Sequence[PlannedGate]]) -> list[Outcome]:
        state, outcomes = self.bench.base, []
        waiting: Outcome | None = None  # promoted, and model/ not written yet
        for planned, asked in zip(self.prepared.stages, gates, strict=True):
            self.events.stage = planned.folder_name
            # An unchanged run must not lead model/ through the states of its early stages.
            if waiting is not None and stages.finished(planned, state) is None:
                self._promote(waiting)
                waiting = None
            outcome = stages.go(planned, asked, state)
            outcomes.append(outcome)
            state = outcome.state
            self.ledger.stage(outcome.entry)
            if outcome.promoted:
                waiting = outcome
            self._tick()
            write_report(self.folder)
            self.events.stage = ""
            if not outcome.promoted and self.recipe.gates.on_refusal == "stop":
                break
        if waiting is not None:
            self._promote(waiting)
        return outcomes

    def _promote(self, outcome: Outcome) -> None:
        folder = outcome.entry["folder"]
        promote(self.folder, outcome.tuned, folder, origin_of(self.recipe, self.prepared))
        self.ledger.data["promoted_from"] = folder
        self.ledger.save()

    def _tick(self) -> None:
        spent = time.time() - self.started
        earlier = float(self.earlier.data.get("seconds") or 0.0) if self.earlier else 0.0
        same = self.earlier is not None and self.earlier.data.get("verdict") in (
            "running",
            "interrupted",
        )
        self.ledger.data["seconds"] = round(spent + (earlier if same else 0.0), 1)
        stages = self.ledger.stages
        self.ledger.data["seconds_of_stages"] = round(sum(one["seconds"] for one in stages), 1)
        self.ledger.data["peak_memory_gib"] = round(peak_memory_gib(), 2)
        if self.bench.device.type == "cuda":
            peak = peak_of_card(self.bench.device) / 2**30
            self.ledger.data["peak_accelerator_gib"] = round(peak, 2)
        self.ledger.save()

    def _close(self, verdict: str, text: str) -> None:
        self.ledger.data["verdict"] = verdict
        self.ledger.data["sentence"] = text
        self._tick()
        write_report(self.folder)

    def _finish(self, outcomes: list[Outcome]) -> Ledger:
        verdict, text = sentence(outcomes, len(self.prepared.stages))
        state = outcomes[-1].state
        if state.kind == "base":
            self.ledger.data["promoted_from"] = None
            if (self.folder / "model").is_dir():
                text += " model/ is still what an earlier recipe promoted."
        else:
            exports, gap = export_promoted(
                self.recipe, self.folder, self.bench, state, self.prepared.sources, self.events
            )
            self.ledger.data["exports"] = exports
            if gap:
                verdict, text = "refused", f"{text} An export is not what was trained: {gap}"
        self.ledger.data["finished"] = time.time()
        self._close(verdict, text)
        if state.kind != "base":
            describe(self.folder)
            write_report(self.folder)
        record_run(self.ledger.data, self.prepared.plan)
        self.events.emit(
            "finished", text, verdict=verdict, next=self._next_steps(state.kind != "base")
        )
        return self.ledger

    def _next_steps(self, has_model: bool) -> list[tuple[str, str]]:
        folder = shown(self.folder)
        steps = [("time", time_words(self.ledger.data)), ("report", f"{folder}/report.html")]
        if has_model:
            steps += [("model", f"{folder}/model"), ("talk to it", f"lehr chat {folder}")]
        else:
            steps.append(("what now", "lehr explain evaluation"))
        return steps
