"""Tables of any tool: cells separated by commas, semicolons, tabs or bars below their names."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lehr.diagnosis.doctor_curve import Floats, canonical, is_known, numbers_of

# A name begins a word and is short: an endless word (base64) is not searched from each letter.
PAIR = re.compile(
    r"(?<!\w)['\"]?([A-Za-z_][\w/.\-]{0,99}?)['\"]?\s*[:= ]\s*\[?['\"]?"
    r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:nan|infinity|inf)))"
    r"(?![\w.])"
)
_CLOCK = re.compile(r"\d\d:\d\d")  # in the first line of a log, never in a name
DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+(?:[eE][-+]?\d+)?")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+")


RUNS = ("run id", "run_id", "run", "run_uuid", "run_name", "run name")


def table_of(text: str, loss: str | None = None) -> dict[str, Any] | None:
    """Columns of a table with a header; None where it is none.

    Columns that say nothing of a run are left out where one is known to be the loss.
    """
    found = header(text.split("\n", 1)[0])
    if found is None:
        return None
    names, delimiter = found
    kept = needed(names, loss)
    try:
        columns = _cells_of(text, names, delimiter, kept)
        if columns is not None and len(kept) < len(names) and not has_loss(columns, loss):
            columns = _cells_of(text, names, delimiter, range(len(names)))
    except csv.Error:  # a cell of more than 128 KiB
        return None
    return None if columns is None else long_table(columns) or columns


def header(head: str) -> tuple[list[str], str] | None:
    """(names, delimiter) of a table's first line; None where it names no columns."""
    delimiter = max(",;\t|", key=head.count)
    if not head.count(delimiter) or PAIR.search(head):
        return None
    row = next(csv.reader([head], delimiter=delimiter))
    names = [name.strip().strip("# ") for name in row]
    if any(is_number(name) for name in names if name) or _CLOCK.search(head):
        return None
    return apart(names), delimiter


def apart(names: Sequence[str]) -> list[str]:
    """Names of columns, of which none is that of an earlier one.

    >>> apart(["step", "loss", "loss"])
    ['step', 'loss', 'loss (column 3)']
    """
    first = {name: place for place, name in reversed(list(enumerate(names)))}
    return [
        name if first[name] == place or not name else f"{name} (column {place + 1})"
        for place, name in enumerate(names)
    ]


def needed(names: Sequence[str], loss: str | None) -> Sequence[int]:
    """Positions of the columns that are read: all of them where none is known to be the loss."""
    known = loss in names if loss is not None else any(canonical(one) == "loss" for one in names)
    if not known or "value" in {name.lower() for name in names}:
        return range(len(names))
    return [index for index, name in enumerate(names) if name == loss or is_known(name)]


def has_loss(columns: Mapping[str, Any], loss: str | None) -> bool:
    """Whether the column that is the loss by its name has a number in any row."""
    for name, values in columns.items():
        if name == loss or (loss is None and canonical(name) == "loss"):
            found = numbers_of(values)
            if found is not None and bool(np.isfinite(found[0]).any() or found[1].any()):
                return True
    return False


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def enough(good: int, rows: int) -> bool:
    """Whether so many of a text's rows have as many cells as there are names: a table."""
    return good >= max(1, rows // 2)


def _cells_of(
    text: str, names: Sequence[str], delimiter: str, kept: Sequence[int]
) -> dict[str, Any] | None:
    """The columns at `kept`, whose cells may be words or empty; None where it is no table."""
    reader = csv.reader(io.StringIO(text), delimiter=delimiter)
    next(reader)
    body, rows = [], 0
    for row in reader:
        rows += bool(row)
        if len(row) == len(names):
            body.append([row[index] for index in kept])
    if not enough(len(body), rows):
        return None
    columns = zip(*body, strict=True)
    return {names[index]: cells(one, delimiter) for index, one in zip(kept, columns, strict=True)}


def cells(values: Sequence[str], delimiter: str) -> Any:
    """Numbers where all cells are, else the texts, None where there is nothing in a cell."""
    try:
        return np.array(values, dtype=np.float64)
    except ValueError:
        pass
    told = [value.strip() for value in values if value.strip()]
    if _decimal_commas(told, delimiter):
        values = tuple(value.replace(",", ".") for value in values)
    return [value if value.strip() else None for value in values]


def _decimal_commas(told: list[str], delimiter: str) -> bool:
    """Whether the commas in a column are decimal; between commas `2,345` may be thousands."""
    with_comma = [value for value in told if "," in value]
    if not with_comma or not all(map(DECIMAL_COMMA.fullmatch, with_comma)):
        return False
    return delimiter != "," or not all(map(THOUSANDS.fullmatch, with_comma))


def long_table(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """mlflow's long table (key, value, step) as columns; None where it is not one."""
    lower = {name.lower(): name for name in columns}
    key = lower.get("key") or lower.get("metric") or lower.get("tag") or lower.get("name")
    value, step = lower.get("value"), lower.get("step")
    if key is None or value is None:
        if value is not None and step is not None and "loss" not in lower:  # TensorBoard
            return {"step": columns[step], "loss": columns[value], **_clock(columns, lower)}
        return None
    found = numbers_of(columns[value])
    if found is None:
        return None
    given = numbers_of(columns[step]) if step else None
    steps = np.arange(float(len(columns[key]))) if given is None else given[0]
    names = [str(name) for name in columns[key]]
    run = next((lower[name] for name in RUNS if name in lower), None)
    if run is not None and len(set(map(str, columns[run]))) > 1:  # as wandb names them
        names = [f"{one} - {name}" for one, name in zip(columns[run], names, strict=True)]
    return _spread(names, steps, *found)


def _spread(names: Sequence[str], steps: Floats, values: Floats, bad: Any) -> dict[str, Any]:
    """A column for each name over the steps in the order of their first row; the last row counts.

    >>> made = _spread(["a", "b", "a"], np.array([1.0, 1, 2]), np.array([3.0, 4, 5]), np.zeros(3))
    >>> {name: column.tolist() for name, column in made.items()}
    {'step': [1.0, 2.0], 'a': [3.0, 5.0], 'b': [4.0, None]}
    """
    there = np.isfinite(steps)
    unique, first, place = np.unique(steps[there], return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    filled = np.where(bad, np.nan, values)
    absent = ~np.isfinite(values) & ~np.asarray(bad, dtype=bool)
    made: dict[str, Any] = {"step": unique[order]}
    told = np.asarray(names, dtype=object)[there]
    for name in dict.fromkeys(names):
        mine = told == name
        column = np.ma.masked_all(len(unique), dtype=np.float64)
        column[rank[place[mine]]] = np.ma.array(filled[there][mine], mask=absent[there][mine])
        made[name] = column
    return made


def _clock(columns: Mapping[str, Any], lower: Mapping[str, str]) -> dict[str, Any]:
    name = lower.get("wall time") or lower.get("wall_time")
    return {"wall_time": columns[name]} if name else {}
