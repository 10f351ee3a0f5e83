"""Files as rows: which container a file is, and the reader for it.

JSONL, JSON, CSV, Parquet and plain text, each optionally gzipped (seen from the bytes, not
from the name). A row that cannot be read is still yielded, with its line and the reason, so
that whoever counts can count it.
"""

from __future__ import annotations

import difflib
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from lehr.data.jsonl import is_document, read_json, read_jsonl
from lehr.data.plain_text import read_text
from lehr.data.rows import DAMAGE, Row, damage_reason
from lehr.data.tables import read_csv, read_parquet
from lehr.errors import Problem, RecipeError

__all__ = ["Container", "Row", "container_of", "read_rows"]

Container = Literal["jsonl", "json", "csv", "parquet", "text"]

_BY_SUFFIX: dict[str, Container] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_REFUSED = {
    ".pkl": "pickle files can run code and are never read: save the rows as JSONL",
    ".pickle": "pickle files can run code and are never read: save the rows as JSONL",
    ".pt": "pickle files can run code and are never read: save the rows as JSONL",
    ".pth": "pickle files can run code and are never read: save the rows as JSONL",
    ".npy": "arrays are no rows: save the rows as JSONL",
    ".zip": "unpack it first and name the file inside",
    ".tar": "unpack it first and name the files inside",
    ".bz2": "unpack it first (only .gz is read packed)",
    ".xz": "unpack it first (only .gz is read packed)",
    ".zst": "unpack it first (only .gz is read packed)",
    ".xls": "save the sheet as CSV",
    ".xlsx": "save the sheet as CSV",
    ".arrow": "save it as Parquet",
    ".feather": "save it as Parquet",
    ".pdf": "save its text as .txt",
    ".docx": "save its text as .txt",
}
_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"
_BLOCK_BYTES = 1 << 20


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in order, each with the line where it starts.

    Raises RecipeError (what, where, what to do) for a file that is missing, a folder, of a kind
    that is not read, or in another encoding than UTF-8; bad rows inside it raise nothing.
    """
    container = container_of(path)
    with _open(path) as stream:
        if container == "jsonl":
            yield from read_jsonl(stream)
        elif container == "json":
            yield from read_json(*_whole(stream))
        elif container == "csv":
            yield from read_csv(stream, path)
        elif container == "parquet":
            yield from _parquet(stream, path)
        else:
            yield from _text(stream)


def container_of(path: Path) -> Container:
    """What kind of file this is, from its name, and from its first bytes where these differ."""
    _require_file(path)
    suffix = _suffix(path)
    if suffix in _REFUSED:
        raise RecipeError(Problem(str(path), _REFUSED[suffix], says=True))
    known = _BY_SUFFIX.get(suffix)
    with _open(path) as stream:
        start = _first_bytes(stream)
        if start.startswith(_PARQUET_MAGIC):
            return "parquet"
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise RecipeError(Problem(str(path), "UTF-8 text (this file is UTF-16: save it again)"))
        if known in ("csv", "parquet", "text"):
            return cast(Container, known)
        if known is None and b"\0" in start:
            raise RecipeError(
                Problem(str(path), "JSONL, JSON, CSV, Parquet or text (this file is binary)")
            )
        looks_like_json = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")
        if known is None and not looks_like_json:
            return "text"
        return "json" if is_document(stream, suffix) else "jsonl"


def _suffix(path: Path) -> str:
    """The suffix that tells the kind: the one before .gz, in small letters."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".gzip"):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _require_file(path: Path) -> None:
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if _suffix(entry) in _BY_SUFFIX)
        found = f"; it holds {', '.join(inside[:5])}" if inside else ""
        raise RecipeError(
            Problem(str(path), f"a file, not a folder: list the files to read{found}")
        )
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise RecipeError(Problem(str(path), f"a file that exists{hint}"))
    if not path.is_file():
        raise RecipeError(Problem(str(path), "a regular file"))


class _Unpacked(io.RawIOBase):
    """The bytes of a gzip stream, handed on as soon as they are there.

    A reader that fills its whole buffer first would, where the stream breaks, throw away the
    good bytes before the break.
    """

    def __init__(self, packed: gzip.GzipFile) -> None:
        super().__init__()
        self._packed = packed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._packed.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its first bytes say that it is gzip."""
    try:
        raw = path.open("rb", buffering=_BLOCK_BYTES)
    except OSError as error:
        raise RecipeError(
            Problem(str(path), f"a file that can be read ({error.strerror})")
        ) from None
    with raw:
        if cast(io.BufferedReader, raw).peek(2)[:2] == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(BinaryIO, io.BufferedReader(_Unpacked(unpacked), _BLOCK_BYTES))
        else:
            yield raw


def _first_bytes(stream: BinaryIO) -> bytes:
    try:
        return cast(io.BufferedReader, stream).peek(1024)[:1024]
    except DAMAGE:
        return b""


def _whole(stream: BinaryIO) -> tuple[bytes, str | None]:
    """All bytes that can be had, and why they end early if they do."""
    blocks: list[bytes] = []
    try:
        while block := cast(io.BufferedReader, stream).read1(_BLOCK_BYTES):
            blocks.append(block)
    except DAMAGE as error:
        return b"".join(blocks), damage_reason(error)
    return b"".join(blocks), None


def _parquet(stream: BinaryIO, path: Path) -> Iterator[Row]:
    if isinstance(getattr(stream, "raw", None), io.FileIO):
        yield from read_parquet(path, path)
        return
    data, damage = _whole(stream)
    if damage is not None:  # the footer, without which no row can be found, is at the end
        raise RecipeError(Problem(str(path), "a whole file: the compressed data are cut short"))
    yield from read_parquet(io.BytesIO(data), path)


def _text(stream: BinaryIO) -> Iterator[Row]:
    notes: tuple[str, ...] = ()
    if _first_bytes(stream).lstrip()[:2] == b'{"':
        notes = ("looks like JSON but is named as text: it was read as text",)
    for row in read_text(stream):
        yield replace(row, notes=row.notes + notes) if notes else row
        notes = ()
