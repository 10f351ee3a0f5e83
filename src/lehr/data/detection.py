"""Which shape a row shows, seen from its columns and from the other rows of its file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lehr.data.pair_shapes import LABELS, verdict_of
from lehr.data.row_shapes import SHAPES, Names, Shape

Columns = Mapping[str, Any]
Match = tuple[Shape, Names]

NO_SHAPE = "no known shape"
_USED_COLUMNS = frozenset(name for shape in SHAPES for names in shape.columns for name in names)
_QUESTIONS = ("prompt", "question", "query", "instruction")


def views_of(values: Sequence[Columns]) -> list[Columns]:
    """The columns of each row that say something.

    Null is missing. A label column counts only where every value of the file is a verdict: in
    other files `label` names a class or a topic.
    """
    ignored = {
        label
        for label in LABELS
        if any(
            value.get(label) is not None and verdict_of(value[label]) is None for value in values
        )
    }
    return [
        {name: item for name, item in value.items() if item is not None and name not in ignored}
        for value in values
    ]


class Detector:
    """Finds the shape of each row of one file among those that the format allows."""

    def __init__(self, views: Sequence[Columns], allowed: tuple[Shape, ...]) -> None:
        self.allowed = allowed
        self._candidates: dict[frozenset[str], tuple[Match, ...]] = {}
        self._any = self if allowed is SHAPES else Detector((), SHAPES)
        self.leading = self._leading_shape(views)

    def match(self, view: Columns) -> Match | None:
        """The leading shape where the row has its columns, else the first that is filled.

        An empty text is a bad row of the leading shape; an empty list is how tables of several
        shapes write that a column is not there.
        """
        candidates = self._candidates_of(view)
        for shape, names in candidates:
            if shape is self.leading and not any(view[name] in ([], {}) for name in names):
                return shape, names
        return next(_filled(view, candidates), candidates[0] if candidates else None)

    def why_none(self, value: Columns, view: Columns) -> str:
        """Why a row shows none of the allowed shapes, as a fixed phrase."""
        if not value:
            return "an empty object"
        other = next(_filled(view, self._any._candidates_of(view)), None)
        if other is not None:
            return f"another format than asked for: {other[0].name}"
        null_column = next(
            (name for name in value if value[name] is None and name in _USED_COLUMNS), None
        )
        if null_column is not None:
            return f"{null_column} is null"
        if "chosen" in view or "rejected" in view:
            return "a pair with one side missing"
        if any(name in view for name in _QUESTIONS):
            return "a prompt without an answer"
        return NO_SHAPE

    def _leading_shape(self, views: Sequence[Columns]) -> Shape | None:
        counts: Counter[str] = Counter()
        for view in views:
            match = next(_filled(view, self._candidates_of(view)), None)
            if match is not None:
                counts[match[0].name] += 1
        if not counts:
            return None
        most = max(counts.values())
        return next(shape for shape in self.allowed if counts[shape.name] == most)

    def _candidates_of(self, view: Columns) -> tuple[Match, ...]:
        """Shapes whose columns are all there, in the order of the table."""
        columns = frozenset(view)
        found = self._candidates.get(columns)
        if found is None:
            found = tuple(
                (shape, names)
                for shape in self.allowed
                for names in shape.columns
                if columns.issuperset(names)
            )
            self._candidates[columns] = found
        return found


def _filled(view: Columns, candidates: Sequence[Match]) -> Iterator[Match]:
    """The candidates of which no column is empty."""
    for shape, names in candidates:
        if all(_is_filled(view[name]) for name in names):
            yield shape, names


def _is_filled(value: Any) -> bool:
    # False is a verdict, and 0 a number: only emptiness counts as not filled.
    return not (isinstance(value, str | list | dict) and not value)
