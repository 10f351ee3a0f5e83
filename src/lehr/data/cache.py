"""Disk cache of encoded examples.

One entry is two files: all tokens end to end in safetensors, and a JSON sidecar with the
lengths, origins and the hash of the first file. The sidecar is written last and each file is
renamed into place, so an entry is complete or absent; a damaged one is made again.
The caller's key must name everything that can change the content (file hashes, template,
tokenizer, date, options); the format's own version is added here.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lehr.data.shapes import Encoded, Origin
from lehr.streams import content_hash, file_hash

FORMAT = 1  # raise it whenever the files below change their meaning


def cached_encoded(key: str, build: Callable[[], Sequence[Encoded]], folder: Path) -> list[Encoded]:
    """The examples stored under `key`, or those that `build` makes, then stored.

    A folder that can not be written warns and costs the time to build again, nothing else.
    """
    return cached_with_account(key, lambda: (build(), None), folder)[0]


def cached_with_account(
    key: str, build: Callable[[], tuple[Sequence[Encoded], Any]], folder: Path
) -> tuple[list[Encoded], Any]:
    """As `cached_encoded`, with a JSON value beside the examples (drop counts, notes).

    The account comes back as JSON makes it (tuples become lists) whether or not it was stored.
    """
    name = content_hash(["encoded", FORMAT, key])[:32]
    tensors, sidecar = folder / f"{name}.safetensors", folder / f"{name}.json"
    found = _read(key, tensors, sidecar)
    if found is not None:
        return found
    built, account = build()
    encoded = list(built)
    account_text = json.dumps(account, ensure_ascii=True)
    try:
        _write(key, encoded, account_text, tensors, sidecar)
    except OSError as error:
        warnings.warn(f"encoded examples are not cached in {folder}: {error}", stacklevel=2)
    return encoded, json.loads(account_text)


def _read(key: str, tensors: Path, sidecar: Path) -> tuple[list[Encoded], Any] | None:
    """The entry, or None where it is absent, damaged or another key's."""
    try:
        entry = json.loads(sidecar.read_text(encoding="utf-8"))
        if entry["key"] != key or entry["sha256"] != file_hash(tensors):
            return None
        stored = load_file(tensors)
        return _unflatten(entry, stored["ids"], stored["supervised"]), entry["account"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError):
        return None


def _write(
    key: str, encoded: Sequence[Encoded], account_text: str, tensors: Path, sidecar: Path
) -> None:
    tensors.parent.mkdir(parents=True, exist_ok=True)
    # A crash between the two renames must not leave the old sidecar beside new tensors.
    sidecar.unlink(missing_ok=True)
    parts = [part for one in encoded for part in (one, *one.branches)]
    ids = torch.cat([part.ids.long() for part in parts] or [torch.empty(0, dtype=torch.long)])
    flags = torch.cat([part.supervised for part in parts] or [torch.empty(0, dtype=torch.bool)])
    # int32 holds every vocabulary and halves the file.
    stored = {"ids": ids.to(torch.int32), "supervised": flags}
    _replace(tensors, lambda path: save_file(stored, path))
    entry = {
        "key": key,
        "sha256": file_hash(tensors),
        "examples": [
            {
                "origin": [one.origin.source, one.origin.file, one.origin.line],
                "parts": [[int(p.ids.numel()), p.supervised_bytes] for p in (one, *one.branches)],
            }
            for one in encoded
        ],
        "account": json.loads(account_text),
    }
    text = json.dumps(entry, ensure_ascii=True)
    _replace(sidecar, lambda path: path.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes aside, flushes to disk, renames."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(aside)
        with aside.open("rb+") as stream:
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _unflatten(entry: Any, ids: Tensor, supervised: Tensor) -> list[Encoded]:
    """Examples out of the concatenated tensors; ValueError where the lengths do not add up."""
    examples = []
    place = 0
    ids = ids.long()
    for example in entry["examples"]:
        origin = Origin(*example["origin"])
        made = []
        for length, supervised_bytes in example["parts"]:
            if place + length > ids.numel():
                raise ValueError("fewer tokens than the lengths say")
            part = slice(place, place + length)
            made.append(
                Encoded(ids[part], supervised[part], origin, supervised_bytes=supervised_bytes)
            )
            place += length
        prompt, *branches = made
        if branches:
            prompt = Encoded(
                prompt.ids, prompt.supervised, origin, tuple(branches), prompt.supervised_bytes
            )
        examples.append(prompt)
    if place != ids.numel():
        raise ValueError("more tokens than the lengths say")
    return examples
