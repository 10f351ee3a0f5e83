"""A trained stage in a run's folder, read only: its lines' history, checkpoints and parent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lehr.errors import Problem, RecipeError
from lehr.pipeline.keys import stage_key
from lehr.pipeline.ledger import Ledger
from lehr.pipeline.planning import Prepared
from lehr.pipeline.staging import PlannedStage
from lehr.pipeline.states import State, read_state
from lehr.pipeline.then_and_now import differences
from lehr.training import checkpoint
from lehr.training.checkpoint import Checkpoint
from lehr.training.quarantine import FILE as QUARANTINE
from lehr.training.quarantine import Quarantined, read_record


def stage_folder(folder: Path, name: str) -> Path:
    """The folder of a run's stage that was trained; the last one where `name` is empty."""
    places = sorted(path.parent for path in folder.glob("[0-9][0-9]-*/metrics.jsonl"))
    if not places:
        expected = "a run with a stage that was trained (metrics.jsonl): run its recipe first"
        raise RecipeError(Problem(str(folder), expected))
    if name:
        places = [place for place in places if name in (place.name, place.name[3:])]
    if not places:
        names = ", ".join(path.parent.name for path in sorted(folder.glob("*/metrics.jsonl")))
        raise RecipeError(Problem("--stage", f"a stage that was trained, of {names}", name))
    return places[-1]


def key_of(place: Path) -> str:
    """What the stage in `place` depends on, as its folder says."""
    try:
        return (place / "stage.key").read_text(encoding="utf-8")
    except OSError:
        expected = "stage.key, which says what the stage depends on: run the recipe again"
        raise RecipeError(Problem(str(place), expected)) from None


def entries_of(place: Path, attempt: int, undone: bool) -> list[Quarantined]:
    """The quarantine as the line's history knew it."""
    path = place / QUARANTINE
    entries = read_record(path, key_of(place)) if path.is_file() else []
    return [one for one in entries if not undone or (one.rewind == 0 and one.attempt < attempt)]


def older_checkpoints(
    place: Path, attempt: int, entries: Sequence[Quarantined]
) -> list[Checkpoint]:
    """The stage's whole checkpoints from before the attempt, oldest first, of this history."""
    found, key = [], key_of(place)
    path = place / QUARANTINE
    recorded_ones = {one.attempt for one in read_record(path, key)} if path.is_file() else set()
    kept_out = {one.attempt for one in entries}
    for path in sorted((place / "checkpoints").glob("update-*")):
        try:
            owner, one = checkpoint.read(path)
        except checkpoint.DamagedCheckpointError:
            continue
        done = int(one.state["progress"]["attempt"])
        left_out = recorded_ones & set(one.state.get("quarantined", ()))
        expected = {number for number in kept_out if number <= done}
        if owner == key and done < attempt and left_out == expected:
            found.append(one)
    return found


def parent_of(prepared: Prepared, planned: PlannedStage, place: Path) -> State:
    """The state that the stage began from: of the last promoted stage before it, or the base."""
    ledger = Ledger.read(prepared.folder)
    promoted = {one["folder"] for one in ledger.stages if one["promoted"]} if ledger else set()
    states = [
        read_state(prepared.folder / one.folder_name)
        for one in prepared.stages[: planned.index]
        if one.folder_name in promoted
    ]
    parent = next((one for one in reversed(states) if one is not None), prepared.bench.base)
    precision = prepared.plan["precision"]["value"]
    encoder = prepared.bench.encoder.fingerprint
    key = stage_key(prepared.recipe, planned.index, parent.key, encoder, precision)
    if key != key_of(place):
        changed = differences(prepared.recipe, prepared.folder, prepared.bench.base.key)
        told = f". What differs: {'; '.join(changed)}" if changed else ""
        expected = (
            "recipe, data, model and libraries as they were when the stage was trained: its "
            f"batches cannot be made again from what is there now{told}. Put the data files and "
            "the model back as they were (and the same version of lehr), then ask again"
        )
        raise RecipeError(Problem(str(place), expected))
    return parent
