"""States of a model: what a stage began from and what it produced, as files with a key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from lehr.pipeline.files import read_json, write_json


@dataclass(frozen=True)
class State:
    """A point in a model's life.

    kind    base     the model as it was loaded
            weights  all weights, in `folder`/weights (a new base for what follows)
            adapter  `folder`/adapter over the weights of `root`
    key     hash of everything that led here: equal keys, equal numbers
    """

    kind: Literal["base", "weights", "adapter"]
    key: str
    folder: Path | None = None
    root: State | None = None

    @property
    def weights(self) -> State:
        """The state whose full weights lie under this one (itself, where it has its own)."""
        return self.root if self.kind == "adapter" and self.root is not None else self

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's tensors, by the model's names for them."""
        assert self.kind == "adapter" and self.folder is not None
        return load_file(self.folder / "adapter" / "adapter_model.safetensors")

    def save(self) -> None:
        """Describe the state beside its files."""
        assert self.folder is not None
        write_json(self.folder / "state.json", self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "key": self.key,
            "root": self.root.as_json() if self.root else None,
            "folder": self.folder.name if self.folder else None,
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
    )


def read_state(folder: Path) -> State | None:
    """The state of a stage's folder, or None where it did not finish."""
    described = read_json(folder / "state.json")
    return state_from(described, folder.parent) if isinstance(described, dict) else None
