"""One stage from its parent to its verdict: reuse or train, measure, decide."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lehr.evaluation.default_gates import PlannedGate
from lehr.models.language_model import LanguageModel
from lehr.objectives.base import Objective
from lehr.pipeline import observing
from lehr.pipeline.doctoring import LiveDoctor, context_of
from lehr.pipeline.events import Events
from lehr.pipeline.files import (
    link_weights,
    read_json,
    read_lines,
    remove_unfinished,
    write_json,
    write_text,
)
from lehr.pipeline.judging import Judge, Judgement, suites_json
from lehr.pipeline.keys import stage_key, versions
from lehr.pipeline.memory_check import MemoryCheck
from lehr.pipeline.planning import Prepared
from lehr.pipeline.promotion import verdict_on
from lehr.pipeline.showcase import AnswerBook, answers
from lehr.pipeline.staging import STAGES, PlannedStage, heldout_loss, stage_context
from lehr.pipeline.states import State, damage, damaged_record, produced_json, read_state
from lehr.pipeline.timekeeping import TimeKeeper
from lehr.report.left_out import left_out
from lehr.report.wording import duration
from lehr.stages.context import StageContext
from lehr.stages.preference import HeldoutLoss as PairLoss
from lehr.training.quarantine import FILE as QUARANTINE

IN_RUN_HELDOUT = 48  # held-out examples that an evaluation during training looks at


@dataclass(frozen=True)
class Outcome:
    """One stage's end. `state`: what the next stage begins from."""

    state: State
    tuned: State
    promoted: bool
    verdict: str
    entry: dict[str, Any]


class StageRun:
    """Runs the stages of one prepared recipe, one at a time."""

    def __init__(self, prepared: Prepared, judge: Judge, book: AnswerBook, events: Events) -> None:
        self.prepared, self.judge, self.book, self.events = prepared, judge, book, events
        self.recipe, self.bench = prepared.recipe, prepared.bench

    def go(self, planned: PlannedStage, gates: Sequence[PlannedGate], parent: State) -> Outcome:
        """Train (or reuse) the stage and judge it."""
        folder = self.prepared.folder / planned.folder_name
        key = self.key_of(planned, parent)
        began = time.time()
        tuned = self.finished(planned, parent)
        reused = tuned is not None
        text = f"[{planned.index + 1}/{len(self.prepared.stages)}] {planned.name}"
        limit = planned.limit_tokens_per_second
        self.events.emit(
            "stage_started", text, updates=planned.updates, reused=reused, limit=round(limit, 1)
        )
        if tuned is not None:
            spent = duration(_seconds(folder, 0.0, reused=True))
            text = f"unchanged: its result is reused, nothing is trained (it took {spent})"
            self.events.emit("reused", text)
        else:
            self._say_damage(folder, key)
            make_ready(folder, key)
            tuned = self._train(planned, folder, key, parent)
        judgement, evaluation = self._judge(planned, gates, parent, tuned)
        promoted, verdict, why = verdict_on(judgement, self.recipe.gates.undetermined)
        self.events.emit("verdict", why, promoted=promoted)
        evaluation["kl"] = read_json(folder / "kl.json")
        evaluation["seconds"] = _seconds(folder, time.time() - began, reused)
        write_json(folder / "evaluation.json", strict(evaluation))
        observing.write_lines(folder / "flips.jsonl", judgement.flips)
        rows = rows_of(folder)
        entry = {
            "folder": planned.folder_name,
            "kind": planned.stage.kind,
            "name": planned.name,
            "key": key,
            "parent": parent.key,
            "produced": produced_json(folder),
            "recipe_hash": self.prepared.plan["recipe_hash"],
            "data": [_data_entry(source) for source in planned.sources.values()],
            "seed": self.recipe.seed,
            "versions": versions(),
            "gates": [one.as_json() for one in judgement.verdicts],
            "promoted": promoted,
            "reused": reused,
            "why": why,
            "seconds": evaluation["seconds"],
            "tokens": sum(int(row["tokens"]) for row in rows),
            "updates": rows[-1]["update"] if rows else planned.updates,
            "left_out": left_out(rows, read_lines(folder / QUARANTINE), key),
        }
        return Outcome(tuned if promoted else parent, tuned, promoted, verdict, entry)

    def key_of(self, planned: PlannedStage, parent: State) -> str:
        """Key of what the stage makes of `parent`."""
        precision = self.prepared.plan["precision"]["value"]
        encoder = self.bench.encoder.fingerprint
        return stage_key(self.recipe, planned.index, parent.key, encoder, precision)

    def finished(self, planned: PlannedStage, parent: State) -> State | None:
        """What the stage made of `parent` in an earlier start, if it is there and whole."""
        key = self.key_of(planned, parent)
        folder = self.prepared.folder / planned.folder_name
        others = [one for one in sorted(folder.parent.glob("[0-9][0-9]-*")) if one != folder]
        for place in (folder, *others):
            described = produced_json(place)
            if described.get("key") != key or damaged_record(described, place):
                continue
            found = read_state(place)
            if found is not None:  # another place: renamed, or another number now
                return found if place == folder else _moved(found, folder, parent)
        return None

    def _say_damage(self, folder: Path, key: str) -> None:
        described = produced_json(folder)
        if described.get("key") != key:
            return
        name = damage(described, folder.parent) or damaged_record(described, folder)
        if name:
            text = f"{name} is gone or not what the stage wrote: the stage is made again"
            self.events.emit("damaged", text, file=name)

    def _train(self, planned: PlannedStage, folder: Path, key: str, parent: State) -> State:
        def told(update: int, loss: float) -> None:
            said = f"after update {update}: held-out loss {loss:.3f}"
            shown: list[dict[str, str]] = []
            if planned.stage.kind != "pretrain":
                shown = answers(self.bench.model, self.bench.encoder, self.book.shown)
            kind = "showcase" if shown else "evaluated"
            self.events.emit(kind, said, prompts=shown, update=update, loss=loss)

        _, reference, tuned = train_stage(
            self.prepared, planned, folder, key, parent, self.events, told
        )
        if planned.stage.kind != "pretrain":
            bare = not planned.trains_all and parent.kind != "adapter"
            kl = self.judge.kl(None if bare else reference, self._kl_prompts(planned))
            write_json(folder / "kl.json", kl)
        self.bench.keep(tuned)
        (folder / "parent.safetensors").unlink(missing_ok=True)
        return tuned

    def _kl_prompts(self, planned: PlannedStage) -> list[Any]:
        prompts: list[Any] = [one.messages for one in self.book.shown]
        for name in planned.stage.data:
            # Rows that encoding dropped (too long, refused by the template) have no prompt.
            usable = {one.origin for one in planned.sources[name].heldout}
            for example in self.prepared.sources[name].heldout:
                turns = example.messages if example.origin in usable else ()
                if turns and turns[-1]["role"] == "assistant":
                    turns = turns[:-1]
                if turns:
                    prompts.append(turns)
        return prompts

    def _judge(
        self,
        planned: PlannedStage,
        gates: Sequence[PlannedGate],
        parent: State,
        tuned: State,
    ) -> tuple[Judgement, dict[str, Any]]:
        """The verdicts, and the stage's evaluation.json."""
        base = self.bench.base
        self.judge.score_all(tuned, "measuring what changed")
        # One state after the other: each change of weights may mean to load them.
        self.judge.score_all(parent)
        self.judge.score_all(base)
        judgement = self.judge.judge(gates, tuned, {"parent": parent, "base": base})
        verdicts = [one.as_json() for one in judgement.verdicts]
        self.events.emit("gates", "", gates=verdicts)
        states = {"base": base, "parent": parent, "tuned": tuned}
        evaluation = {
            "stage": planned.folder_name,
            "kind": planned.stage.kind,
            "suites": suites_json(self.judge, states, self.recipe.seed),
            "gates": verdicts,
            "prompts": self.book.beside(base, parent, tuned),
        }
        return judgement, evaluation


def train_stage(
    prepared: Prepared,
    planned: PlannedStage,
    folder: Path,
    key: str,
    parent: State,
    events: Events,
    told: Callable[[int, float], None] | None = None,
    drive: Callable[[StageContext, Objective], None] | None = None,
) -> tuple[LanguageModel, Mapping[str, Tensor], State]:
    """Train a stage in `folder`, from wherever its checkpoints stand.

    Returns the model in its final state, the parent's tensors, and the state to keep.
    told: called with (update, held-out loss) at each evaluation. drive: see StageContext.
    """
    bench, stage = prepared.bench, planned.stage
    if stage.fold_parent and parent.kind == "adapter":
        parent = bench.fold(parent, folder / "folded")
    if planned.trains_all:
        reference = bench.train_all(parent, folder)
        tuned = State("weights", key, folder)
    else:
        reference = bench.train_adapter(parent, stage.adapter)
        tuned = State("adapter", key, folder, root=parent.weights)
    model = bench.model
    if stage.kind == "pretrain":  # plain text uses none of a template's tokens
        rows = parent.untrained_rows if parent.kind == "adapter" else model.new_rows
        tuned = replace(tuned, untrained_rows=tuple(rows))
    heldout = planned.heldout()[:IN_RUN_HELDOUT]

    measure: Callable[[], float] = partial(heldout_loss, model, heldout, planned.pack_length)
    if stage.kind == "preference":
        measure = PairLoss(model, heldout, reference, stage)

    def evaluate(update: int) -> dict[str, float]:
        loss = measure()
        if told is not None:
            told(update, loss)
        return {"loss": loss}

    model.recompute(planned.recompute.keeps)
    model.head_chunk = planned.head_chunk
    each = planned.seconds / max(1, planned.updates)
    check = MemoryCheck(events, planned.memory or {}, each, model.device)
    live = LiveDoctor(events, context_of(planned, model.vocabulary_size, folder), folder)
    context = stage_context(
        planned,
        key=key,
        folder=folder,
        seed=prepared.recipe.seed,
        model=model,
        precision=model.precision,
        parent=reference,
        parent_key=parent.key,
        observers=(observing.watch(events), live, TimeKeeper(folder), check),
        evaluate=evaluate if heldout else None,
    )
    context.drive = drive
    STAGES[stage.kind](context)
    if drive is None:
        live.conclude()
    model.recompute("none")
    model.head_chunk = None
    model.eval()
    return model, reference, tuned


def strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def make_ready(folder: Path, key: str) -> None:
    """A folder for the stage with this key: another key's leftovers go, its own stay."""
    marker = folder / "stage.key"
    # Lines of the metrics that are lost cannot be made from a checkpoint: from the start again.
    whole = not damaged_record(produced_json(folder), folder).endswith("metrics.jsonl")
    if marker.exists() and marker.read_text() == key and whole:
        remove_unfinished(folder)
        return
    audit = read_json(folder / "audit.json")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "audit.json", audit)
    write_text(marker, key)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the stage's metrics.jsonl that can be read."""
    return read_lines(folder / "metrics.jsonl")


def _seconds(folder: Path, spent: float, reused: bool) -> float:
    """What the stage took: for a reused one as it was noted, else at least its updates."""
    noted = read_json(folder / "evaluation.json")
    if reused and isinstance(noted, dict) and noted.get("seconds"):
        return float(noted["seconds"])
    return round(max(spent, sum(row["seconds"] for row in rows_of(folder))), 1)


def _moved(state: State, folder: Path, parent: State) -> State:
    """A stage's result under the name that the recipe gives it now."""
    assert state.folder is not None
    audit = read_json(folder / "audit.json")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(state.folder, folder, copy_function=link_weights)
    write_json(folder / "audit.json", audit)
    root = None
    if state.root is not None:
        folded = state.root.folder is not None and state.root.folder.parent == state.folder
        root = replace(state.root, folder=folder / "folded") if folded else parent.weights
    moved = replace(state, folder=folder, root=root)
    moved.save(folder.parent)
    return moved


def _data_entry(source: Any) -> dict[str, Any]:
    accounting = source.accounting.as_json()
    files = accounting["files"]
    return {
        "name": source.name,
        "files": files,
        "path": ", ".join(file["path"] for file in files),
        "sha256": ", ".join(file["sha256"] for file in files),
        "rows": accounting["rows"],
        "kept": accounting["kept"],
        "heldout": accounting["heldout"],
        "dropped": {reason: entry["rows"] for reason, entry in accounting["dropped"].items()},
        "tokens": accounting["tokens"],
    }
