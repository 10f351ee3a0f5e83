"""The loss-spike playbook on a run's folder (`lehr doctor RUN --spike N`).

The updates up to the spike are computed again from an older checkpoint, aside, and compared with
their lines bit for bit; then the batch is looked at with older, fresh and the very weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lehr.diagnosis.spike import STATE, Bits, Record, Replay, Spike, recorded
from lehr.errors import Problem, RecipeError
from lehr.objectives.base import Objective
from lehr.pipeline.events import Events, Listener
from lehr.pipeline.files import read_json, read_lines
from lehr.pipeline.folder import at_rest
from lehr.pipeline.planning import prepare
from lehr.pipeline.replaying import Again, Source, again
from lehr.pipeline.run_stages import (
    entries_of,
    key_of,
    older_checkpoints,
    parent_of,
    stage_folder,
)
from lehr.pipeline.spike_batches import Around, measured, rows_alone
from lehr.pipeline.stage_run import rows_of, train_stage
from lehr.pipeline.then_and_now import recipe_of
from lehr.report.wording import duration
from lehr.stages.context import StageContext
from lehr.training.checkpoint import Checkpoint
from lehr.training.metrics import UNDONE
from lehr.training.state import (
    copied,
    differences,
    environment,
    put_back,
    tensors_of,
    trained_parameters,
)

CHEAP = 60.0  # seconds: so long a replay from the stage's beginning needs no asking


def explain_spike(
    run: Path,
    update: int,
    *,
    stage: str = "",
    from_start: bool = False,
    listeners: Sequence[Listener] = (),
) -> Spike:
    """What caused the spike at `update` (as the terminal and metrics.jsonl count).

    stage       its folder's name; the last one that was trained where it is not given
    from_start  compute the stage's first updates again too, however long that takes

    Nothing in the run's folder changes. Raises RecipeError where there is no such
    run, stage or update, where a process works in it, or no state is old enough.
    """
    folder = run.absolute()
    if not (folder / "recipe.yaml").is_file() or not (folder / "plan.json").is_file():
        raise RecipeError(Problem(str(run), "the folder of a run (with recipe.yaml and plan.json)"))
    with at_rest(folder), tempfile.TemporaryDirectory() as aside:
        events = Events(None, listeners)
        place = stage_folder(folder, stage)
        row, rows, undone = _row(place, update)  # refused before anything is loaded
        entries = entries_of(place, int(row["attempt"]), undone)
        older = older_checkpoints(place, int(row["attempt"]), entries)
        spent = sum(float(one["seconds"]) for one in rows if one["attempt"] <= row["attempt"])
        if not older and not from_start and spent > CHEAP:
            expected = (
                f"a checkpoint older than update {update}: none is kept. Computing the stage "
                f"again from its beginning takes about {duration(spent)}: say --from-start; or "
                "run it again with more checkpoints (checkpoint_every, checkpoints_kept)"
            )
            raise RecipeError(Problem(f"{place.name}/checkpoints", expected))
        plan = read_json(folder / "plan.json")
        recipe = recipe_of(folder, plan if isinstance(plan, dict) else {})
        prepared = prepare(recipe, folder, events, plan, write=False, cache=Path(aside) / "rows")
        planned = next(one for one in prepared.stages if one.folder_name == place.name)
        parent = parent_of(prepared, planned, place)
        found: list[Spike] = []

        def drive(context: StageContext, objective: Objective) -> None:
            untrained = planned.trains_all and prepared.bench.is_tiny and planned.index == 0
            source = Source(place, Path(aside), context.batches.state(), rows, entries)
            work = _Work(context, objective, source, events, row)
            work.notes += _left_out(place, rows, update)
            found.append(work.spike(update, older, untrained))

        key = key_of(place)
        train_stage(prepared, planned, Path(aside), key, parent, events, drive=drive)
    return found[0]


def _row(place: Path, update: int) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    """(the update's line, the lines of its history, whether that was undone).

    A skipped attempt goes before an applied one of the same number; lines that the guard undid
    are a history of their own up to there.
    """
    live = rows_of(place)
    undone = read_lines(place / UNDONE)  # a kill may have torn its last line
    before = _history(live, undone)
    for rows in (before, live):
        skipped = [
            one
            for one in rows
            if one["skipped"] and one["update"] == update - 1 and not one.get("quarantined")
        ]
        if skipped:
            return skipped[0], rows, rows is before
    for rows in (live, before):
        for one in rows:
            if not one["skipped"] and one["update"] == update:
                return one, rows, rows is before
    for one in live:
        if one.get("quarantined") and one["update"] == update - 1:
            return one, live, False
    last = max((int(one["update"]) for one in live), default=0)
    others = sorted(path.parent.name for path in place.parent.glob("[0-9][0-9]-*/metrics.jsonl"))
    others.remove(place.name)
    more = f"; --stage takes another one ({', '.join(others)})" if others else ""
    expected = f"an update of {place.name}: 1 to {last}{more}"
    if last == 0:
        expected = f"an update of {place.name}, which has none yet{more}"
    raise RecipeError(Problem("--spike", expected, update))


def _left_out(place: Path, rows: Sequence[dict[str, Any]], update: int) -> list[str]:
    """Batches in quarantine that were passed over right before the update, and why."""
    passed = {
        int(one["attempt"])
        for one in rows
        if one.get("quarantined") and one["update"] == update - 1
    }
    return [
        f"batch {one.attempt}, right before this update, is in quarantine: not {one.why}"
        for one in entries_of(place, 0, False)
        if one.attempt in passed and one.why
    ]


def _history(live: list[dict[str, Any]], undone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines as they stood before the guard went back for the first time."""
    first = [one for one in undone if one.get("rewind") == 1]
    if not first:
        return []
    begin = min(int(one["attempt"]) for one in first)
    lines = [{k: v for k, v in one.items() if k != "rewind"} for one in first]
    return [one for one in live if int(one["attempt"]) < begin] + lines


class _Work:
    """One stage, made ready as for training, and the update that is looked at."""

    def __init__(
        self,
        context: StageContext,
        objective: Objective,
        source: Source,
        events: Events,
        row: dict[str, Any],
    ) -> None:
        self.context, self.objective, self.source = context, objective, source
        self.events, self.rows = events, source.rows
        self.attempt = int(row["attempt"])
        self.trained = trained_parameters(context.model, context.settings.precision)
        self.record: Record = recorded(source.rows, row)
        self.notes: list[str] = []

    def spike(self, update: int, older: Sequence[Checkpoint], untrained: bool) -> Spike:
        fresh = copied(self.trained)
        since = older[-1].update if older else 0
        text = f"computing updates {since + 1} to {update} again"
        self.events.emit("notice", f"{text}, aside from the run", durable=False)
        middle = None if older else max(1, (self.attempt - 1) // 2)
        run = self._again(older[-1] if older else None, middle)
        put_back(self.trained, fresh, "weights")
        bits = self._bits(run, older[-1] if older else None, fresh)
        if not older:
            self.notes.append("no older checkpoint is kept: computed from the stage's beginning")
        around = Around.of(self.context, self.source.begin, self.attempt)
        with_norms = bool(self.record.signal) and not self.record.signal.startswith("loss")
        replays = []
        for state, number, tensors, met in self._states(run, older, fresh):
            put_back(self.trained, tensors, state)
            text = f"the batch and {around.count} neighbours with the weights of {state}"
            self.events.emit("notice", text, durable=False)
            losses, norms = measured(self.context, self.objective, around, with_norms)
            replays.append(Replay(state, number, losses, norms, met))
        spike = Spike(
            self.source.place.name, update, self.record, tuple(replays), bits, untrained=untrained
        )
        if spike.verdict == STATE and older and not bits.environment:
            bits = self._chain(bits, older, fresh)
        rows, rows_with = self._rows(spike, run, older, fresh, around)
        put_back(self.trained, fresh, "weights")
        return Spike(
            self.source.place.name, update, self.record, tuple(replays), bits, rows, rows_with,
            untrained, tuple(self.notes),
        )  # fmt: skip

    def _again(
        self, start: Checkpoint | None, middle: int | None = None, save_at: int = 0, upto: int = 0
    ) -> Again:
        return again(
            self.context, self.objective, self.source, start, upto or self.attempt, middle, save_at
        )

    def _bits(self, run: Again, start: Checkpoint | None, fresh: Any) -> Bits:
        since = start.update if start else 0
        if start is not None:
            now = environment(self.trained)
            differ = differences(start.state["environment"], now)
            if differ:
                return Bits(since, environment=tuple(differ))
        if not run.departure:
            return Bits(since)
        self.events.emit("notice", "other bits came out: once more", durable=False)
        second = self._again(start)
        put_back(self.trained, fresh, "weights")
        return Bits(since, run.departure, second.rows == run.rows)

    def _states(
        self, run: Again, older: Sequence[Checkpoint], fresh: Any
    ) -> list[tuple[str, int, Any, bool]]:
        """(name, update, tensors, met) of the states that look at the batch, oldest first."""
        found: list[tuple[str, int, Any, bool]] = [("the stage's beginning", 0, fresh, False)]
        kept = [one for one in older if one.update]
        for one in {path.update: path for path in (*kept[:1], *kept[-1:])}.values():
            if int(one.state["progress"]["attempt"]) < self.attempt - 1:
                tensors = tensors_of(one, "weights", "parameter.")
                found.append((f"update {one.update}", one.update, tensors, False))
        if run.middle is not None and 0 < run.middle_update < run.met_update:
            name = f"update {run.middle_update}, computed again"
            found.append((name, run.middle_update, run.middle, False))
        if self.attempt == 1:
            return [(found[0][0], 0, fresh, True)]
        if not run.met:  # the replay took another course and ended before
            return found
        return [*found, (f"update {run.met_update}, which it met", run.met_update, run.met, True)]

    def _chain(self, bits: Bits, older: Sequence[Checkpoint], fresh: Any) -> Bits:
        """Does training from an older state give the state that the updates began from?"""
        last = older[-1]
        if not last.update:
            return bits
        spent = sum(float(one["seconds"]) for one in self.rows if one["update"] <= last.update)
        before = older[-2] if len(older) > 1 else None
        if before is None and spent > CHEAP:
            self.notes.append(f"no state older than update {last.update} is kept to check it with")
            return bits
        begin = before.update if before else 0
        text = f"computing updates {begin + 1} to {last.update} again: do they give the same state"
        self.events.emit("notice", text, durable=False)
        upto = int(last.state["progress"]["attempt"]) + 1
        run = self._again(before, save_at=last.update, upto=upto)
        put_back(self.trained, fresh, "weights")
        changed = None if run.saved is None else tuple(_unequal(last, run.saved))
        return Bits(bits.since, bits.departure, bits.repeats, bits.environment, changed)

    def _rows(
        self, spike: Spike, run: Again, older: Sequence[Checkpoint], fresh: Any, around: Around
    ) -> tuple[Any, str]:
        """The batch's rows, alone, with the weights that show them best."""
        if not any(one.unusual for one in spike.replays):
            return (), ""
        chosen = [one for one in spike.replays if one.unusual and not one.met]
        name = (chosen or list(spike.replays))[-1].state
        states = {one[0]: one[2] for one in self._states(run, older, fresh)}
        put_back(self.trained, states[name], name)
        return rows_alone(self.context, self.objective, around), name


def _unequal(one: Checkpoint, other: dict[str, dict[str, Any]]) -> list[str]:
    """Names of the tensors that differ in a single bit, files by files."""
    from torch import equal

    found = []
    for file, tensors in other.items():
        kept = one.tensors(file)
        found += [
            f"{file}: {name.removeprefix('parameter.')}"
            for name in sorted(tensors.keys() | kept.keys())
            if name not in kept or name not in tensors or not equal(kept[name], tensors[name])
        ]
    return found
