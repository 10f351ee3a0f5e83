"""Files that are whole or absent: written aside, synced, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8", errors="surrogatepass") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented strict JSON (non-finite numbers are refused)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The value in `path`, or None where the file is absent or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def link_weights(source: str | Path, target: str | Path) -> str:
    """Copy a file; weights are linked where the file system can, and take no second room.

    Small files are copied: somebody may edit one, which must not change the other.
    """
    if Path(source).suffix == ".safetensors":
        try:
            os.link(source, target)
            return str(target)
        except OSError:
            pass
    return str(shutil.copy2(source, target))


def differing(folder: Path, hashes: Mapping[str, str]) -> list[str]:
    """Files of `folder` that are missing or hold something else than the SHA-256 known."""
    from lehr.streams import file_hash  # torch, which who reads a curve does not wait for

    return [
        name
        for name, known in hashes.items()
        if not (folder / name).is_file() or file_hash(folder / name) != known
    ]


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process had begun to write aside in `folder`: hidden names."""
    for path in folder.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder aside, then put it in the place of `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.writing")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    fill(aside)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; nothing where it is absent."""
    rows = []
    with suppress(OSError):
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) else []
    return rows
