"""From a file of any tool to a curve. The content decides what a file is, never its name."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lehr.diagnosis.doctor_curve import SPELLINGS, STEPS, Curve, canonical, curve_of_columns
from lehr.diagnosis.doctor_curve import curve_of_rows as of_rows
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
_PAIR = re.compile(
    r"['\"]?([A-Za-z_][\w/.\-]*?)['\"]?\s*[:= ]\s*['\"]?"
    r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity))"
    r"(?![\w.])"
)
# `train loss 2.1`, `loss train: 2.1`: two words that are one name.
_TWO_WORDS = re.compile(
    r"\b(?:(train|val|valid|eval|test) loss|loss (train|val|valid|eval|test))\b"
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
    return curve_of_text(_decoded(content, where), loss=loss, where=where)


def curve_of_text(text: str, *, loss: str | None = None, where: str = "curve") -> Curve:
    """The curve in a text of any of the formats; see `EXPECTED`."""
    text = text.strip()
    if not text:
        raise RecipeError(Problem(where, EXPECTED + "; it is empty"))
    if text[0] in "[{":
        found = _json(text, loss, where)
        if found is not None:
            return found
    bare = _bare_numbers(text)
    if bare is not None:
        return curve_of_columns({"loss": bare}, where=where)
    table = _table(text)
    if table is not None:
        return curve_of_columns(table, loss=loss, where=where)
    rows = _log_lines(text)
    if rows:
        return of_rows(rows, loss=loss, where=where)
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
            rows = [_unfiltered(row) for row in history if isinstance(row, Mapping)]
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


def _unfiltered(row: Mapping[str, Any]) -> dict[str, Any]:
    """HF's Trainer shows 0.0 for a loss that is not finite, beside a gradient norm that is not."""
    made = dict(row)
    norm = made.get("grad_norm")
    if made.get("loss") == 0.0 and isinstance(norm, float) and not math.isfinite(norm):
        made["loss"] = math.nan
    return made


def _json_lines(lines: list[str]) -> list[dict[str, Any]] | None:
    """Rows of JSON lines, torn ones left out; None where hardly any line is one."""
    full = [line for line in lines if line.strip()]
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


# -- tables, lists, logs ------------------------------------------------------


def _bare_numbers(text: str) -> np.ndarray[Any, Any] | None:
    """Numbers and nothing else, one or more a line; None where there is anything else."""
    words = [word for word in _BARE.split(text) if word]
    if len(words) > 4 and not _is_number(words[0]):
        return None
    lines = [line for line in text.split("\n") if line.strip()]
    widths = {len([word for word in _BARE.split(line) if word]) for line in lines[:50]}
    if len(lines) > 2 and widths == {2} and "," not in text.replace(", ", ""):
        pass  # two numbers a line: a table without a header, see _table
    try:
        values = np.array(words, dtype=np.float64)
    except ValueError:
        return None
    if len(lines) > 2 and widths == {2}:
        pairs = values.reshape(-1, 2) if len(values) % 2 == 0 else None
        if pairs is not None and bool((np.diff(pairs[:, 0]) > 0).all()):
            return pairs[:, 1]
    return values


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _table(text: str) -> dict[str, Any] | None:
    """Columns of a table with a header; None where it is none."""
    head = text.split("\n", 1)[0]
    delimiter = max(",;\t|", key=head.count)
    if not head.count(delimiter) or _PAIR.search(head):
        return None
    rows = list(csv.reader(io.StringIO(text), delimiter=delimiter))
    names = [name.strip().strip("# ") for name in rows[0]]
    body = [row for row in rows[1:] if len(row) == len(names)]
    if len(body) < max(1, (len(rows) - 1) // 2) or any(_is_number(name) for name in names if name):
        return None
    columns: dict[str, Any] = {}
    for name, values in zip(names, zip(*body, strict=True), strict=True):
        columns[name] = _cells(values)
    return _wide(columns) or columns


def _cells(values: tuple[str, ...]) -> Any:
    try:
        return np.array(values, dtype=np.float64)
    except ValueError:
        return [value if value.strip() else None for value in values]


def _wide(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """mlflow's long table (key, value, step) as columns; None where it is not one."""
    lower = {name.lower(): name for name in columns}
    key = lower.get("key") or lower.get("metric") or lower.get("tag") or lower.get("name")
    value, step = lower.get("value"), lower.get("step")
    if key is None or value is None:
        if value is not None and step is not None and "loss" not in lower:  # TensorBoard
            return {"step": columns[step], "loss": columns[value], **_clock(columns, lower)}
        return None
    steps = columns[step] if step else np.arange(len(columns[key]))
    rows: dict[float, dict[str, Any]] = {}
    for name, number, at in zip(columns[key], columns[value], steps, strict=True):
        rows.setdefault(float(at), {})[str(name)] = number
    names = dict.fromkeys(str(name) for name in columns[key])
    made: dict[str, Any] = {name: [row.get(name) for row in rows.values()] for name in names}
    return {"step": list(rows), **made}


def _clock(columns: Mapping[str, Any], lower: Mapping[str, str]) -> dict[str, Any]:
    name = lower.get("wall time") or lower.get("wall_time")
    return {"wall_time": columns[name]} if name else {}


def _log_lines(text: str) -> list[dict[str, Any]]:
    """Rows of a log: printed dictionaries, or `name: number` pairs."""
    rows: list[dict[str, Any]] = []
    for plain in text.split("\n"):
        line = _TWO_WORDS.sub(lambda found: f"{found[1] or found[2]}_loss", plain)
        row = _printed(line) or {
            name: float(number.replace(",", "").rstrip(".")) for name, number in _PAIR.findall(line)
        }
        known = {canonical(name) for name in row}
        if known & (set(SPELLINGS) - {"epoch", "seconds", "clock"}):
            row = {name: value for name, value in row.items() if _wanted(name)}
            rows.append(row)
    return rows


def _wanted(name: str) -> bool:
    return canonical(name) in SPELLINGS or name.lower() in STEPS


def _printed(line: str) -> dict[str, Any] | None:
    """A dictionary as Python prints it, with nan and inf; None where there is none."""
    begin, end = line.find("{"), line.rfind("}")
    if begin < 0 or end <= begin:
        return None
    source = re.sub(r"(?<![\w'\"])-?(nan|inf)(?![\w'\"])", r"'\1'", line[begin : end + 1])
    try:
        value = ast.literal_eval(source)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) and all(isinstance(k, str) for k in value) else None
