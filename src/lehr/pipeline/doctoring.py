"""The doctor beside a run: it looks while a stage trains, and at files and folders afterwards.

During a stage it looks about twenty times; what it sees twice in a row becomes an event. At the
end it looks once more, at everything, and leaves doctor.json in the stage's folder.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lehr.diagnosis.doctor import Diagnosis, Finding, diagnose
from lehr.diagnosis.doctor_curve import Curve, curve_of_rows
from lehr.diagnosis.doctor_look import Context
from lehr.diagnosis.doctor_readers import read_curve
from lehr.errors import Problem, RecipeError
from lehr.pipeline.events import Events
from lehr.pipeline.files import read_json, write_json
from lehr.pipeline.staging import PlannedStage
from lehr.training import events as engine

LOOKS = 20  # during a stage
FIRST_LOOK = 40  # updates: before that a curve says little, but for what is not finite
# What a run that is not over cannot show.
ONLY_AT_THE_END = frozenset(
    {
        *("never_left_warmup", "rate_ran_out", "plateau_then_drop", "eval_below_train"),
        *("flat_at_unigram", "late_creep", "spike_that_stays", "too_low_too_soon"),
        *("epoch_sawtooth", "length_drift"),
    }
)
# What lehr's own stages cannot have: masks and shifts are proven by the admission probe, an
# update's loss is divided by its own weight, a resume has the same bits, evaluation runs in eval
# mode. A training loss over several sources beside one source's held-out loss looks like these.
RULED_OUT = frozenset(
    {"too_low_too_soon", "scales_with_accumulation", "jump_at_resume", "eval_below_train"}
)
SURE = 0.8  # what a run says by itself; `lehr doctor` says the rest
RECORD = "doctor.json"


class LiveDoctor:
    """An observer of the engine that looks at the curve as it grows."""

    def __init__(self, events: Events, context: Context, folder: Path) -> None:
        self.events, self.context, self.folder = events, context, folder
        self.rows: list[dict[str, Any]] = []
        self.updates = 0
        self._seen: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self._next_look = FIRST_LOOK

    def __call__(self, event: Any) -> None:
        if isinstance(event, engine.RunStarted):
            self.updates = event.updates
            self.rows = _lines(self.folder / "metrics.jsonl")
        elif isinstance(event, engine.ResumedFrom):
            resumes = (*self.context.resumes, float(event.update))
            self.context = replace(self.context, resumes=resumes)
        elif isinstance(event, engine.UpdateDone):
            self.rows.append(dict(event.row))
            if len(self.rows) >= self._next_look and event.row["update"] < self.updates:
                self._next_look = len(self.rows) + max(10, self.updates // LOOKS)
                self._look()
        elif isinstance(event, engine.Evaluated) and self.rows:
            row = {f"evaluation.{name}": value for name, value in event.values.items()}
            self.rows[-1] |= {name: v for name, v in row.items() if math.isfinite(v)}

    def _look(self) -> None:
        found = [
            one
            for one in self._diagnosis().findings
            if one.name not in ONLY_AT_THE_END and one.confidence >= SURE
        ]
        names = frozenset(one.name for one in found)
        for one in found:  # a shape that is there twice in a row is no passing one
            if one.name in self._seen and one.name not in self._told:
                self._tell(one)
        self._seen = names

    def conclude(self) -> Diagnosis:
        """Look at the whole stage; doctor.json, and an event for what was not told yet."""
        found = self._diagnosis()
        for one in found.findings:
            if one.name not in self._told and one.confidence >= SURE:
                self._tell(one)
        known = {name: value for name, value in vars(self.context).items() if value is not None}
        write_json(self.folder / RECORD, {"context": known, **found.as_json()})
        return found

    def _diagnosis(self) -> Diagnosis:
        if not self.rows:
            return Diagnosis(())
        try:
            return _of_lehr(diagnose(curve_of_rows(self.rows), self.context))
        except RecipeError:  # not one finite loss yet, and no gradient: nothing to look at
            return Diagnosis(())

    def _tell(self, one: Finding) -> None:
        self._told.add(one.name)
        text = (
            f"doctor: {one.title} ({one.confidence:.0%} sure): {one.seen}. Likely: "
            f"{one.causes[0]}. To decide: {one.decisive_test}"
        )
        self.events.emit("doctor", text, finding=one.as_json())


def _judged(curve: Curve, context: Context | None, path: Path, stage: str = "") -> Diagnosis:
    """Of a curve in a file; a record of the live doctor beside it says that lehr trained."""
    found = diagnose(curve, context, stage)
    own = path.name == "metrics.jsonl" and (path.parent / RECORD).is_file()
    return _of_lehr(found) if own else found


def _of_lehr(diagnosis: Diagnosis) -> Diagnosis:
    """Without what a stage of lehr cannot have."""
    kept = tuple(one for one in diagnosis.findings if one.name not in RULED_OUT)
    return replace(diagnosis, findings=kept)


def context_of(planned: PlannedStage, vocabulary: int, folder: Path) -> Context:
    """What lehr knows of a stage beside its curve."""
    audit = read_json(folder / "audit.json")
    audit = audit if isinstance(audit, dict) else {}
    answers, without = audit.get("answers") or 0, audit.get("answers_without_end") or 0
    unended = without / answers if answers else None
    if planned.stage.kind == "preference":
        return Context(chance=math.log(2.0), unended=unended)
    return Context(vocabulary, None, _unigram_entropy(planned, vocabulary), unended=unended)


def _unigram_entropy(planned: PlannedStage, vocabulary: int) -> float | None:
    """Entropy of the frequencies of the trained tokens, in nats."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for source in planned.sources.values():
        for one in source.train:
            ids = one.ids[one.supervised].numpy()
            counts += np.bincount(ids, minlength=vocabulary)[:vocabulary]
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum()) if len(shares) else None


def examine(path: Path, loss: str | None = None, context: Context | None = None) -> Diagnosis:
    """`lehr doctor RUN_OR_FILE`: the stages of a run's folder, or one curve.

    Raises RecipeError for what holds no curve.
    """
    if not path.is_dir():
        return _judged(read_curve(path, loss), context, path)
    places = _curves_in(path)
    if not places:
        expected = "a run's folder (with metrics.jsonl in its stages), or a file with a curve"
        raise RecipeError(Problem(str(path), expected))
    findings: list[Finding] = []
    notes: list[str] = []
    points = 0
    for place in places:
        stage = place.parent.name if len(places) > 1 or place.parent != path else ""
        try:
            curve = read_curve(place, loss)
        except RecipeError as error:
            notes += [f"{stage}: {problem.expected}" for problem in error.problems]
            continue
        one = _judged(curve, context or _recorded(place.parent), place, stage)
        findings += one.findings
        notes += [f"{stage}: {note}" if stage else note for note in one.notes]
        points += one.points
    if len(notes) >= len(places) and not points and not findings:
        raise RecipeError([Problem(str(path), note) for note in notes])
    return Diagnosis(tuple(findings), tuple(notes), points)


def _curves_in(folder: Path) -> list[Path]:
    """Files of curves in a folder: a lehr run's, a lehr stage's, a HF Trainer's."""
    own = [folder / name for name in ("metrics.jsonl", "trainer_state.json")]
    here = [path for path in own if path.is_file()]
    if here:
        return here[:1]
    stages = sorted(path for path in folder.glob("[0-9][0-9]-*/metrics.jsonl") if path.is_file())
    if stages:
        return stages
    saved = [path for path in folder.glob("checkpoint-*/trainer_state.json") if path.is_file()]
    return sorted(saved, key=lambda path: path.stat().st_mtime)[-1:]  # the last holds all before


def _recorded(folder: Path) -> Context:
    """The context that a stage left, with the resumes that events.jsonl names."""
    recorded = read_json(folder / RECORD)
    known = recorded.get("context") if isinstance(recorded, dict) else None
    known = known if isinstance(known, dict) else {}
    fields = {name: known[name] for name in Context.__dataclass_fields__ if name in known}
    fields["resumes"] = tuple(fields.get("resumes") or ())
    for row in _lines(folder.parent / "events.jsonl"):
        same = row.get("kind") == "resumed" and row.get("stage") == folder.name
        if same and isinstance(row.get("update"), int | float):
            fields["resumes"] = tuple(sorted({*fields["resumes"], float(row["update"])}))
    with suppress(TypeError, ValueError):
        return Context(**fields)
    return Context()


def _lines(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) else []
    return rows
