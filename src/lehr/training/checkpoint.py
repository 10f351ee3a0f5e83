"""Checkpoints that are complete or absent.

A checkpoint is a folder `update-000120` of safetensors files and `state.json`, which
holds size and SHA-256 of every other file and a hash of itself. It is written aside,
forced to disk, then renamed: a kill at any moment leaves the old ones or the new one.
No pickle is written or read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from lehr.errors import Problem, RecipeError
from lehr.streams import content_hash, file_hash
from lehr.training.resources import disk_errors, require_disk

STATE_FILE = "state.json"
_NAME = re.compile(r"update-(\d+)")
_ASIDE = ".tmp-"
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
_STATE_BYTES = 1 << 20  # room kept for state.json and the file system's own blocks


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that is not used, and why."""

    path: Path
    reason: str
    foreign: bool


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. `state` is what the engine stored; tensors are read on demand."""

    path: Path
    update: int
    state: Mapping[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of the file `name`.safetensors, on the CPU."""
        tensors: dict[str, Tensor] = safetensors.torch.load_file(self.path / f"{name}.safetensors")
        return tensors


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint of this run, and everything newer that was passed over.

    outdated  whole ones of this run, newer, that were not usable
    """

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]
    outdated: tuple[Path, ...] = ()


class DamagedCheckpointError(Exception):
    """The folder is no whole checkpoint; the text says what is wrong."""


def folder_of(root: Path, update: int) -> Path:
    """Where the checkpoint of `update` stands."""
    return root / f"update-{update:06d}"


def save(
    root: Path,
    update: int,
    files: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    key: str,
) -> Path:
    """Write a checkpoint; it appears under its name only when it is whole and on disk.

    files  name -> tensors, one safetensors file each
    state  JSON values
    key    identity of the run: a folder with another key is never read, replaced or deleted

    Raises OutOfResources where the disk is full (what was begun is removed), RecipeError
    where another run's checkpoint has the same name.
    """
    final = folder_of(root, update)
    _refuse_foreign(final, key)
    needed = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    aside = root / f"{_ASIDE}{final.name}-{os.getpid()}"
    with disk_errors(root, needed):
        root.mkdir(parents=True, exist_ok=True)
        require_disk(root, needed + _STATE_BYTES, what=f"checkpoint {final.name}")
        try:
            _write(aside, update, files, state, key)
            _rename(aside, final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return final


def _write(
    folder: Path,
    update: int,
    files: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    key: str,
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    contents = {}
    for name, tensors in files.items():
        path = folder / f"{name}.safetensors"
        safetensors.torch.save_file({name: _alone(value) for name, value in tensors.items()}, path)
        _sync(path)
        contents[path.name] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    body = {"key": key, "update": update, "files": contents, "state": dict(state)}
    body = json.loads(json.dumps(body, allow_nan=False))  # hash what will be read, not tuples
    text = json.dumps({"sha256": content_hash(body), "body": body}, allow_nan=False, indent=1)
    path = folder / STATE_FILE
    path.write_text(text, encoding="utf-8")
    _sync(path)
    _sync(folder)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, in a storage of its own."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _rename(aside: Path, final: Path) -> None:
    if final.exists():  # damaged, or it would not be written again: nothing is lost
        discarded = final.with_name(f"{_ASIDE}old-{final.name}-{os.getpid()}")
        final.rename(discarded)
        shutil.rmtree(discarded)
    aside.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Force a file or a folder's list of names to disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[str, Checkpoint]:
    """Key and checkpoint of a folder, every byte checked.

    Raises DamagedCheckpointError where anything is missing or differs.
    """
    body = _read_body(path)
    for name, expected in body["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
                reason = f"{name} has {size} bytes instead of {expected['bytes']}"
                raise DamagedCheckpointError(reason)
            if file_hash(file) != expected["sha256"]:
                raise DamagedCheckpointError(f"{name} is not what was written (SHA-256 differs)")
        except OSError as error:
            raise DamagedCheckpointError(f"{name} cannot be read: {error.strerror}") from error
    return body["key"], Checkpoint(path, body["update"], body["state"])


def newest(
    root: Path, key: str, usable: Callable[[Mapping[str, Any]], bool] = lambda state: True
) -> Found:
    """The newest whole and usable checkpoint of the run `key`; damaged and foreign ones are named.

    usable  whether the run may go on from what the engine stored
    Raises RecipeError where a checkpoint holds a pickle.
    """
    skipped: list[Skipped] = []
    outdated: list[Path] = []
    chosen: Checkpoint | None = None
    for _, path in reversed(_numbered(root)):
        if _is_foreign(path, key):
            skipped.append(Skipped(path, "belongs to another run", foreign=True))
            continue
        if chosen is not None:
            continue
        _refuse_pickles(path)
        try:
            _, found = read(path)
        except DamagedCheckpointError as error:
            skipped.append(Skipped(path, str(error), foreign=False))
            continue
        if usable(found.state):
            chosen = found
        else:
            outdated.append(path)
    return Found(chosen, tuple(skipped), tuple(outdated))


def rotate(root: Path, key: str, current: int, kept: int, damaged: Iterable[Path]) -> list[Path]:
    """Delete this run's older checkpoints; returns what was deleted.

    The `kept` newest by number stay, with `current`, the one just written, and the best
    (`best_update` in the state) of each that stays. Call it only after the new one is
    whole. Of the `damaged` ones those go that say that they are of this run.
    """
    own, doomed = [], []
    spoilt = set(damaged)
    for update, path in _numbered(root):
        try:
            body = _read_body(path)
        except DamagedCheckpointError:
            continue
        if body["key"] == key and path in spoilt:
            doomed.append(path)
        elif body["key"] == key:
            own.append((update, path, body["state"].get("best_update")))
    newest_numbers = {update for update, _, _ in own[-kept:]} | {current}
    protected = newest_numbers | {best for update, _, best in own if update in newest_numbers}
    doomed += [path for update, path, _ in own if update not in protected]
    for path in doomed:
        remove(path)
    return doomed


def remove(path: Path) -> None:
    """Delete a checkpoint. Out of its name first: a kill leaves no half one behind."""
    aside = path.with_name(f"{_ASIDE}old-{path.name}-{os.getpid()}")
    path.rename(aside)
    shutil.rmtree(aside)


def clean(root: Path) -> list[Path]:
    """Remove what a killed process had begun; returns the folders removed."""
    left = sorted(root.glob(f"{_ASIDE}*")) if root.is_dir() else []
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


def refuse_collisions(root: Path, key: str, updates: int) -> None:
    """Raise RecipeError where a run of `updates` would meet another run's checkpoints."""
    problems = [
        Problem(str(path), "an output folder without another run's checkpoints")
        for update, path in _numbered(root)
        if update <= updates and _is_foreign(path, key)
    ]
    if problems:
        raise RecipeError(problems)


def _numbered(root: Path) -> list[tuple[int, Path]]:
    """(update, folder) of everything named like a checkpoint, by number."""
    if not root.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in named if match)


def _read_body(path: Path) -> dict[str, Any]:
    """The checked content of state.json."""
    try:
        content = json.loads((path / STATE_FILE).read_bytes())
        body: dict[str, Any] = content["body"]
        whole = content["sha256"] == content_hash(body)
        fields = {"key", "update", "files", "state"} <= body.keys()
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{STATE_FILE} is missing") from error
    except OSError as error:
        raise DamagedCheckpointError(f"{STATE_FILE} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{STATE_FILE} is cut or changed") from error
    if not (whole and fields):
        raise DamagedCheckpointError(f"{STATE_FILE} is not what was written")
    return body


def _is_foreign(path: Path, key: str) -> bool:
    """True where the folder says that it is another run's; a damaged one says nothing."""
    try:
        return bool(_read_body(path)["key"] != key)
    except DamagedCheckpointError:
        return False


def _refuse_foreign(path: Path, key: str) -> None:
    if path.exists() and _is_foreign(path, key):
        expected = "an output folder without another run's checkpoints"
        raise RecipeError(Problem(str(path), expected))


def _refuse_pickles(path: Path) -> None:
    problems = [
        Problem(str(file), "no pickle in a checkpoint: it can run any code when it is read")
        for file in sorted(path.rglob("*"))
        if file.suffix in _PICKLES
    ]
    if problems:
        raise RecipeError(problems)
