"""Large files: the columns that a curve needs, by pyarrow; a million rows in less than a second.

It reads only what is plain. Where a cell is no number, a row no object, or anything else is in
doubt, the answer is None, and `doctor_readers` reads the text row by row. Both give the same.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lehr.diagnosis.doctor_curve import number_of
from lehr.diagnosis.doctor_tables import cells, enough, has_loss, header, long_table, needed

LARGE = 2**16  # bytes: below that the other reader needs no longer than this one's import
BLOCK = 2**22  # bytes that pyarrow takes at a time
SAMPLE = 100  # rows that say what a column holds
MANY = 16  # keys of a row: from there on it pays to leave out what is not needed
HISTORY = b'"log_history"'
ABSENT = ("", "None", "none", "null", "Null", "NULL", "-", "n/a", "N/A")


def columns_of_bytes(content: bytes, loss: str | None = None) -> dict[str, Any] | None:
    """Columns of a table or of JSON lines in UTF-8; None where it is neither, or not plain."""
    begin = 3 if content.startswith(b"\xef\xbb\xbf") else 0
    if content[begin : begin + 1].isspace():
        return None
    end = len(content)
    while content[end - 1 : end].isspace():
        end -= 1
    if content[begin : begin + 1] == b"{":
        history = _history(content, begin, end)
        if history is not None:
            return columns_of_objects(content, *history, loss)
        return columns_of_lines(content, begin, end, loss)
    if content[begin : begin + 1] == b"[" and content[end - 1 : end] == b"]":
        return columns_of_objects(content, begin + 1, end - 1, loss)
    if content[begin : begin + 1] in (b"[", b"("):
        return None
    return columns_of_table(content, begin, end, loss)


# -- tables -------------------------------------------------------------------


def columns_of_table(
    content: bytes, begin: int, end: int, loss: str | None
) -> dict[str, Any] | None:
    """As `doctor_tables.table_of`, of the bytes from `begin` to `end`."""
    ends = [at for at in (content.find(b"\n"), content.find(b"\r")) if 0 < at < end]
    if not ends:
        return None
    head = content[begin : min(ends)].decode("utf-8", "replace")
    found = header(head)
    if found is None or head.count('"') % 2:
        return None
    names, delimiter = found
    line_end = 2 if content.startswith(b"\r\n", min(ends)) else 1
    body = Body(memoryview(content)[min(ends) + line_end : end], delimiter, b'"' in content)
    kept = needed(names, loss)
    columns = _cells_of(body, names, kept)
    if columns is not None and len(kept) < len(names) and not has_loss(columns, loss):
        columns = _cells_of(body, names, range(len(names)))
    return None if columns is None else long_table(columns) or columns


@dataclass(frozen=True)
class Body:
    """A table below its header; `quoted`: a cell may hold the end of a line."""

    view: memoryview
    delimiter: str
    quoted: bool


def _cells_of(body: Body, names: Sequence[str], kept: Sequence[int]) -> dict[str, Any] | None:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    words = _columns_of_words(body, len(names))
    skipped: list[int] = []

    def leave_out(row: Any) -> str:
        skipped.append(1)
        return "skip"

    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(pa.py_buffer(body.view)),
            arrow_csv.ReadOptions(
                use_threads=False,  # the parts of many threads take long to be given memory
                block_size=BLOCK,
                column_names=[str(index) for index in range(len(names))],
            ),
            arrow_csv.ParseOptions(
                delimiter=body.delimiter,
                newlines_in_values=body.quoted,
                invalid_row_handler=leave_out,
            ),
            arrow_csv.ConvertOptions(
                column_types={
                    str(index): pa.string() if index in words else pa.float64() for index in kept
                },
                include_columns=[str(index) for index in kept],
                null_values=ABSENT,
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid:
        return None
    if not table.num_rows or not enough(table.num_rows, table.num_rows + len(skipped)):
        return None
    made: dict[str, Any] = {}
    for index in kept:
        column = table[str(index)]
        if index in words:
            made[names[index]] = cells(column.to_pylist(), body.delimiter)
        else:
            made[names[index]] = _masked(column)
    return made


def _columns_of_words(body: Body, width: int) -> set[int]:
    """Positions of the columns whose first rows hold words only."""
    begin = bytes(body.view[:BLOCK]).decode("utf-8", "replace")
    lines = begin.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:SAMPLE]
    rows = [row for row in csv.reader(lines, delimiter=body.delimiter) if len(row) == width]
    told = [[row[index] for row in rows if row[index].strip()] for index in range(width)]
    return {
        index
        for index, values in enumerate(told)
        if values and all(number_of(value) is None for value in values)
    }


# -- JSON: objects in an array ------------------------------------------------


def _history(content: bytes, begin: int, end: int) -> tuple[int, int] | None:
    """(begin, end) of what stands between the brackets of a HF trainer_state.json's log_history.

    None where there is none, or where its rows hold lists.
    """
    key = content.find(HISTORY, begin, end)
    first, last = content.find(b"[", key, end), content.find(b"]", key, end)
    if key < 0 or first < 0 or last < 0 or content.find(HISTORY, key + 1, end) >= 0:
        return None
    around = content[begin : first + 1] + content[last:end]
    try:
        value = json.loads(around)
    except (ValueError, RecursionError):
        return None
    found = isinstance(value, dict) and value.get("log_history") == []
    return (first + 1, last) if found else None


def columns_of_objects(
    content: bytes, begin: int, end: int, loss: str | None
) -> dict[str, Any] | None:
    """Columns of the JSON objects between two brackets; None where they are not flat."""
    count = content.count(b"{", begin, end)
    opened, closed = content.find(b"{", begin, end), content.find(b"}", begin, end)
    between = content[closed : content.find(b"{", closed, end) + 1]
    objects_only = (  # a null among them ends pyarrow 26 with a signal
        not content[begin:opened].strip()
        and not content[content.rfind(b"}", begin, end) + 1 : end].strip()
        and between[1:2] == b","
        and count == content.count(between, begin, end) + 1
    )
    if not objects_only or content.find(b"[", begin, end) >= 0:
        return None
    rows = Lines(content.replace(b"},", b"} "), begin, end, count)  # as long as before
    types = _types_of_first(rows)
    table = _read_lines(rows, types, pretty=True) if types else None
    if table is None:
        table = _read_lines(rows, {}, pretty=True)
    if table is None or table.num_rows != count or "nonfinite" in table.column_names:
        return None
    return _needed_values(table, loss)


def _types_of_first(rows: Lines) -> dict[str, str]:
    """The numbers of the first row: pyarrow takes long to find out what a column holds."""
    first = rows.content[rows.begin : rows.content.find(b"}", rows.begin) + 1]
    if not _is_object(first):
        return {}
    return {name: "float64" for name, value in json.loads(first).items() if _is_float(value)}


# -- JSON lines ---------------------------------------------------------------


def columns_of_lines(
    content: bytes, begin: int, end: int, loss: str | None
) -> dict[str, Any] | None:
    """Columns of JSON objects, one a line; the last line may be torn."""
    first, last = content.find(b"\n", begin, end), content.rfind(b"\n", begin, end)
    if first < 0 or not _is_object(content[begin:first]):
        return None
    if not _is_object(content[last:end]):
        end = last
    lines = Lines(content, begin, end, content.count(b"\n", begin, end) + 1)
    table = _few_keys(lines, loss) or _read_lines(lines, {})
    if table is None or table.num_rows != lines.count:
        return None
    a_row_may_be_null = all(column.null_count for column in table.itercolumns())
    if a_row_may_be_null and content.count(b"\n{", begin, end) + 1 != lines.count:
        return None
    return _needed_values(table, loss)


def _needed_values(table: Any, loss: str | None) -> dict[str, Any] | None:
    """Columns that a curve needs; None where two have one name."""
    names = [one for one in table.column_names if one != "nonfinite"]
    if len(set(names)) != len(names):
        return None
    kept = [names[index] for index in needed(names, loss)]
    columns = _values(table, kept)
    if len(kept) < len(names) and not has_loss(columns, loss):
        columns = _values(table, names)
    return columns


@dataclass(frozen=True)
class Lines:
    """The bytes of `content` from `begin` to `end`, in so many lines; never copied."""

    content: bytes
    begin: int
    end: int
    count: int


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _few_keys(lines: Lines, loss: str | None) -> Any:
    """Only the keys that are needed, where all rows have the same many; else None.

    The rows are known to have the same keys where a sample of them has and the number of keys
    and of values in the whole file is what that gives.
    """
    sample = _sampled(lines)
    names = list(sample[0]) if sample else []
    if len(names) < MANY or "nonfinite" in names or any(row.keys() != set(names) for row in sample):
        return None
    kept = [names[index] for index in needed(names, loss)]
    if len(kept) == len(names) or not all(_is_float(row[name]) for row in sample for name in kept):
        return None
    if lines.content.count(b'":', lines.begin, lines.end) != lines.count * len(names):
        return None
    table = _read_lines(lines, dict.fromkeys(kept, "float64"))
    whole = table is not None and not any(table[name].null_count for name in kept)
    return table if whole else None


def _sampled(lines: Lines) -> list[dict[str, Any]]:
    """Whole rows from all over the file; none where one is no object."""
    rows: list[dict[str, Any]] = []
    last = lines.content.rfind(b"\n", lines.begin, lines.end)
    for start in np.linspace(lines.begin, last, 10 * SAMPLE, dtype=np.int64):
        begin = lines.content.find(b"\n", int(start), lines.end) + 1 if len(rows) else lines.begin
        end = lines.content.find(b"\n", begin, lines.end)
        line = lines.content[begin : end if end > 0 else lines.end]
        if not _is_object(line):
            return []
        rows.append(json.loads(line))
    return rows


def _is_float(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_lines(lines: Lines, types: Mapping[str, str], *, pretty: bool = False) -> Any:
    """A pyarrow table; None where a row is not plain.

    types   of some keys: only these are read, or all where `pretty`
    pretty  a row may stand in several lines
    """
    import pyarrow as pa
    from pyarrow import json as arrow_json

    schema = pa.schema(list(types.items())) if types else None
    try:
        return arrow_json.read_json(
            pa.BufferReader(pa.py_buffer(memoryview(lines.content)[lines.begin : lines.end])),
            arrow_json.ReadOptions(use_threads=False, block_size=BLOCK),
            arrow_json.ParseOptions(
                explicit_schema=schema,
                unexpected_field_behavior="ignore" if types and not pretty else "infer",
                newlines_in_values=pretty,
            ),
        )
    except pa.ArrowInvalid:
        return None


def _values(table: Any, names: Iterable[str]) -> dict[str, Any]:
    """Columns of JSON rows; null is absent, but NaN where lehr names it as not finite."""
    import pyarrow as pa

    made: dict[str, Any] = {}
    for name in names:
        kind = table.schema.field(name).type
        if pa.types.is_string(kind):
            made[name] = table[name].to_pylist()
        elif pa.types.is_null(kind):
            made[name] = np.ma.masked_all(table.num_rows, dtype=np.float64)
        elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
            made[name] = _masked(table[name])
    if "nonfinite" in table.column_names:
        _set_nonfinite(made, table["nonfinite"].combine_chunks())
    return made


def _set_nonfinite(columns: Mapping[str, Any], lists: Any) -> None:
    import pyarrow as pa

    if not pa.types.is_list(lists.type) or not pa.types.is_string(lists.type.value_type):
        return
    from pyarrow import compute

    rows = compute.list_parent_indices(lists).to_numpy()
    named = np.asarray(compute.list_flatten(lists).to_pylist(), dtype=object)
    for name in set(named) & columns.keys():
        at = rows[named == name]
        if isinstance(columns[name], np.ma.MaskedArray):
            columns[name][at] = np.nan  # and no longer masked
        else:
            for index in at:
                columns[name][index] = float("nan")


def _masked(column: Any) -> Any:
    """float64 of a pyarrow column, masked where it is null."""
    import pyarrow as pa

    if not column.null_count:
        return column.cast(pa.float64()).to_numpy()
    absent = column.is_null().to_numpy()
    values = column.cast(pa.float64()).to_numpy()
    return np.ma.array(np.array(values, dtype=np.float64), mask=absent)
