"""What became of every row of a source: kept, held out or dropped, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lehr.data.formats import Dropped


def gathered(notes: Iterable[str]) -> list[str]:
    """Notes of single rows, "text (file:line)", once for each text with the number of rows.

    >>> gathered(["cut (a:1)", "cut (a:7)", "lost (a:2)"])
    ['cut (2 rows, first a:1)', 'lost (a:2)']
    """
    places: dict[str, list[str]] = {}
    for note in notes:
        text, _, place = note.rpartition(" (")
        places.setdefault(text, []).append(place)
    return [
        f"{text} ({found[0]}" if len(found) == 1 else f"{text} ({len(found)} rows, first {found[0]}"
        for text, found in places.items()
    ]


@dataclass
class Accounting:
    """The rows and tokens of one source. kept + heldout + dropped == rows, always.

    files              [{"path", "sha256"}]
    shape              the detected shape of its rows
    kept, heldout      rows to train on, rows to measure with
    dropped            reason -> {"rows": n, "first": "file:line"}
    tokens             of kept rows, a shared prompt once; `supervised_tokens` of them are learned
    unshared_tokens    of the same rows with one row an answer, its prompt before it
    dropped_tokens     lost to truncation
    """

    name: str
    files: list[dict[str, str]] = field(default_factory=list)
    shape: str = ""
    rows: int = 0
    kept: int = 0
    heldout: int = 0
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: int = 0
    unshared_tokens: int = 0
    supervised_tokens: int = 0
    dropped_tokens: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def dropped_rows(self) -> int:
        """Rows that are neither kept nor held out."""
        return sum(int(entry["rows"]) for entry in self.dropped.values())

    def check(self) -> None:
        """Raises AssertionError where a row is missing or counted twice."""
        total = self.kept + self.heldout + self.dropped_rows
        assert total == self.rows, (
            f"source {self.name}: kept {self.kept} + held out {self.heldout} + dropped "
            f"{self.dropped_rows} = {total}, but {self.rows} rows were read"
        )

    def drop_read(self, dropped: Iterable[Dropped]) -> None:
        """Counts rows that reading dropped: they were never kept."""
        for entry in dropped:
            self._count(entry)

    def drop_kept(self, dropped: Iterable[Dropped], heldout: bool = False) -> None:
        """Moves rows that encoding dropped from kept (or held out) to dropped.

        A row of which several parts were dropped counts once: rows are told apart by origin.
        """
        seen = set()
        for entry in dropped:
            if entry.origin in seen:
                continue
            seen.add(entry.origin)
            self._count(entry)
            if heldout:
                self.heldout -= 1
            else:
                self.kept -= 1
        self.check()

    def _count(self, dropped: Dropped) -> None:
        entry = self.dropped.setdefault(dropped.reason, {"rows": 0, "first": str(dropped.origin)})
        entry["rows"] += 1

    def as_json(self) -> dict[str, Any]:
        """The entry of audit.json and of the ledger. Checks that the rows add up."""
        self.check()
        return {
            "name": self.name,
            "files": [dict(file) for file in self.files],
            "shape": self.shape,
            "rows": self.rows,
            "kept": self.kept,
            "heldout": self.heldout,
            "dropped": {reason: dict(entry) for reason, entry in self.dropped.items()},
            "tokens": self.tokens,
            "unshared_tokens": self.unshared_tokens,
            "supervised_tokens": self.supervised_tokens,
            "dropped_tokens": self.dropped_tokens,
            "notes": list(self.notes),
        }


def merge(parts: Sequence[Accounting]) -> Accounting:
    """One accounting of parts of the same source, read in the order given (files, or workers)."""
    if not parts:
        raise ValueError("nothing to merge")
    merged = Accounting(name=parts[0].name)
    shapes: dict[str, None] = {}
    for part in parts:
        part.check()
        shapes.setdefault(part.shape)
        merged.files += [file for file in part.files if file not in merged.files]
        merged.rows += part.rows
        merged.kept += part.kept
        merged.heldout += part.heldout
        merged.tokens += part.tokens
        merged.unshared_tokens += part.unshared_tokens
        merged.supervised_tokens += part.supervised_tokens
        merged.dropped_tokens += part.dropped_tokens
        merged.notes += [note for note in part.notes if note not in merged.notes]
        _merge_dropped(merged.dropped, part.dropped)
    merged.shape = ", ".join(shape for shape in shapes if shape)
    merged.check()
    return merged


def _merge_dropped(into: dict[str, dict[str, Any]], more: Mapping[str, Mapping[str, Any]]) -> None:
    for reason, entry in more.items():
        if reason in into:
            into[reason]["rows"] += entry["rows"]
        else:
            into[reason] = dict(entry)
