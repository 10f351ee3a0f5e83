"""What a user types, checked before anything is done with it."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lehr.errors import LehrError, Problem, RecipeError

# What the name of a file can cause; everything else that a system call raises is a bug or a lack.
NAME_ERRORS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
    }
)


@dataclass(frozen=True)
class Device:
    """The device that a plan is for, where it is not this one: GiB, 10^9 operations a second."""

    memory_gib: float | None = None
    gflops: float | None = None

    @classmethod
    def of(cls, memory: str | None, tflops: float | None) -> Device:
        """From `--memory 24GiB --tflops 60`. Raises RecipeError for what is no size or no rate.

        >>> Device.of("24GiB", 60).memory_gib, Device.of("512MiB", None).memory_gib
        (24.0, 0.5)
        """
        size = None
        if memory is not None:
            found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB|)", memory.strip())
            size = float(found[1]) / (1024 if found[2] == "MiB" else 1) if found else 0.0
            if size <= 0:
                raise RecipeError(Problem("--memory", "a size, as in 24GiB", memory))
        if tflops is not None and not 0 < tflops < 1e6:
            expected = "10^12 operations a second of matrix products, above 0"
            raise RecipeError(Problem("--tflops", expected, tflops))
        return cls(size, None if tflops is None else 1e3 * tflops)


def require_text(text: str, where: str) -> None:
    """Raise RecipeError for text with bytes that are no UTF-8 (they arrive as surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text.encode(errors="replace").decode()
        expected = f"UTF-8 text (character {error.start + 1} is none)"
        raise RecipeError(Problem(where, expected, shown)) from None


def require_arguments(arguments: Sequence[str]) -> None:
    """Raise RecipeError for arguments that are no text: no result could name them."""
    problems: list[Problem] = []
    for number, argument in enumerate(arguments, 1):
        try:
            require_text(argument, f"argument {number}")
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)


def about_a_name(error: OSError) -> LehrError | None:
    """What to tell of a file that cannot be used as named; None where it is another fault."""
    if error.filename is None or error.errno not in NAME_ERRORS:
        return None
    return RecipeError(Problem(str(error.filename), f"a file that can be used ({error.strerror})"))
