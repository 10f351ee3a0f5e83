"""The folder of a run: whose it is, and that only one process works in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lehr.errors import Problem, RecipeError
from lehr.pipeline.files import read_json

RUN_FILES = ("ledger.json", "recipe.yaml", "plan.json", "events.jsonl")


def output_folder(output: str | None, name: str, out: Path | None, base: Path) -> Path:
    """Where a run goes: `--out`, else the recipe's `output`, else runs/<name> here."""
    if out is not None:
        return out.absolute()
    if output is not None:
        return (base / Path(output).expanduser()).absolute()
    return Path("runs", name).absolute()


@contextmanager
def claimed(folder: Path, name: str, fresh: bool) -> Iterator[Path]:
    """The folder, made if absent, locked against a second process while in use.

    Raises RecipeError where the folder holds something that is not this run.
    """
    if folder.exists() and not folder.is_dir():
        raise RecipeError(Problem(str(folder), "a folder for the run, not a file"))
    _refuse_foreign(folder, name, fresh)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        _lock(lock, folder)
        if fresh:
            empty(folder)
        yield folder


def empty(folder: Path) -> None:
    """Remove what a run wrote (and nothing else)."""
    for path in folder.iterdir():
        if path.name == ".lock":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _refuse_foreign(folder: Path, name: str, fresh: bool) -> None:
    if not folder.is_dir():
        return
    inside = [path.name for path in folder.iterdir() if path.name != ".lock"]
    if not inside:
        return
    if not any(known in inside for known in RUN_FILES):
        raise RecipeError(
            Problem(
                str(folder),
                "an empty folder or the folder of this run: it holds other files; choose "
                "another with --out",
                inside[0],
            )
        )
    ledger = read_json(folder / "ledger.json")
    other = ledger.get("name") if isinstance(ledger, dict) else None
    if other not in (None, name) and not fresh:
        raise RecipeError(
            Problem(
                str(folder),
                f"the folder of the run {name!r}: it belongs to another run; choose another "
                "with --out, or start over with --fresh",
                other,
            )
        )


def _lock(lock: IO[str], folder: Path) -> None:
    if os.name != "posix":  # no advisory locks there: the check for a foreign run remains
        return
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RecipeError(
            Problem(str(folder), "a folder in which no other lehr process is at work")
        ) from None
