"""Logs of any trainer: lines with `loss: 2.1` in them, or dictionaries as Python prints them.

A long log has few kinds of lines. Each kind becomes one pattern, all patterns become one search
over the text, and only lines of no kind are taken apart one by one. Both ways give the same.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lehr.diagnosis.doctor_curve import canonical, is_known, number_of
from lehr.diagnosis.doctor_tables import DECIMAL_COMMA, PAIR, THOUSANDS

LONG = 2**16  # characters: below that it does not pay to look for kinds of lines
SAMPLE = 300  # lines from the beginning, and as many from all over the text
MOST_KINDS = 24

# `train loss 2.1`, `lm loss: 2.1`, `Learning Rate 1e-5`: two words that are one name. The joined
# name is as long as before, so that places in the line stay what they are.
_TWO_WORDS = re.compile(
    r"(?<![\w/.\-])((?:(?:best|lowest|min|minimum) )?[A-Za-z_][\w/.\-]{0,60}) (loss|norm|rate)\b"
    r"(?=['\"]?\s*[:= ])",
    re.IGNORECASE,
)
_LOSS_OF = re.compile(r"\bloss (train|val|valid|eval|test)\b(?=\s*[:= ])")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BAR = re.compile(r"\s*\d+/\d+ *(?:\[[=>.\s]|\x1b|[━╸])|.* ETA: ")
_NOT_ALONE = {"epoch", "seconds", "clock"}  # a line with nothing else says nothing of a run

# What stands for a number in a pattern. Possessive: a line that does not fit is left at once.
_NUMBER = r"[-+]?(?:\d++(?:\.\d++)?(?:[eE][-+]?\d++)?|(?i:nan|infinity|inf))"
_SIMPLE = re.compile(_NUMBER)


def as_shown(text: str) -> str:
    """The lines of a log as a terminal shows them, without colours.

    Of a Keras bar that is drawn again and again in one line, the last state counts: those before
    are means over a part of the epoch. Other bars are lines of their own.
    """
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" not in text and "\b" not in text:
        return text
    made: list[str] = []
    for line in text.replace("\r\n", "\n").replace("\b", "\r").split("\n"):
        states = [state for state in line.split("\r") if state.strip()]
        bars = [state for state in states[:-1] if not _BAR.match(state)]
        made += [*bars, *states[-1:]] if states else [""]
    return "\n".join(made)


# -- one line -----------------------------------------------------------------


def row_of_line(line: str, loss: str | None = None) -> dict[str, Any] | None:
    """The numbers of a line that say something of a run; None where none does."""
    row = _printed(line)
    if row is None:
        row = {}
        for name, number in PAIR.findall(_joined(line)):
            row.setdefault(name, _number_of_a_log(number))  # the first: `loss 2.1 ... (loss 2.3)`
    return _telling(row, loss)


def _telling(row: Mapping[str, Any], loss: str | None) -> dict[str, Any] | None:
    kept = {name: value for name, value in row.items() if _kept(name, loss)}
    return kept if any(_tells(name, loss) for name in kept) else None


def _kept(name: str, loss: str | None) -> bool:
    return name == loss or is_known(name) or _some_loss(name)


def _tells(name: str, loss: str | None) -> bool:
    told_alone = is_known(name) and canonical(name) not in _NOT_ALONE
    return name == loss or _some_loss(name) or told_alone


def _some_loss(name: str) -> bool:
    lower = name.lower()
    return lower.endswith("loss") and not lower.startswith(("best", "lowest", "min"))


def _joined(line: str) -> str:
    """Names of two words as one word of the same length.

    >>> _joined("| lm loss: 6.5E+00 | loss train: 2, grad norm: 1.2")
    '| lm_loss: 6.5E+00 | train_loss: 2, grad_norm: 1.2'
    """
    line = _LOSS_OF.sub(r"\1_loss", line)
    return _TWO_WORDS.sub(lambda found: f"{found[1].replace(' ', '_')}_{found[2]}", line)


def _number_of_a_log(text: str) -> float:
    """`1,000` is a thousand, `2,31` has a decimal comma.

    >>> _number_of_a_log("1,000"), _number_of_a_log("2,31"), _number_of_a_log("2.5,")
    (1000.0, 2.31, 2.5)
    """
    text = text.rstrip(",.")
    decimal = DECIMAL_COMMA.fullmatch(text) and not THOUSANDS.fullmatch(text)
    return float(text.replace(",", "." if decimal else ""))


def _printed(line: str) -> dict[str, Any] | None:
    """A dictionary as Python prints it, with nan and inf; None where there is none."""
    begin, end = line.find("{"), line.rfind("}")
    if begin < 0 or end <= begin:
        return None
    source = re.sub(
        r"(?<![\w'\"])-?(nan|inf|NaN|Infinity)(?![\w'\"])", r"'\1'", line[begin : end + 1]
    )
    try:
        value = ast.literal_eval(source.replace(": null", ": None"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) and all(isinstance(k, str) for k in value) else None


# -- kinds of lines -----------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A pattern of lines that differ in their numbers; it captures those of `names`."""

    pattern: str
    names: tuple[str, ...]


def kind_of_line(line: str, loss: str | None = None) -> Kind | None:
    """The kind of a line; None where another line of that kind could mean something else.

    >>> kind_of_line("iter 7: loss 2.5, 3 ms").names
    ('iter', 'loss')
    """
    found = list(PAIR.finditer(_joined(line)))
    row = row_of_line(line, loss) or {}
    parts: list[str] = []
    names: list[str] = []
    place = 0
    for pair in found:
        name, number = pair[1], pair[2].rstrip(",")
        end = pair.start(2) + len(number)
        if not _SIMPLE.fullmatch(number) or re.match(r",\d", line[end:]):
            return None
        parts.append(_literal(line[place : pair.start(1)]))
        # Digits in a name that is kept belong to it.
        parts.append(_literal(line[pair.start(1) : pair.start(2)], exact=name in row))
        new = name in row and name not in names
        parts.append(f"({_NUMBER})" if new else f"(?:{_NUMBER})")
        if new:
            names.append(name)
            if not _same(number_of(row[name]), float(number)):
                return None
        place = end
    if set(names) != set(row) or (line.count("{") > 1 and row):
        return None  # a printed dictionary with more in it than words and numbers
    parts.append(_literal(line[place:].rstrip(" ")) + " *+")
    return Kind("".join(parts), tuple(names))


def _same(one: float | None, other: float) -> bool:
    return one == other or (one is not None and one != one and other != other)


def _literal(text: str, *, exact: bool = False) -> str:
    """Text as a pattern: other digits may stand for digits, and more spaces before them."""
    made = re.escape(text)
    if not exact:
        made = re.sub(r"\d+", lambda _: r"\d++", made)
    return re.sub(r"(?:\\ )+(?=\\d|$)", lambda _: " ++", made)


def _kinds(text: str, loss: str | None) -> list[Kind]:
    """The kinds of a sample of lines, the most frequent first."""
    counted: Counter[Kind] = Counter()
    for line in _sampled(text):
        kind = kind_of_line(line, loss)
        if kind is not None:
            counted[kind] += 1
    return [kind for kind, _ in counted.most_common(MOST_KINDS)]


def _sampled(text: str) -> Iterator[str]:
    begin = 0
    starts = np.linspace(0, len(text), SAMPLE, endpoint=False, dtype=np.int64)
    for number in range(2 * SAMPLE):
        if number >= SAMPLE:
            begin = text.find("\n", int(starts[number - SAMPLE])) + 1
        end = text.find("\n", begin)
        line = text[begin : end if end >= 0 else len(text)]
        if line.strip() and len(line) < 10_000:
            yield line
        begin = end + 1 if end >= 0 else 0


# -- a whole log --------------------------------------------------------------


def columns_of_log(text: str, loss: str | None = None) -> dict[str, Any] | None:
    """Columns of a log; None where no line says anything of a run."""
    if len(text) < LONG:
        return _columns_of_rows(
            [row for line in text.split("\n") if (row := row_of_line(line, loss))]
        )
    kinds = _kinds(text, loss)
    if not any(kind.names for kind in kinds):
        kinds = []
    whole = "|".join(f"(?:{kind.pattern})" for kind in kinds)
    pattern = re.compile(f"^(?:{whole}{'|' if whole else ''}(.+)|())$", re.MULTILINE)
    found = pattern.findall(text)
    if not found:
        return None
    return _assembled(kinds, list(zip(*found, strict=True)), loss)


def _columns_of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names} if rows else None


def _assembled(
    kinds: Sequence[Kind], groups: Sequence[Sequence[str]], loss: str | None
) -> dict[str, Any] | None:
    """Columns from what the patterns captured: lines without a row are left out."""
    rows = len(groups[0])
    values: dict[str, Any] = {}
    is_row = np.zeros(rows, dtype=bool)
    group = 0
    for kind in kinds:
        for number, name in enumerate(kind.names):
            taken, there = _numbers(groups[group])
            group += 1
            if number == 0:
                is_row |= there
            if name in values:
                values[name][there] = taken[there]
            else:
                values[name] = np.ma.array(taken, mask=~there)
    for index, line in enumerate(groups[-2]) if any(groups[-2]) else ():
        for name, value in ((row_of_line(line, loss) if line else None) or {}).items():
            is_row[index] = True
            told = number_of(value)
            if told is not None:
                if name not in values:
                    values[name] = np.ma.masked_all(rows, dtype=np.float64)
                values[name][index] = told
    if not is_row.any():
        return None
    return values if is_row.all() else {name: one[is_row] for name, one in values.items()}


def _numbers(texts: Sequence[str]) -> tuple[Any, Any]:
    """(numbers, where there is one) of texts of which some are empty [n], [n]."""
    import pyarrow as pa
    from pyarrow import compute

    column = pa.array(texts)
    there = compute.not_equal(column, "")
    if not compute.all(there).as_py():
        column = compute.if_else(there, column, None)
    try:
        made = column.cast(pa.float64())
    except pa.ArrowInvalid:  # a sign that pyarrow does not read
        made = pa.array([float(text) if text else None for text in texts], pa.float64())
    numbers = np.array(made.fill_null(0.0).to_numpy(zero_copy_only=False))  # to be written to
    return numbers, there.to_numpy(zero_copy_only=False)
