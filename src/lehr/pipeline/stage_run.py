"""One stage from its parent to its verdict: reuse or train, measure, decide."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lehr.evaluation.default_gates import PlannedGate
from lehr.models.language_model import LanguageModel
from lehr.pipeline import observing
from lehr.pipeline.events import Events
from lehr.pipeline.files import read_json, write_json, write_text
from lehr.pipeline.judging import Judge, Judgement, suites_json
from lehr.pipeline.keys import stage_key, versions
from lehr.pipeline.planning import Prepared
from lehr.pipeline.promotion import verdict_on
from lehr.pipeline.showcase import AnswerBook, answers
from lehr.pipeline.staging import STAGES, PlannedStage, heldout_loss, stage_context
from lehr.pipeline.states import State, read_state

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

    def go(
        self, planned: PlannedStage, gates: Sequence[PlannedGate], parent: State, earlier: Any
    ) -> Outcome:
        """Train (or reuse) the stage and judge it. earlier: its entry in the last ledger."""
        folder = self.prepared.folder / planned.folder_name
        precision = self.prepared.plan["precision"]["value"]
        key = stage_key(
            self.recipe, planned.index, parent.key, self.bench.encoder.fingerprint, precision
        )
        began = time.time()
        tuned = read_state(folder)
        reused = tuned is not None and tuned.key == key
        text = f"[{planned.index + 1}/{len(self.prepared.stages)}] {planned.name}"
        self.events.emit("stage_started", text, updates=planned.updates, reused=reused)
        if reused:
            assert tuned is not None
            self.events.emit("reused", "unchanged: its result is reused, nothing is trained")
        else:
            make_ready(folder, key)
            tuned = self._train(planned, folder, key, parent)
        judgement = self._judge(planned, folder, gates, parent, tuned)
        promoted, verdict, why = verdict_on(judgement, self.recipe.gates.undetermined)
        self.events.emit("verdict", why, promoted=promoted)
        seconds = round(time.time() - began, 1)
        if reused and earlier and earlier.get("key") == key:
            seconds = earlier["seconds"]
        entry = {
            "folder": planned.folder_name,
            "kind": planned.stage.kind,
            "name": planned.name,
            "key": key,
            "parent": parent.key,
            "produced": tuned.as_json(),
            "recipe_hash": self.prepared.plan["recipe_hash"],
            "data": [_data_entry(source) for source in planned.sources.values()],
            "seed": self.recipe.seed,
            "versions": versions(),
            "gates": [one.as_json() for one in judgement.verdicts],
            "promoted": promoted,
            "reused": reused,
            "why": why,
            "seconds": seconds,
            "tokens": tokens_of(folder),
            "updates": planned.updates,
        }
        return Outcome(tuned if promoted else parent, tuned, promoted, verdict, entry)

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
            for example in self.prepared.sources[name].heldout:
                turns = example.messages
                if turns and turns[-1]["role"] == "assistant":
                    turns = turns[:-1]
                if turns:
                    prompts.append(turns)
        return prompts

    def _judge(
        self,
        planned: PlannedStage,
        folder: Path,
        gates: Sequence[PlannedGate],
        parent: State,
        tuned: State,
    ) -> Judgement:
        base = self.bench.base
        self.judge.score_all(tuned, "measuring what changed")
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
            "kl": read_json(folder / "kl.json"),
        }
        write_json(folder / "evaluation.json", strict(evaluation))
        observing.write_lines(folder / "flips.jsonl", judgement.flips)
        return judgement


def train_stage(
    prepared: Prepared,
    planned: PlannedStage,
    folder: Path,
    key: str,
    parent: State,
    events: Events,
    told: Callable[[int, float], None] | None = None,
) -> tuple[LanguageModel, Mapping[str, Tensor], State]:
    """Train a stage in `folder`, from wherever its checkpoints stand.

    Returns the model in its final state, the parent's tensors, and the state to keep.
    told: called with (update, held-out loss) at each evaluation.
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
    heldout = planned.heldout()[:IN_RUN_HELDOUT]

    def evaluate(update: int) -> dict[str, float]:
        loss = heldout_loss(model, heldout, planned.pack_length)
        if told is not None:
            told(update, loss)
        return {"loss": loss}

    model.recompute(planned.recompute)
    context = stage_context(
        planned,
        key=key,
        folder=folder,
        seed=prepared.recipe.seed,
        model=model,
        precision="bf16" if model.compute_dtype.itemsize == 2 else "fp32",
        parent=reference,
        parent_key=parent.key,
        observers=(observing.watch(events),),
        evaluate=evaluate if heldout else None,
    )
    STAGES[stage.kind](context)
    model.recompute("none")
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
    if marker.exists() and marker.read_text() == key:
        return
    audit = read_json(folder / "audit.json")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "audit.json", audit)
    write_text(marker, key)


def tokens_of(folder: Path) -> int:
    """Tokens that the stage trained on, by its metrics."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return sum(int(json.loads(line)["tokens"]) for line in lines)
    except (OSError, ValueError, KeyError):
        return 0


def _data_entry(source: Any) -> dict[str, Any]:
    accounting = source.accounting.as_json()
    files = accounting["files"]
    return {
        "name": source.name,
        "path": ", ".join(file["path"] for file in files),
        "sha256": ", ".join(file["sha256"] for file in files),
        "rows": accounting["rows"],
        "kept": accounting["kept"],
        "heldout": accounting["heldout"],
        "dropped": {reason: entry["rows"] for reason, entry in accounting["dropped"].items()},
        "tokens": accounting["tokens"],
    }
