"""The folder of a run: whose it is, and that only one process works in it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lehr.errors import Problem, RecipeError
from lehr.pipeline.files import read_json

RESOLVED = "recipe"  # recipe.yaml: what a run writes its resolved recipe to
PLANNED = "planned"  # where `lehr plan` writes, once a run is there
FOLDED = "folded-base"  # the base, where the recipe's model is an adapter over another
LOCK = ".lock"  # made with the folder and never removed: it also says whose the folder is
# Any of these says that a run was here. recipe.yaml does not: a user's own may lie there.
TRACES = ("ledger.json", "plan.json", "events.jsonl", LOCK)
FILES = {"ledger.json", "recipe.yaml", "plan.json", "strategy.md", "report.html", "events.jsonl"}
WRITTEN = {
    *FILES,
    *("model", "exports", ".cache", PLANNED, FOLDED),
}
STAGE_FOLDER = re.compile(r"\d\d+-.+")
ASIDE = re.compile(r"\..+\.(writing|old)")


def output_folder(output: str | None, name: str, out: Path | None, base: Path) -> Path:
    """Where a run goes: `--out`, else the recipe's `output`, else runs/<name> here."""
    if out is not None:
        return out.absolute()
    if output is not None:
        return (base / Path(output).expanduser()).absolute()
    return Path("runs", name).absolute()


def place_of(recipe: Any, name: str | None, out: Path | None) -> tuple[str, Path]:
    """(name, folder) of a run. A run's own recipe.yaml is that run, in its own folder."""
    if name is None and out is None and recipe.name == RESOLVED:
        owner = _owner(recipe.folder) if (recipe.folder / "plan.json").is_file() else ""
        if owner:
            return owner, recipe.folder
    name = name or recipe.name
    return name, output_folder(recipe.output, name, out, recipe.folder)


@contextmanager
def claimed(folder: Path, name: str, fresh: bool) -> Iterator[Path]:
    """The folder, made if absent, locked against a second process while in use.

    Raises RecipeError where the folder holds something that is not this run.
    """
    _refuse_foreign(folder, name, fresh)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        expected = f"a folder that can be written to ({error.strerror})"
        raise RecipeError(Problem(str(folder), expected)) from None
    with lock:
        _lock(lock, folder)
        if fresh:
            empty(folder)
        lock.truncate(0)
        lock.write(name)
        lock.flush()
        yield folder


@contextmanager
def at_rest(folder: Path) -> Iterator[Path]:
    """The folder of a run while no process works in it; nothing is written.

    Raises RecipeError where one does.
    """
    try:
        lock = (folder / LOCK).open("r", encoding="utf-8")
    except OSError:  # a folder of an earlier version, or without its hidden files
        yield folder
        return
    with lock:
        _lock(lock, folder, alone=False)
        yield folder


def empty(folder: Path) -> None:
    """Remove what a run wrote, and nothing else."""
    for path in folder.iterdir():
        ours = path.name in WRITTEN or ASIDE.fullmatch(path.name)
        if path.is_dir() and (ours or STAGE_FOLDER.fullmatch(path.name)):
            shutil.rmtree(path)
        elif ours and path.is_file():
            path.unlink()


def _refuse_foreign(folder: Path, name: str, fresh: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise RecipeError(Problem(str(folder), "a folder for the run, not a file"))
    inside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not inside:
        return
    if not any(known in inside for known in TRACES):
        raise RecipeError(
            Problem(
                str(folder),
                "an empty folder or the folder of this run: it holds other files; choose "
                "another with --out",
                inside[0],
            )
        )
    for one in FILES:
        if (folder / one).exists() and not (folder / one).is_file():
            raise RecipeError(Problem(str(folder / one), "a file of the run, not a folder"))
    for one in WRITTEN - FILES:
        if (folder / one).exists() and not (folder / one).is_dir():
            raise RecipeError(Problem(str(folder / one), "a folder of the run, not a file"))
    other = _owner(folder)
    if other not in ("", name) and not fresh:
        raise RecipeError(
            Problem(
                str(folder),
                f"the folder of the run {name!r}: it belongs to another run; choose another "
                "with --out, or start over with --fresh",
                other,
            )
        )


def _owner(folder: Path) -> str:
    """Name of the run that the folder belongs to, or "" where it does not say."""
    ledger = read_json(folder / "ledger.json")
    if isinstance(ledger, dict) and ledger.get("name"):
        return str(ledger["name"])
    try:
        return (folder / LOCK).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _lock(lock: IO[str], folder: Path, alone: bool = True) -> None:
    if os.name != "posix":  # no advisory locks there: the check for a foreign run remains
        return
    import fcntl

    try:
        fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        raise RecipeError(
            Problem(str(folder), "a folder in which no other lehr process is at work")
        ) from None
