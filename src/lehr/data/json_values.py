"""One JSON value at a time: strict about syntax, exact about what is wrong, never quoting it."""

from __future__ import annotations

import json
from typing import Any

DEPTH_LIMIT = 100  # lists and objects inside each other; tool schemas stay below 20

TOO_DEEP = "nested too deeply"
DUPLICATE_KEY = "a key twice in one object: the last value was used"
NOT_FINITE = "NaN or Infinity, which is no JSON: read as null"

_REASONS = {
    "Unterminated string": "broken JSON: a string never ends",
    "Invalid control character": "broken JSON: a raw control character in a string",
    "Invalid \\escape": "broken JSON: a bad escape in a string",
    "Invalid \\uXXXX": "broken JSON: a bad escape in a string",
    "Extra data": "broken JSON: text after the value",
}


class JsonError(Exception):
    """The text is no JSON value. `reason` is a fixed phrase, `position` counts characters."""

    def __init__(self, reason: str, position: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


class JsonParser:
    """Parses JSON values; `notes` collects what was odd about the values since `take_notes`.

    >>> JsonParser().parse('{"a": [1, 2]}')
    {'a': [1, 2]}
    """

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant
        )

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            self.notes.add(DUPLICATE_KEY)
        return value

    def _constant(self, _: str) -> None:
        self.notes.add(NOT_FINITE)

    def take_notes(self) -> tuple[str, ...]:
        """The notes so far, in a fixed order; starts anew."""
        notes = tuple(sorted(self.notes))
        self.notes.clear()
        return notes

    def parse(self, text: str) -> Any:
        """The one value that `text` holds. Raises JsonError."""
        start = skip_space(text, 0)
        value, end = self.parse_at(text, start)
        if skip_space(text, end) != len(text):
            raise JsonError(_REASONS["Extra data"], end)
        return value

    def parse_at(self, text: str, start: int) -> tuple[Any, int]:
        """The value that starts at character `start`, and where it ends. Raises JsonError."""
        try:
            value, end = self._decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise JsonError(_reason(error.msg), error.pos) from None
        except RecursionError:
            raise JsonError(TOO_DEEP, start) from None
        except ValueError:  # Python refuses integers of more than 4,300 digits
            raise JsonError("broken JSON: a number of thousands of digits", start) from None
        brackets = text.count("[", start, end) + text.count("{", start, end)
        if brackets > DEPTH_LIMIT and deeper_than(value, DEPTH_LIMIT):
            raise JsonError(TOO_DEEP, start)
        return value, end


def _reason(message: str) -> str:
    for prefix, reason in _REASONS.items():
        if message.startswith(prefix):
            return reason
    return "broken JSON"


def skip_space(text: str, position: int) -> int:
    """First position from `position` on that is not JSON white space (four characters only)."""
    end = len(text)
    while position < end and text[position] in " \t\r\n":
        position += 1
    return position


def deeper_than(value: Any, limit: int) -> bool:
    """True where lists and objects lie more than `limit` levels inside each other."""
    level = [value]
    for _ in range(limit + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True
