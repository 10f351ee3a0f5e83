"""From a file of any tool to a curve. The content decides what a file is, never its name."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lehr.diagnosis.doctor_curve import Curve, curve_of_columns
from lehr.diagnosis.doctor_curve import curve_of_rows as of_rows
from lehr.diagnosis.doctor_large import LARGE, columns_of_bytes
from lehr.diagnosis.doctor_logs import as_shown, columns_of_log
from lehr.diagnosis.doctor_tables import DECIMAL_COMMA, is_number, table_of
from lehr.errors import Problem, RecipeError

LARGEST_BYTES = 2**30
MAGIC = {
    b"\x89PNG": "a picture: export the numbers, for example as CSV",
    b"\xff\xd8\xff": "a picture: export the numbers, for example as CSV",
    b"PK\x03\x04": "a zip archive or a spreadsheet: save it as CSV",
    b"\x1f\x8b": "compressed: unpack it first",
    b"PAR1": "Parquet: save it as CSV",
    b"SQLite": "a database: export the run as CSV",
    b"%PDF": "a PDF: export the numbers, for example as CSV",
}
EXPECTED = (
    "a curve: metrics.jsonl, a HF trainer_state.json, a CSV of wandb, mlflow or TensorBoard, "
    "a log with `loss: 2.1` in its lines, or a list of numbers"
)
_BARE = re.compile(r"[\s,;\[\]()|]+")


def read_curve(path: Path, loss: str | None = None) -> Curve:
    """The curve in a file. Raises RecipeError for what is none, with what was seen."""
    where = str(path)
    try:
        size = path.stat().st_size
        if size > LARGEST_BYTES:
            raise RecipeError(Problem(where, f"a file of at most {LARGEST_BYTES:,} bytes", size))
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError(Problem(where, f"a file that can be read ({error.strerror})")) from None
    return curve_of_bytes(content, loss=loss, where=where)


def curve_of_bytes(content: bytes, *, loss: str | None = None, where: str = "curve") -> Curve:
    """The curve in the bytes of a file; a plain and large one is not taken apart row by row."""
    with _no_collection():
        return _curve_of_bytes(content, loss, where)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for cycles: millions of new rows have none, and it takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _curve_of_bytes(content: bytes, loss: str | None, where: str) -> Curve:
    if len(content) >= LARGE:
        columns = columns_of_bytes(content, loss)
        if columns is not None:
            return curve_of_columns(columns, loss=loss, where=where)
    return curve_of_text(_decoded(content, where), loss=loss, where=where)


def curve_of_text(text: str, *, loss: str | None = None, where: str = "curve") -> Curve:
    """The curve in a text of any of the formats; see `EXPECTED`."""
    as_written = text
    text = text.strip().replace("\r\n", "\n").replace("\r", "\n")
    if not text:
        raise RecipeError(Problem(where, EXPECTED + "; it is empty"))
    if text[0] in "[{":
        found = _json(text, loss, where)
        if found is not None:
            return found
    bare = _bare_numbers(text, where)
    if bare is not None:
        return curve_of_columns(bare, where=where)
    table = table_of(text, loss)
    if table is not None:
        return curve_of_columns(table, loss=loss, where=where)
    columns = columns_of_log(as_shown(as_written), loss)
    if columns is not None:
        return curve_of_columns(columns, loss=loss, where=where)
    shown = " ".join(text[:60].split())
    raise RecipeError(Problem(where, EXPECTED, shown))


def _decoded(content: bytes, where: str) -> str:
    for magic, what in MAGIC.items():
        if content.startswith(magic):
            raise RecipeError(Problem(where, f"{EXPECTED}; this is {what}"))
    for mark, name in (
        (b"\xff\xfe", "utf-16"),
        (b"\xfe\xff", "utf-16"),
        (b"\xef\xbb\xbf", "utf-8-sig"),
    ):
        if content.startswith(mark):
            return content.decode(name, "replace")
    if b"\0" in content[:4096]:
        what = "binary (TensorBoard's event files too: export the scalars as CSV)"
        raise RecipeError(Problem(where, f"{EXPECTED}; this is {what}"))
    return content.decode("utf-8", "replace")


# -- JSON ---------------------------------------------------------------------


def _json(text: str, loss: str | None, where: str) -> Curve | None:
    """JSON or JSON lines; None where it is neither."""
    value: Any = None
    lines = text.split("\n")
    if text[0] == "{" and len(lines) > 1:
        rows = _json_lines(lines)
        if rows is not None:
            return of_rows(rows, loss=loss, where=where)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _from_json(value, loss, where)


def _from_json(value: Any, loss: str | None, where: str) -> Curve:
    if isinstance(value, Mapping):
        history = value.get("log_history")
        if isinstance(history, list):  # HF trainer_state.json
            rows = [row for row in history if isinstance(row, Mapping)]
            return of_rows(rows, loss=loss, where=where)
        lists = {
            str(name): column
            for name, column in value.items()
            if isinstance(column, list) and column and not isinstance(column[0], list | dict)
        }
        longest = max((len(column) for column in lists.values()), default=0)
        if longest > 1:
            equal = {name: column for name, column in lists.items() if len(column) == longest}
            return curve_of_columns(equal, loss=loss, where=where)
        for name in ("history", "metrics", "rows", "data", "logs"):
            if isinstance(value.get(name), list):
                return _from_json(value[name], loss, where)
        if any(isinstance(one, int | float) for one in value.values()):
            return of_rows([value], loss=loss, where=where)
    if isinstance(value, list) and value:
        if all(isinstance(one, list) and len(one) == 3 for one in value):  # TensorBoard's JSON
            columns = {"wall_time": [one[0] for one in value], "step": [one[1] for one in value]}
            return curve_of_columns({**columns, "loss": [one[2] for one in value]}, where=where)
        if all(isinstance(one, list) and len(one) == 2 for one in value):
            pairs = {"step": [one[0] for one in value], "loss": [one[1] for one in value]}
            return curve_of_columns(pairs, where=where)
        return of_rows(value, loss=loss, where=where)
    raise RecipeError(Problem(where, EXPECTED, type(value).__name__))


def _json_lines(lines: list[str]) -> list[dict[str, Any]] | None:
    """Rows of JSON lines, torn ones left out; None where hardly any line is one."""
    full = [line for line in lines if line.strip()]
    if not any(map(_is_json, full[:: 1 + len(full) // 100])):
        return None
    try:
        rows = json.loads("[" + ",".join(full) + "]")  # one call: a million lines in a second
    except (ValueError, RecursionError):
        rows = []
        for line in full:
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    good = [row for row in rows if isinstance(row, dict)]
    return good if len(good) >= max(1, len(full) // 2) else None


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


# -- tables, lists, logs ------------------------------------------------------


def _bare_numbers(text: str, where: str) -> dict[str, Any] | None:
    """Columns of numbers and nothing else, one or more a line; None where there is anything else.

    Raises RecipeError for a table of three or more columns that has no names.
    """
    if not is_number(_BARE.split(text[:200].lstrip("[( "), maxsplit=1)[0]):
        return None
    words = [word for word in _BARE.split(_with_points(text)) if word]
    try:
        values = np.array(words, dtype=np.float64)
    except ValueError:
        return None
    lines = text.count("\n") + 1
    width = len(values) // lines
    if lines < 3 or width < 2 or width * lines != len(values):
        return {"loss": values}
    shown = [line for line in text.split("\n", 20)[:20] if line.strip()]
    if {len([word for word in _BARE.split(_with_points(line)) if word]) for line in shown} != {
        width
    }:
        return {"loss": values}
    return _headless(values.reshape(-1, width), where) or {"loss": values}


def _headless(rows: np.ndarray[Any, Any], where: str) -> dict[str, Any] | None:
    """Columns of a table without names, [rows, 2 or more]; None for a list in several lines."""
    first, last = rows[:, 0], rows[:, -1]
    if rows.shape[1] == 3 and _counts(last) and bool((first > 1e8).all()):
        return {"wall_time": first, "loss": rows[:, 1], "step": last}  # mlflow's metric files
    if not _counts(first):
        return None
    if rows.shape[1] == 2:
        return {"step": first, "loss": last}
    if (first % 1).any():
        return None
    expected = "a first line with the names of the columns, for example step,loss,lr"
    raise RecipeError(Problem(where, expected, f"{rows.shape[1]} columns without names"))


def _counts(values: np.ndarray[Any, Any]) -> bool:
    """Whether they go up, but for a restart or two: what a loss never does."""
    change = np.diff(values)
    return bool(np.isfinite(change).all()) and int((change <= 0).sum()) <= max(0, len(change) // 20)


def _with_points(text: str) -> str:
    """Decimal commas as points where nothing else can be meant: `2,31; 2,28` or `2,31 2,28`."""
    words = text.replace(";", " ").split()
    if "," not in text or "." in text or not all(map(DECIMAL_COMMA.fullmatch, words)):
        return text
    rising = np.diff([int(word.split(",")[0]) for word in words]) > 0
    return text if len(words) > 1 and bool(rising.all()) else text.replace(",", ".")
