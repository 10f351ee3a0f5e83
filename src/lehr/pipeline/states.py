"""States of a model: what a stage began from and what it produced, as files with a key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from lehr.pipeline.files import read_json, write_json
from lehr.streams import file_hash

STATE_FILE = "state.json"


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
        return load_file(self.files / "adapter_model.safetensors")

    def is_whole(self) -> bool:
        """Whether the files of this state, and of what lies under it, can be read."""
        if self.root is not None and not self.root.is_whole():
            return False
        if self.folder is None:
            return True
        shards = sorted(self.files.glob("*.safetensors"))
        try:
            for path in shards:
                with safe_open(path, "pt"):
                    pass
        except (OSError, SafetensorError):
            return False
        return bool(shards)

    def save(self, run_folder: Path) -> None:
        """Describe the state beside its files; it exists from here on."""
        assert self.folder is not None
        hashes = {path.name: file_hash(path) for path in sorted(self.files.iterdir())}
        write_json(self.folder / STATE_FILE, {**self.as_json(run_folder), "files": hashes})

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


def read_state(folder: Path) -> State | None:
    """The state of a stage's folder, or None where it did not finish or lost its files."""
    described = read_json(folder / STATE_FILE)
    if not isinstance(described, dict):
        return None
    state = state_from(described, folder.parent)
    return state if state.is_whole() else None


def produced_json(folder: Path) -> dict[str, Any]:
    """state.json of a stage's folder: the state with the SHA-256 of each of its files."""
    described = read_json(folder / STATE_FILE)
    return described if isinstance(described, dict) else {}
