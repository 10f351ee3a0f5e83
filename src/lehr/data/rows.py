"""A row as it comes out of a file, before anybody asks what it means."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What reading a damaged compressed stream can raise. EOFError: the stream ends early.
# OSError includes gzip.BadGzipFile: a wrong checksum, or something that is no gzip.
DAMAGE = (EOFError, zlib.error, OSError)


@dataclass(frozen=True)
class Row:
    """One row of a file.

    value    a mapping of columns, a text, or None where the row could not be read
    line     line where the row starts, from 1 (row number in Parquet)
    problem  why `value` is None: a short fixed phrase that never quotes the row
    notes    what was changed or guessed while reading: short fixed phrases
    """

    value: Mapping[str, Any] | str | None
    line: int
    problem: str | None = None
    notes: tuple[str, ...] = ()


def damage_reason(error: BaseException) -> str:
    """Why the bytes stopped coming, as a fixed phrase."""
    if isinstance(error, EOFError):
        return "the compressed file is cut short: nothing from here on could be read"
    return "the file is damaged: nothing from here on could be read"
