"""States of a model: what a stage began from and what it produced, as files with a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from lehr.models.peft_format import ADAPTER_WEIGHTS
from lehr.pipeline.files import read_json, write_json
from lehr.streams import file_hash

STATE_FILE = "state.json"
# What a finished stage says about its training, beside its weights.
RECORDS = ("metrics.jsonl", "kl.json")
_hashes: dict[tuple[str, int, int, int, int], str] = {}


@dataclass(frozen=True)
class State:
    """A point in a model's life.

    kind    base     the model as it was loaded
            weights  all weights, in `folder`/weights (a new base for what follows)
            adapter  `folder`/adapter over the weights of `root`
    key     hash of everything that led here: equal keys, equal numbers
    untrained_rows  vocabulary ids of a template that no training has used yet
    """

    kind: Literal["base", "weights", "adapter"]
    key: str
    folder: Path | None = None
    root: State | None = None
    untrained_rows: tuple[int, ...] = ()

    @property
    def weights(self) -> State:
        """The state whose full weights lie under this one (itself, where it has its own)."""
        return self.root if self.kind == "adapter" and self.root is not None else self

    @property
    def files(self) -> Path:
        """The folder that holds what was produced."""
        assert self.folder is not None, "a base has no files of its own"
        return self.folder / ("adapter" if self.kind == "adapter" else "weights")

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's tensors, by the model's names for them."""
        assert self.kind == "adapter"
        return load_file(self.files / ADAPTER_WEIGHTS)

    def save(self, run_folder: Path) -> None:
        """Describe the state beside its files; it exists from here on."""
        assert self.folder is not None
        records = [self.folder / name for name in RECORDS if (self.folder / name).is_file()]
        described = self._described(run_folder)
        described["records"] = {path.name: _hash_of(path) for path in records}
        write_json(self.folder / STATE_FILE, described)

    def _described(self, run_folder: Path) -> dict[str, Any]:
        """`as_json` with the SHA-256 of every file, of what lies under it too."""
        described = self.as_json(run_folder)
        if self.root is not None:
            described["root"] = self.root._described(run_folder)
        if self.folder is not None:
            described["files"] = {path.name: _hash_of(path) for path in _files(self.files)}
        return described

    def as_json(self, run_folder: Path) -> dict[str, Any]:
        folder = None if self.folder is None else self.folder.relative_to(run_folder).as_posix()
        return {
            "kind": self.kind,
            "key": self.key,
            "root": self.root.as_json(run_folder) if self.root else None,
            "folder": folder,
            "untrained_rows": list(self.untrained_rows),
        }


def state_from(described: dict[str, Any], run_folder: Path) -> State:
    """The state that `as_json` described, its folders in `run_folder`."""
    root = described.get("root")
    folder = described.get("folder")
    return State(
        kind=described["kind"],
        key=described["key"],
        folder=run_folder / folder if folder else None,
        root=state_from(root, run_folder) if root else None,
        untrained_rows=tuple(described.get("untrained_rows") or ()),
    )


def damage(described: Mapping[str, Any], run_folder: Path) -> str:
    """The first file of a described state that is not what was written, or "".

    Every file is read and hashed, of the state and of what lies under it: weights with one
    bit changed open as well as before. Files that nobody wrote there count too.
    """
    root = described.get("root")
    below = damage(root, run_folder) if isinstance(root, dict) else ""
    if below or described.get("folder") is None:
        return below
    known = described.get("files")
    state = state_from(dict(described), run_folder)
    if not isinstance(known, dict) or not known:
        return f"{described['folder']}/{STATE_FILE}"
    there = {path.name: path for path in _files(state.files)}
    for name in sorted({*known, *there}):
        if name not in there or known.get(name) != _hash_of(there[name]):
            return (state.files / name).relative_to(run_folder).as_posix()
    return ""


def damaged_record(described: Mapping[str, Any], folder: Path) -> str:
    """The first record of a finished stage (its metrics) that is not as written, or ""."""
    for name, known in (described.get("records") or {}).items():
        if not (folder / name).is_file() or _hash_of(folder / name) != known:
            return f"{folder.name}/{name}"
    return ""


def read_state(folder: Path) -> State | None:
    """The state of a stage's folder, or None where it did not finish or its files changed."""
    described = produced_json(folder)
    if not described or damage(described, folder.parent):
        return None
    return state_from(described, folder.parent)


def produced_json(folder: Path) -> dict[str, Any]:
    """state.json of a stage's folder: the state with the SHA-256 of each of its files."""
    described = read_json(folder / STATE_FILE)
    known = isinstance(described, dict) and {"kind", "key", "folder"} <= described.keys()
    return described if known else {}


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))


def _hash_of(path: Path) -> str:
    """SHA-256 of a file; a process reads it again where anything about the file changed."""
    stat = path.stat()
    key = (str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if key not in _hashes:
        _hashes[key] = file_hash(path)
    return _hashes[key]
