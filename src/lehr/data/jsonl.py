"""JSON Lines and JSON documents, as rows with the line where each starts.

Only LF ends a line: U+2028, U+0085 and other separators that `str.splitlines` cuts at are
legal inside JSON strings. CR before LF is white space to JSON. Blank lines are not rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from lehr.data.json_values import JsonError, JsonParser, skip_space
from lehr.data.rows import DAMAGE, Row, damage_reason

UNDECODABLE = "undecodable line"
NOT_AN_OBJECT = "the row is not an object"
STOPPED = ": nothing from here on could be read"

# Keys of a JSON document under which its rows may lie.
ROW_KEYS = ("data", "rows", "examples", "train")


def read_jsonl(stream: BinaryIO) -> Iterator[Row]:
    """One row a line. A bad line is a row with a problem, and reading goes on after it."""
    parser = JsonParser()
    line = 0
    while True:
        line += 1
        try:
            raw = stream.readline()
        except DAMAGE as error:
            yield Row(None, line, damage_reason(error))
            return
        if not raw:
            return
        try:
            # A BOM may stand at any line's start: files with BOMs get concatenated.
            text = raw.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError:
            yield Row(None, line, UNDECODABLE)
            continue
        text = text.strip(" \t\r\n")
        if not text:
            continue
        yield _row(parser, text, line)


def _row(parser: JsonParser, text: str, line: int) -> Row:
    try:
        value = parser.parse(text)
    except JsonError as bad:
        parser.take_notes()
        return Row(None, line, bad.reason)
    return row_of(value, line, parser.take_notes())


def row_of(value: Any, line: int, notes: tuple[str, ...] = ()) -> Row:
    """The row that a JSON value stands for: an object, a text, or a bare list of messages."""
    if isinstance(value, dict | str):
        return Row(value, line, None, notes)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return Row({"messages": value}, line, None, notes)
    return Row(None, line, NOT_AN_OBJECT, notes)


def read_json(data: bytes, damage: str | None = None) -> Iterator[Row]:
    """Rows of a JSON document: a list, {"data": [...]}, one object, or objects in a row.

    `damage` says why the bytes end early, if they do: it becomes the last row's problem.
    """
    # Bytes that are no UTF-8 spoil only the rows in which they stand.
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    reader = _Document(text)
    yield from reader.rows()
    if damage is not None:
        yield Row(None, reader.line, damage)
    elif reader.problem is not None:
        yield Row(None, reader.line, reader.problem + STOPPED)


class _Document:
    """Walks over a JSON text, one element at a time, counting lines as it goes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.parser = JsonParser()
        self.position = 0
        self.line = 1
        self.problem: str | None = None  # what stopped the reading

    def rows(self) -> Iterator[Row]:
        """Yields rows until the end or a problem."""
        try:
            self._move(skip_space(self.text, 0))
            notes = self._enter_list()
            if notes is not None:
                yield from self._elements(notes)
                return
            while self.position < len(self.text):
                yield self._element()
                self._move(skip_space(self.text, self.position))
        except JsonError as bad:
            self._move(max(self.position, bad.position))
            self.problem = bad.reason

    def _move(self, position: int) -> None:
        self.line += self.text.count("\n", self.position, position)
        self.position = position

    def _at(self, position: int) -> str:
        return self.text[position : position + 1]

    def _enter_list(self) -> tuple[str, ...] | None:
        """Moves past the `[` of the list of rows; None (and no move) where there is none."""
        if self._at(self.position) == "[":
            self._move(skip_space(self.text, self.position + 1))
            return ()
        if self._at(self.position) != "{":
            return None
        found, others = self._find_rows()
        if found is None:
            return None
        self._move(found)
        if others:
            return ("the document has other parts beside its list of rows: they were not read",)
        return ()

    def _find_rows(self) -> tuple[int | None, bool]:
        """Position of the first element under a key of ROW_KEYS; were other lists passed?"""
        text, position = self.text, skip_space(self.text, self.position + 1)
        others = False
        try:
            while self._at(position) == '"':
                key, position = self.parser.parse_at(text, position)
                position = skip_space(text, position)
                if self._at(position) != ":":
                    return None, False
                position = skip_space(text, position + 1)
                first = skip_space(text, position + 1)
                if key in ROW_KEYS and self._at(position) == "[" and self._at(first) == "{":
                    return first, others
                value, position = self.parser.parse_at(text, position)
                others = others or isinstance(value, list)
                position = skip_space(text, position)
                if self._at(position) == ",":
                    position = skip_space(text, position + 1)
        except JsonError:
            pass  # it is met again, and reported, when the object is read as a row
        self.parser.take_notes()
        return None, False

    def _elements(self, notes: tuple[str, ...]) -> Iterator[Row]:
        while self._at(self.position) != "]":
            row = self._element()
            yield Row(row.value, row.line, row.problem, row.notes + notes)
            notes = ()
            self._move(skip_space(self.text, self.position))
            if self._at(self.position) == ",":
                self._move(skip_space(self.text, self.position + 1))
            elif self._at(self.position) != "]":
                raise JsonError("broken JSON", self.position)
        # What follows is the end of the document, or the rest of the object around the list.
        rest = skip_space(self.text, self.position + 1)
        if rest < len(self.text) and self.text[rest] not in ",}":
            raise JsonError("broken JSON: text after the value", rest)

    def _element(self) -> Row:
        start, line = self.position, self.line
        value, end = self.parser.parse_at(self.text, start)
        self._move(end)
        notes = self.parser.take_notes()
        if not _is_utf8(self.text[start:end]):
            return Row(None, line, UNDECODABLE, notes)
        return row_of(value, line, notes)


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_document(stream: BinaryIO, suffix: str) -> bool:
    """True where the file is one JSON document rather than a JSON value a line.

    Names mislead: many `.json` files hold JSON Lines, and some `.jsonl` files a pretty-printed
    list. The first line that is not blank decides, with the file's suffix where it cannot.
    """
    try:
        first = _next_line(stream)
        if not first or first[:1] not in b"[{":
            return False
        try:
            JsonParser().parse(first.decode("utf-8", "replace"))
        except JsonError:
            if first.startswith(b"["):
                return True
            # `{...}` with an error inside is a bad row; `{` alone opens a document.
            return not first.endswith(b"}") and (suffix == ".json" or len(first) < 3)
        return not _next_line(stream)
    except DAMAGE:
        return suffix == ".json"


def _next_line(stream: BinaryIO) -> bytes:
    """The next line that is not blank, stripped; empty at the end."""
    while raw := stream.readline():
        stripped = raw.removeprefix(b"\xef\xbb\xbf").strip()
        if stripped:
            return stripped
    return b""
