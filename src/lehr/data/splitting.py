"""Held-out rows, chosen by what a row says and not by where it stands.

Each distinct content has a place in a fixed random order (a hash keyed by the seed); the first
ones are held out. So the choice does not depend on the order of rows, copies of a row are always
on one side, and adding rows moves few of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from lehr.data.shapes import Example
from lehr.errors import Problem, RecipeError
from lehr.streams import content_hash

DEFAULT_HOLDOUT_ROWS = 200
DEFAULT_HOLDOUT_SHARE = 0.1


def default_holdout(rows: int) -> int:
    """A tenth of the rows, at most 200 and at least 1.

    >>> default_holdout(50), default_holdout(10_000), default_holdout(3)
    (5, 200, 1)
    """
    return max(1, min(DEFAULT_HOLDOUT_ROWS, int(rows * DEFAULT_HOLDOUT_SHARE)))


def split(
    examples: Sequence[Example], holdout: int | float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(train, held out), each in the order given.

    `holdout` is a number of rows, or below 1 a share of them. It is met exactly, unless copies
    of one row stand in the way; then it is the nearest number below that keeps them together.
    Raises RecipeError where it leaves no row to train on, or none to hold out.
    """
    wanted = _rows_to_hold_out(len(examples), holdout)
    if wanted == 0:
        return list(examples), []
    keys = [example.content_key() for example in examples]
    copies: dict[str, int] = {}
    for key in keys:
        copies[key] = copies.get(key, 0) + 1
    if len(copies) == 1:
        raise RecipeError(
            Problem(
                str(examples[0].origin),
                f"rows that differ, to hold some out: all {len(examples)} say the same",
                holdout,
            )
        )
    held: set[str] = set()
    room = wanted
    for key in sorted(copies, key=lambda key: _place(key, seed)):
        if copies[key] <= room:
            held.add(key)
            room -= copies[key]
        if room == 0:
            break
    if not held:
        raise RecipeError(
            Problem(
                str(examples[0].origin),
                f"a holdout of at least {min(copies.values())}: every row has copies, "
                "which stay on one side",
                holdout,
            )
        )
    train = [example for example, key in zip(examples, keys, strict=True) if key not in held]
    heldout = [example for example, key in zip(examples, keys, strict=True) if key in held]
    return train, heldout


def first_rows(examples: Sequence[Example], rows: int, seed: int) -> list[Example]:
    """The first `rows` in the fixed random order, given back in the order of `examples`."""
    order = sorted(
        range(len(examples)), key=lambda index: _place(examples[index].content_key(), seed)
    )
    return [examples[index] for index in sorted(order[:rows])]


def _place(key: str, seed: int) -> str:
    return content_hash([seed, "holdout", key])


def _rows_to_hold_out(rows: int, holdout: int | float) -> int:
    if isinstance(holdout, bool) or not isinstance(holdout, int | float):
        raise RecipeError(Problem("holdout", "a number of rows or a share below 1", holdout))
    if isinstance(holdout, float) and not holdout.is_integer():
        if not 0 < holdout < 1:
            raise RecipeError(Problem("holdout", "a number of rows or a share below 1", holdout))
        wanted = max(1, round(rows * holdout))
    else:
        wanted = int(holdout)
    if wanted < 0:
        raise RecipeError(Problem("holdout", "0 or more rows", holdout))
    if wanted and wanted >= rows:
        raise RecipeError(
            Problem("holdout", f"fewer than the {rows} usable rows, so that some train", holdout)
        )
    return wanted
