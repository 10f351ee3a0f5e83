"""The doctor beside a run: it looks while a stage trains.

During a stage it looks about twenty times; what it sees twice in a row becomes an event. At the
end it looks once more, at everything, and leaves doctor.json in the stage's folder.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lehr.diagnosis.doctor import Diagnosis, Finding, diagnose
from lehr.diagnosis.doctor_curve import curve_of_rows
from lehr.diagnosis.doctor_look import Context
from lehr.errors import RecipeError
from lehr.pipeline.curve_lines import of_the_curve
from lehr.pipeline.events import Events
from lehr.pipeline.examining import RECORD, of_lehr
from lehr.pipeline.files import read_json, read_lines, write_json
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
SURE = 0.8  # what a run says by itself; `lehr doctor` says the rest


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
            lines = read_lines(self.folder / "metrics.jsonl")
            self.rows = [one for one in lines if of_the_curve(one)]
        elif isinstance(event, engine.WentBack):
            self.rows = [one for one in self.rows if one["update"] <= event.reached]
        elif isinstance(event, engine.ResumedFrom):
            resumes = (*self.context.resumes, float(event.update))
            self.context = replace(self.context, resumes=resumes)
        elif isinstance(event, engine.UpdateDone):
            if not of_the_curve(event.row):
                return
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
            return of_lehr(diagnose(curve_of_rows(self.rows), self.context))
        except RecipeError:  # not one finite loss yet, and no gradient: nothing to look at
            return Diagnosis(())

    def _tell(self, one: Finding) -> None:
        self._told.add(one.name)
        text = (
            f"doctor: {one.title} ({one.confidence:.0%} sure): {one.seen}. Likely: "
            f"{one.causes[0]}. To decide: {one.decisive_test}"
        )
        self.events.emit("doctor", text, finding=one.as_json())


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
