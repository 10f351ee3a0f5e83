"""The files of a run, read so that nothing in them can stop a report.

A report is wanted most when a run went wrong: while it runs, after a kill, with a
truncated line or a missing folder. So every reader here answers with what is there
and notes what is not; nothing raises on content.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINES_KEPT = 200_000  # of one JSONL file; a report is a page, not an archive


def number(value: object) -> float | None:
    """`value` as a finite float, or None (booleans are not numbers here)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def text(value: object) -> str:
    """`value` as text that has a UTF-8 form; None is empty, NUL is dropped."""
    if value is None:
        return ""
    result = value if isinstance(value, str) else str(value)
    return result.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def mapping(value: object) -> Mapping[str, Any]:
    """`value` where it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> list[Any]:
    """`value` where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def objects(value: object) -> list[Mapping[str, Any]]:
    """The objects of a list; anything else in it is left out."""
    return [entry for entry in items(value) if isinstance(entry, Mapping)]


def parse_json(source: str) -> Any:
    """Parsed JSON with every non-finite number as None; None where it is not JSON."""
    try:
        return json.loads(source, parse_constant=lambda _name: None)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class StageFiles:
    """What one stage left behind. `entry` is its line of the ledger ({} while it runs)."""

    folder: str
    entry: Mapping[str, Any]
    planned: Mapping[str, Any]
    audit: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    flips: list[Mapping[str, Any]]
    metrics: list[Mapping[str, Any]]
    doctor: Mapping[str, Any] = field(default_factory=dict)
    quarantine: list[Mapping[str, Any]] = field(default_factory=list)
    time: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        for source in (self.entry, self.planned, self.evaluation):
            if source.get("name"):
                return text(source["name"])
        return self.folder.split("-", 1)[-1] or self.folder

    @property
    def kind(self) -> str:
        return text(self.entry.get("kind") or self.planned.get("kind") or self.name)

    @property
    def finished(self) -> bool:
        return bool(self.entry)

    @property
    def promoted(self) -> bool:
        return self.entry.get("promoted") is True

    @property
    def gates(self) -> list[Mapping[str, Any]]:
        return objects(self.evaluation.get("gates")) or objects(self.entry.get("gates"))


@dataclass(frozen=True)
class RunFiles:
    """A run folder as it is now. `missing` names what could not be read."""

    folder: Path
    ledger: Mapping[str, Any]
    plan: Mapping[str, Any]
    stages: list[StageFiles]
    events: list[Mapping[str, Any]]
    recipe: str
    missing: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return text(self.ledger.get("verdict")) or ("running" if self.stages else "unknown")

    @property
    def promoted(self) -> StageFiles | None:
        """The stage whose state is in model/: the last promoted one."""
        wanted = text(self.ledger.get("promoted_from"))
        for stage in reversed(self.stages):
            if stage.folder == wanted:
                return stage
        return next((stage for stage in reversed(self.stages) if stage.promoted), None)

    @property
    def shown(self) -> StageFiles | None:
        """The stage that the first screen shows: the promoted one, else the last one evaluated."""
        if self.promoted is not None and self.promoted.evaluation:
            return self.promoted
        return next((stage for stage in reversed(self.stages) if stage.evaluation), None)


def read_run(folder: Path) -> RunFiles:
    """Read a run folder; raises NotADirectoryError where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a run folder")
    missing: list[str] = []
    ledger = _object(folder / "ledger.json", folder, missing)
    plan = _object(folder / "plan.json", folder, missing)
    entries = {text(entry.get("folder")): entry for entry in objects(ledger.get("stages"))}
    planned = {text(entry.get("folder")): entry for entry in objects(plan.get("stages"))}
    # A folder that no longer stands in plan or ledger is left over from an earlier recipe.
    found = [name for name in _stage_folders(folder) if not planned or name in planned]
    names = dict.fromkeys([*found, *entries])
    started = [name for name in names if name and _is_inside(folder, name)]
    # A stage's number is the first part of its folder's name, so names sort in run order.
    stages = [
        _stage(folder, name, entries.get(name, {}), planned.get(name, {}), missing)
        for name in sorted(started)
    ]
    recipe_file = folder / "recipe.yaml"
    recipe = _text_of(recipe_file) if recipe_file.is_file() else ""
    return RunFiles(
        folder=folder,
        ledger=ledger,
        plan=plan,
        stages=stages,
        events=list(_lines(folder / "events.jsonl", folder, missing, required=False)),
        recipe=recipe,
        missing=missing,
    )


def _stage_folders(folder: Path) -> list[str]:
    found = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(name for name in found if name[:2].isdigit() and "-" in name)


def _is_inside(folder: Path, name: str) -> bool:
    """A ledger may be edited by anybody: a stage folder is a plain name in the run folder."""
    return Path(name).name == name and name not in {".", ".."}


def _stage(
    folder: Path,
    name: str,
    entry: Mapping[str, Any],
    planned: Mapping[str, Any],
    missing: list[str],
) -> StageFiles:
    place = folder / name
    return StageFiles(
        folder=name,
        entry=entry,
        planned=planned,
        audit=_object(place / "audit.json", folder, missing, required=bool(entry)),
        evaluation=_object(place / "evaluation.json", folder, missing, required=bool(entry)),
        flips=list(_lines(place / "flips.jsonl", folder, missing, required=False)),
        metrics=list(_lines(place / "metrics.jsonl", folder, missing, required=bool(entry))),
        doctor=_object(place / "doctor.json", folder, missing, required=False),
        quarantine=list(_lines(place / "quarantine.jsonl", folder, missing, required=False)),
        time=_object(place / "time.json", folder, missing, required=False),
    )


def _object(
    path: Path, folder: Path, missing: list[str], required: bool = True
) -> Mapping[str, Any]:
    label = path.relative_to(folder).as_posix()
    if not path.is_file():
        if required:
            missing.append(label)
        return {}
    value = parse_json(_text_of(path))
    if not isinstance(value, Mapping):
        missing.append(f"{label} (not readable as a JSON object)")
        return {}
    return value


def _lines(
    path: Path, folder: Path, missing: list[str], required: bool
) -> Iterator[Mapping[str, Any]]:
    label = path.relative_to(folder).as_posix()
    if not path.is_file():
        if required:
            missing.append(label)
        return
    damaged = 0
    # Only LF ends a record: splitlines() would also cut at U+2028 inside a string.
    lines = [line for line in _text_of(path).split("\n") if line.strip()]
    for line in lines[:LINES_KEPT]:
        value = parse_json(line)
        if isinstance(value, Mapping):
            yield value
        else:
            damaged += 1
    if damaged:
        missing.append(f"{label} ({damaged} damaged lines)")
    if len(lines) > LINES_KEPT:
        missing.append(f"{label} (lines after the first {LINES_KEPT:,})")


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
