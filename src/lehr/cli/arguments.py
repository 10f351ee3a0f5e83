"""What a user types, checked before anything is done with it."""

from __future__ import annotations

import errno
from collections.abc import Sequence

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
