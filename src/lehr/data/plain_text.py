"""Plain text cut into documents at blank lines; nothing but blank lines is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from lehr.data.jsonl import UNDECODABLE
from lehr.data.rows import DAMAGE, Row, damage_reason

DOCUMENT_CHARACTERS = 4000


class _Pieces:
    """Lines gathered into documents of at most `limit` characters where cuts allow it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lines: list[str] = []  # the document so far
        self.first = 0  # the line in the file where it starts
        self.size = 0
        self.safe = 0  # lines[:safe] end in a blank line: a good place to cut

    def add(self, text: str, line: int) -> Iterator[Row]:
        """Takes one line of the file; yields the documents that it completes."""
        blank = not text.strip()
        if not self.lines:
            if blank:
                return
            self.first = line
        elif not blank and self.size + len(text) > self.limit:
            yield from self._cut(self.safe or len(self.lines))
            if not self.lines:
                self.first = line
            elif self.size + len(text) > self.limit:
                yield from self._cut(len(self.lines))
                self.first = line
        self.lines.append(text)
        self.size += len(text) + 1
        if blank:
            self.safe = len(self.lines)

    def _cut(self, count: int) -> Iterator[Row]:
        document, rest = self.lines[:count], self.lines[count:]
        while document and not document[-1].strip():
            document.pop()
        if document:
            yield Row("\n".join(document), self.first)
        self.first += count
        self.lines = rest
        self.size = sum(len(line) + 1 for line in rest)
        self.safe = 0

    def end(self) -> Iterator[Row]:
        """Yields what is left."""
        yield from self._cut(len(self.lines))


def read_text(stream: BinaryIO, limit: int = DOCUMENT_CHARACTERS) -> Iterator[Row]:
    """Documents of about `limit` characters with the line where each starts.

    Paragraphs (blocks between blank lines) are joined while they fit. A paragraph that is too
    long alone is cut at line ends; a line that is too long alone stays whole.
    """
    pieces = _Pieces(limit)
    line = 0
    while True:
        line += 1
        try:
            raw = stream.readline()
        except DAMAGE as error:
            yield from pieces.end()
            yield Row(None, line, damage_reason(error))
            return
        if not raw:
            break
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            # Without the line its neighbours do not belong together.
            yield from pieces.end()
            yield Row(None, line, UNDECODABLE)
            continue
        if line == 1:
            text = text.removeprefix("\ufeff")
        yield from pieces.add(text.removesuffix("\n").removesuffix("\r"), line)
    yield from pieces.end()
