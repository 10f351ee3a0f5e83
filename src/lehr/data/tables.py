"""CSV and Parquet as rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lehr.data.jsonl import UNDECODABLE
from lehr.data.rows import DAMAGE, Row, damage_reason
from lehr.errors import Problem, RecipeError

# The csv module refuses cells above 128 KiB unless told otherwise; the limit must fit a C long.
_CELL_LIMIT = 2**31 - 1
_BATCH_ROWS = 512
SAME_NAMES = "two columns have the same name: the last one was used"


def read_csv(stream: BinaryIO, path: Path) -> Iterator[Row]:
    """Rows of a CSV file with a header line; quoted cells may hold line ends.

    Cells are text; an empty cell is an empty text, a missing one is null. The separator is a
    comma, or where the header has none a semicolon or a tab.
    """
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(max(csv.field_size_limit(), _CELL_LIMIT))
    notes: list[str] = []
    try:
        header_line, skipped = _header_line(text)
    except DAMAGE as error:
        yield Row(None, 1, damage_reason(error))
        return
    if skipped:
        notes.append("lines before the header that start with # were skipped")
    separator = _separator(header_line)
    if separator != ",":
        notes.append("cells are separated by " + ("tabs" if separator == "\t" else separator))
    # strict: a quote that never closes would otherwise swallow the rest of the file unsaid.
    reader = csv.reader(_chain(header_line, text), delimiter=separator, strict=True)
    try:
        header = next(reader, [])
    except csv.Error:
        raise RecipeError(Problem(f"{path}:{skipped + 1}", "a CSV header line")) from None
    header = [name.strip() for name in header]
    notes += _same_names(header)
    yield from _csv_rows(reader, header, skipped, tuple(notes))


def _csv_rows(
    reader: Any, header: list[str], skipped: int, notes: tuple[str, ...]
) -> Iterator[Row]:
    while True:
        line = reader.line_num + skipped + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            unfinished = "unexpected end" in str(error)
            yield Row(
                None,
                line,
                "a quoted cell never ends: nothing from here on could be read"
                if unfinished
                else "broken CSV quoting",
                notes,
            )
            notes = ()
            continue
        except DAMAGE as error:
            yield Row(None, line, damage_reason(error), notes)
            return
        if cells is None:
            return
        if not cells:
            continue
        yield _csv_row(header, cells, line, notes)
        notes = ()


def _csv_row(header: list[str], cells: list[str], line: int, notes: tuple[str, ...]) -> Row:
    if len(cells) > len(header):
        return Row(None, line, "more cells than columns", notes)
    if any(_has_raw_bytes(cell) for cell in cells):
        return Row(None, line, UNDECODABLE, notes)
    value: dict[str, str | None] = dict.fromkeys(header)
    value.update(zip(header, cells, strict=False))
    return Row(value, line, None, notes)


def _has_raw_bytes(cell: str) -> bool:
    # surrogateescape turns bytes that are no UTF-8 into U+DC80..U+DCFF.
    return not cell.isascii() and any("\udc80" <= character <= "\udcff" for character in cell)


def _header_line(text: io.TextIOWrapper) -> tuple[str, int]:
    """The first line that is neither blank nor a `#` comment, and how many lines came before."""
    skipped = 0
    while line := text.readline():
        if line.strip() and not line.startswith("#"):
            return line, skipped
        skipped += 1
    return "", skipped


def _separator(header: str) -> str:
    for candidate in (",", ";", "\t"):
        if candidate in header:
            return candidate
    return ","


def _chain(first: str, rest: io.TextIOWrapper) -> Iterator[str]:
    yield first
    yield from rest


def read_parquet(source: Path | BinaryIO, path: Path) -> Iterator[Row]:
    """Rows of a Parquet file; `line` is the row number. Raises RecipeError if it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source)
    except (pa.ArrowException, OSError, ValueError):
        raise RecipeError(
            Problem(str(path), "a whole Parquet file (this one is damaged, or something else)")
        ) from None
    line = 0
    with file:
        batches = file.iter_batches(batch_size=_BATCH_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError, ValueError) as error:
                yield Row(None, line + 1, damage_reason(OSError(error)))
                return
            if batch is None:
                return
            columns = [_cells(column) for column in batch.columns]
            notes = [] if line else _same_names(batch.schema.names)
            notes += [
                f"column {name}: values that Python cannot hold were read as empty"
                for name, (_, failed) in zip(batch.schema.names, columns, strict=True)
                if failed
            ]
            for cells in zip(*(cells for cells, _ in columns), strict=True):
                line += 1
                value = dict(zip(batch.schema.names, map(_without_nulls, cells), strict=True))
                yield Row(value, line, None, tuple(notes))
                notes = []


def _cells(column: Any) -> tuple[list[Any], bool]:
    """(values, whether some could not be had): a date in the year 146,000 is no Python date.

    Such a value is None, so that a column which nobody needs stops no row.
    """
    try:
        return column.to_pylist(), False
    except (ArithmeticError, ValueError, TypeError, ImportError):  # ArrowInvalid is a ValueError
        pass
    values: list[Any] = []
    for cell in column:
        try:
            values.append(cell.as_py())
        except (ArithmeticError, ValueError, TypeError, ImportError):
            values.append(None)
    return values, True


def _same_names(names: list[str]) -> list[str]:
    return [SAME_NAMES] if len(set(names)) != len(names) else []


def _without_nulls(value: Any) -> Any:
    """Nested fields without those that are null.

    A Parquet struct has the fields of all rows, so null and absent are one and the same there.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
