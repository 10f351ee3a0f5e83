"""quarantine.jsonl: the batches that a run passes over, why, and of which rows they are.

One line a batch: {"key", "attempt", "update", "why", "origins", "rewind"}. An attempt's number
is the number of its batch, counted from the start of the run: passing a batch over makes the
run the one that it would have been with that batch quarantined from the start. The same
record, given to another run of the same data and order, leaves out the same rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lehr import ranks
from lehr.errors import Problem, RecipeError
from lehr.training.resources import disk_errors

FILE = "quarantine.jsonl"


@dataclass(frozen=True)
class Quarantined:
    """One batch that is passed over.

    update   applied updates of the state that the run went on from
    origins  file:line of its rows (of those concerned, where that is known)
    rewind   number of the return that named it, from 1; 0 = it was passed over for itself
    """

    attempt: int
    update: int
    why: str
    origins: tuple[str, ...]
    rewind: int = 0


class Quarantine:
    """The record of one run, beside its metrics.jsonl.

    key    of the run: lines of another one in the file are kept out
    given  batches that are passed over from the start
    """

    def __init__(self, folder: Path, key: str, given: Sequence[Quarantined] = ()) -> None:
        self.path = folder / FILE
        self._key = key
        self._found = {one.attempt: one for one in given}
        self._own: dict[int, Quarantined] = {}

    def read(self) -> None:
        """Take in what the file says; without one nothing happens."""
        if self.path.exists():
            self._own = {one.attempt: one for one in read_record(self.path, self._key)}
            self._found |= self._own

    def holds(self, attempt: int) -> bool:
        """Whether the attempt is passed over."""
        return attempt in self._found

    def of(self, attempt: int, origins: Sequence[str]) -> Quarantined | None:
        """The entry of an attempt. Raises RecipeError where it names other rows than those.

        Rows are known by their file's name and line: a folder may be moved.
        """
        found = self._found.get(attempt)
        if found is not None and not _rows(found.origins) <= _rows(origins):
            where = str(self.path) if attempt in self._own else "guard.quarantine"
            expected = (
                f"rows {_some(found.origins)} in batch {attempt}, as the record says: it belongs "
                "to other data, another order, another batch size or another stage. Give a record "
                "of this stage (with the same seed), or none"
            )
            raise RecipeError(Problem(where, expected, _some(origins)))
        return found

    def upto(self, attempt: int) -> list[int]:
        """Quarantined attempts up to this one: what a checkpoint made there must have left out."""
        return sorted(one for one in self._found if one <= attempt)

    def left_out_by(self, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's state left out exactly what it should have."""
        left_out = self.upto(state["progress"]["attempt"])
        return left_out == list(state.get("quarantined", ()))

    def with_more(self, attempts: Iterable[int]) -> Quarantine:
        """The same record with these attempts too; nothing is written."""
        more = Quarantine(self.path.parent, self._key)
        more._found = self._found | {one: Quarantined(one, 0, "", ()) for one in attempts}
        return more

    @property
    def rewinds(self) -> int:
        """How often the run went back so far."""
        return max((one.rewind for one in self._own.values()), default=0)

    @property
    def returned_to(self) -> int | None:
        """Applied updates of the state that the run went back to last; None = it never did."""
        newest = max(self._own.values(), key=lambda one: one.rewind, default=None)
        return newest.update if newest is not None and newest.rewind else None

    def add(self, entries: Iterable[Quarantined]) -> None:
        """Write the entries down: whole and on disk, or not at all."""
        for one in entries:
            if one.attempt not in self._found:
                self._own[one.attempt] = one
        self._found |= self._own
        if not ranks.is_main():
            return
        lines = [
            json.dumps({"key": self._key, **asdict(one)}, ensure_ascii=False) + "\n"
            for _, one in sorted(self._own.items())
        ]
        aside = self.path.with_name(f".tmp-{FILE}-{os.getpid()}")
        with disk_errors(self.path):
            with aside.open("w", encoding="utf-8", errors="replace") as stream:
                stream.writelines(lines)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(self.path)


def read_record(path: Path, key: str | None = None) -> list[Quarantined]:
    """The entries of a record, of the run `key` or of all.

    Raises RecipeError, with the line, for what is no record.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(Problem(str(path), f"a readable record ({error})")) from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            origins = tuple(str(one) for one in row["origins"])
            numbers = [int(row[name]) for name in ("attempt", "update", "rewind")]
            entry = Quarantined(numbers[0], numbers[1], str(row["why"]), origins, numbers[2])
        except (ValueError, KeyError, TypeError) as error:
            expected = "a line of a quarantine record: attempt, update, why, origins, rewind"
            raise RecipeError(Problem(f"{path}:{number}", expected, line[:80])) from error
        if key is None or row.get("key") == key:
            found.append(entry)
    return found


def _rows(origins: Iterable[str]) -> set[str]:
    """Origins without the folders of their files."""
    return {one.replace("\\", "/").rpartition("/")[2] for one in origins}


def _some(origins: Sequence[str]) -> str:
    more = ", ..." if len(origins) > 3 else ""
    return ", ".join(list(origins)[:3]) + more
