"""Files as suites for `lehr evaluate`: each kind of row by the measure that is made for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lehr.data.encoding import Encoder
from lehr.data.shapes import Example
from lehr.data.sources import SourceRows, read_source
from lehr.errors import Problem, RecipeError
from lehr.evaluation.heldout import HeldoutBits, HeldoutLoss, PairAccuracy
from lehr.evaluation.suites import Suite
from lehr.pipeline.auditing import named

MAX_LENGTH = 1024
MEASURED_BY = {"text": HeldoutBits, "chat": HeldoutLoss, "pair": PairAccuracy}


def data_suites(
    paths: Sequence[Path | str],
    encoder: Encoder,
    *,
    taken: Sequence[str] = (),
    max_length: int = MAX_LENGTH,
    items: int | None = None,
) -> tuple[dict[str, Suite], list[str]]:
    """(suite by name, what a person should know): one suite per file and kind of row.

    taken   names of other suites; a file of such a name is measured as `data-NAME`
    items   how many items of a suite are scored at most
    A file of one kind gives a suite of its own name; of several kinds, NAME-text, NAME-chat
    and NAME-pair. Raises RecipeError, all at once, for files that cannot be read, kinds
    that have no measure, chats without a template, and a kind of which no row is measured.
    """
    found: dict[str, Suite] = {}
    notes: list[str] = []
    problems: list[Problem] = []
    for stem, path in named(paths).items():
        try:
            rows = read_source(stem, [path])
        except RecipeError as error:
            problems += error.problems
            continue
        notes += _reading_notes(path, rows)
        by_kind = _by_kind(rows.examples)
        for kind, examples in by_kind.items():
            name = stem if len(by_kind) == 1 else f"{stem}-{kind}"
            while name in taken or name in found:
                name = f"data-{name}"
            problem = _refusal(path, kind, examples, encoder)
            if problem is not None:
                problems.append(problem)
                continue
            suite = MEASURED_BY[kind](name, examples, max_length=max_length)
            problems += _unmeasured(path, kind, suite, encoder, items, notes)
            found[name] = suite
    if problems:
        raise RecipeError(problems)
    return found, notes


def _by_kind(examples: Sequence[Example]) -> dict[str, list[Example]]:
    found: dict[str, list[Example]] = {}
    for example in examples:
        found.setdefault(example.kind, []).append(example)
    return found


def _refusal(
    path: Path, kind: str, examples: Sequence[Example], encoder: Encoder
) -> Problem | None:
    where = f"{path}: {_rows(len(examples))}, first {examples[0].origin}"
    if kind not in MEASURED_BY:
        expected = "text, conversations or pairs: labelled rows have no measure in this version"
        return Problem(where, expected, kind)
    if kind != "text" and encoder.template is None:
        expected = "plain text: this model has no chat template (say --template chatml)"
        return Problem(where, expected, kind)
    return None


def _reading_notes(path: Path, rows: SourceRows) -> list[str]:
    """What reading dropped or changed, with the first place of each reason."""
    reasons: dict[str, list[str]] = {}
    for dropped in rows.dropped:
        reasons.setdefault(dropped.reason, []).append(str(dropped.origin))
    said = [
        f"{path}: {_rows(len(places))} not measured: {reason} (first {places[0]})"
        for reason, places in reasons.items()
    ]
    return said + [f"{path}: {note}" for note in rows.notes]


def _unmeasured(
    path: Path, kind: str, suite: Any, encoder: Encoder, items: int | None, notes: list[str]
) -> list[Problem]:
    """Notes on rows that will have no score; problems where none will have one."""
    if isinstance(suite, PairAccuracy) and suite.equal_pairs:
        text = f"{_rows(suite.equal_pairs)} not measured: equal answers on both sides"
        notes.append(f"{path}: {text}")
        if not suite.items:
            return [Problem(str(path), "pairs of two answers that differ (all are equal)")]
    chosen = list(suite.items)[:items]
    encodings = suite.encodings(encoder)
    reasons: Counter[str] = Counter()
    first: dict[str, str] = {}
    cut = lost = 0
    for name in chosen:
        one = encodings[name]
        for dropped in one.dropped:
            reasons[dropped.reason] += 1
            first.setdefault(dropped.reason, str(dropped.origin))
        if one.encoded and one.dropped_tokens:
            cut, lost = cut + 1, lost + one.dropped_tokens
    if chosen and not any(encodings[name].encoded for name in chosen):
        return [
            Problem(
                first[reason],
                f"at least one {kind} row that can be measured within {suite.max_length:,} tokens: "
                f"{count} of {len(chosen)} cannot ({reason}); shorten the rows",
            )
            for reason, count in reasons.items()
        ]
    notes += [
        f"{path}: {_rows(count)} not measured: {reason} (first {first[reason]})"
        for reason, count in reasons.items()
    ]
    if cut:
        notes.append(
            f"{path}: {_rows(cut)} measured in part: {lost:,} tokens are beyond "
            f"{suite.max_length:,} tokens a row"
        )
    return []


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"
