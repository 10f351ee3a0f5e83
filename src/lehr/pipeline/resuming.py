"""Proof of resume on a finished stage: its last updates run again from an older checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from lehr.errors import Problem, RecipeError
from lehr.pipeline.events import Events
from lehr.pipeline.planning import Prepared
from lehr.pipeline.stage_run import train_stage
from lehr.pipeline.staging import PlannedStage
from lehr.pipeline.states import State, damage, produced_json, read_state


def replay_last_updates(
    prepared: Prepared, planned: PlannedStage, events: Events
) -> tuple[bool, str]:
    """(same bits, what was found). Works on a copy; the run's folder is not touched."""
    folder = prepared.folder / planned.folder_name
    tuned = read_state(folder)
    if tuned is None:
        described = produced_json(folder)
        changed = damage(described, prepared.folder) if described else ""
        return not changed, f"{changed} is damaged" if changed else "the stage was not run"
    checkpoints = sorted((folder / "checkpoints").glob("update-*"))
    if len(checkpoints) < 2:
        return True, "no older checkpoint is kept (checkpoints_kept: 1)"
    older = checkpoints[-2]
    parent = parent_of(prepared, planned)
    with tempfile.TemporaryDirectory() as aside:
        copy = Path(aside) / planned.folder_name
        copy.mkdir()
        for name in ("metrics.jsonl", "reference.json", "quarantine.jsonl"):
            if (folder / name).is_file():
                shutil.copy2(folder / name, copy / name)
        # The best one may be older still; what is newer must be made again.
        for path in (folder / "checkpoints").iterdir():
            if path.is_file():
                (copy / "checkpoints").mkdir(exist_ok=True)
                shutil.copy2(path, copy / "checkpoints" / path.name)
            elif path.name <= older.name:
                shutil.copytree(path, copy / "checkpoints" / path.name)
        model = train_stage(prepared, planned, copy, tuned.key, parent, events)[0]
        again = model.state()
        kept = saved_tensors(tuned)
        different = [name for name in again if not _equal(again[name], kept.get(name))]
        same_rows = _rows(copy / "metrics.jsonl") == _rows(folder / "metrics.jsonl")
    if different:
        return False, f"{len(different)} tensors differ from {older.name} on, first {different[0]}"
    if not same_rows:
        return False, f"metrics.jsonl differs from {older.name} on"
    return True, f"bit for bit the same from {older.name} on"


def parent_of(prepared: Prepared, planned: PlannedStage) -> State:
    """The state that a finished stage began from, by the ledger."""
    from lehr.pipeline.ledger import Ledger

    ledger = Ledger.read(prepared.folder)
    assert ledger is not None
    entries = {one["folder"]: one for one in ledger.stages}
    key = entries[planned.folder_name]["parent"]
    if key == prepared.bench.base.key:
        return prepared.bench.base
    for entry in ledger.stages:
        if entry["produced"]["key"] == key:
            state = read_state(prepared.folder / entry["folder"])
            if state is not None:
                return state
    raise RecipeError(Problem(planned.folder_name, "its parent's files in the run's folder", key))


def saved_tensors(state: State) -> dict[str, torch.Tensor]:
    """What a stage produced, as it lies on disk."""
    from safetensors.torch import load_file

    if state.kind == "adapter":
        return state.tensors()
    found: dict[str, torch.Tensor] = {}
    for path in sorted(state.files.glob("*.safetensors")):
        found |= load_file(path)
    return found


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


def _rows(path: Path) -> list[dict[str, Any]]:
    import json

    lines = path.read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
