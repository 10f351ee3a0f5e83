"""Files that a user names for a result: written whole or not at all, never over another one."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from lehr.errors import Problem, RecipeError

FULL = (errno.ENOSPC, errno.EDQUOT)  # no fault of the name: told as a lack of resources


def require_new(path: Path, expected: str) -> None:
    """Raise RecipeError where something stands at `path`, or nothing can be looked up there."""
    if "\0" in str(path):
        raise RecipeError(Problem(repr(str(path)), "a name that a file can have"))
    if os.path.lexists(path):
        raise RecipeError(Problem(str(path), expected))


def write_new(path: Path, text: str, expected: str) -> None:
    """Write `text` as UTF-8 to a file that was not there; folders on the way are made.

    Raises RecipeError where something stands there by now, or the file cannot be made.
    """
    require_new(path, expected)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        said = "names and text that are UTF-8 (some bytes of them are no character)"
        raise RecipeError(Problem(str(path), said)) from None
    aside = path.with_name(f".{os.getpid()}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        _move(aside, path)
    except FileExistsError:
        raise RecipeError(Problem(str(path), expected)) from None
    except OSError as error:
        if error.errno in FULL:
            raise
        why = f"a place where a file can be written ({error.strerror})"
        raise RecipeError(Problem(str(path), why)) from None
    finally:
        with suppress(OSError):
            aside.unlink()


def require_writable(path: Path, expected: str) -> None:
    """Raise RecipeError where `write_new` would: before what takes long, not after it."""
    write_new(path, "", expected)
    path.unlink()


def _move(aside: Path, path: Path) -> None:
    """Give the file its name; FileExistsError where the name was taken meanwhile."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        aside.replace(path)
