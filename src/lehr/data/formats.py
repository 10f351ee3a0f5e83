"""Rows become Examples: each row by the shape that its own columns show.

A file may mix shapes; the one that most rows show is preferred where a row fits several, and is
what gets reported. A row that fits none, or that breaks the shape it shows, is dropped with a
reason. Columns that no shape reads never matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lehr.data.detection import NO_SHAPE, Detector, views_of
from lehr.data.messages import RowError
from lehr.data.row_shapes import FORMATS
from lehr.data.rows import Row
from lehr.data.shapes import Example, Message, Origin
from lehr.errors import Problem, RecipeError

PLAIN_TEXT = "plain text"
UNKNOWN = "unknown"
SURROGATE = "half of a surrogate pair: text that no tokenizer can take"
_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")


@dataclass(frozen=True)
class Dropped:
    """A row that was not used. `reason` is a short fixed phrase, so that equal ones add up."""

    reason: str
    origin: Origin


@dataclass
class Conversion:
    """What became of the rows of one file.

    examples   kept, in file order
    dropped    with reasons, in file order
    shape      shown by most rows
    shapes     how many rows showed each shape
    notes      what was changed or guessed: note -> (rows, first origin)
    columns    column names of the first row that showed no shape (for the error message)
    """

    examples: list[Example] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    shape: str = UNKNOWN
    shapes: Counter[str] = field(default_factory=Counter)
    notes: dict[str, tuple[int, Origin]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    def note(self, text: str, origin: Origin) -> None:
        """Counts a note, remembering where it was first made."""
        rows, first = self.notes.get(text, (0, origin))
        self.notes[text] = (rows + 1, first)


def to_examples(
    rows: Iterable[Row], source_name: str, file: str, format: str = "auto"
) -> tuple[list[Example], list[Dropped], str]:
    """(examples, dropped rows, the shape that most rows show). Raises RecipeError for `format`.

    >>> rows = [Row({"prompt": "2 + 2?", "completion": "4"}, 1), Row({"prompt": "3 + 3?"}, 2)]
    >>> examples, dropped, shape = to_examples(rows, "sums", "sums.jsonl")
    >>> examples[0].messages[1]["content"], shape
    ('4', 'prompt+completion')
    >>> dropped[0].reason, str(dropped[0].origin)
    ('a prompt without an answer', 'sums.jsonl:2')
    """
    conversion = convert(rows, source_name, file, format)
    return conversion.examples, conversion.dropped, conversion.shape


def convert(rows: Iterable[Row], source_name: str, file: str, format: str = "auto") -> Conversion:
    """Every row as Examples or as a dropped row with its reason; nothing raises but `format`."""
    if format not in FORMATS:
        known = ", ".join(FORMATS)
        raise RecipeError(Problem(f"data.{source_name}.format", f"one of {known}", format))
    # Detection looks at the whole file first: what a label means, and which shape leads.
    listed = list(rows)
    views = views_of([row.value if isinstance(row.value, Mapping) else {} for row in listed])
    detector = Detector(views, FORMATS[format])
    conversion = Conversion()
    for row, view in zip(listed, views, strict=True):
        origin = Origin(source_name, file, row.line)
        for text in row.notes:
            conversion.note(text, origin)
        try:
            conversion.examples += _examples_of(row, view, origin, detector, conversion)
        except RowError as bad:
            conversion.dropped.append(Dropped(bad.reason, origin))
        except RecursionError:
            conversion.dropped.append(Dropped("nested too deeply", origin))
    if conversion.shapes:
        conversion.shape = conversion.shapes.most_common(1)[0][0]
    return conversion


def _examples_of(
    row: Row,
    view: Mapping[str, Any],
    origin: Origin,
    detector: Detector,
    conversion: Conversion,
) -> list[Example]:
    if row.problem is not None or row.value is None:
        raise RowError(row.problem or "the row is null")
    if isinstance(row.value, str):
        return _plain_text(row.value, origin, detector, conversion)
    match = detector.match(view)
    if match is None:
        reason = detector.why_none(row.value, view)
        if reason == NO_SHAPE and not conversion.columns:
            conversion.columns = tuple(str(name) for name in row.value)
        raise RowError(reason)
    shape, names = match
    conversion.shapes[shape.name] += 1
    if any(view.get(column) for column in _MEDIA_COLUMNS):
        raise RowError("the row holds images, sound or video: only text is read")
    examples = shape.build(view, names, origin)
    for example in examples:
        if not _has_utf8(example):
            raise RowError(SURROGATE)
    if len(examples) > 1:
        conversion.note("the row holds several instances: each counts as a row", origin)
    return examples


def _plain_text(
    text: str, origin: Origin, detector: Detector, conversion: Conversion
) -> list[Example]:
    if all(shape.kind != "text" for shape in detector.allowed):
        raise RowError("plain text, which has no columns")
    conversion.shapes[PLAIN_TEXT] += 1
    if not text.strip():
        raise RowError("empty text")
    example = Example("text", origin, text=text)
    if not _has_utf8(example):
        raise RowError(SURROGATE)
    return [example]


def _has_utf8(example: Example) -> bool:
    """False where a text holds half of a surrogate pair (a JSON escape such as \\ud83d alone)."""
    if not _encodes(example.text):
        return False
    turns = (*example.messages, *example.chosen, *example.rejected)
    return all(_message_encodes(message) for message in turns) and _deep_encodes(example.tools)


def _message_encodes(message: Message) -> bool:
    return all(_deep_encodes(item) for item in message.values())


def _deep_encodes(value: Any) -> bool:
    if isinstance(value, str):
        return _encodes(value)
    if isinstance(value, Mapping):
        return all(_deep_encodes(key) and _deep_encodes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_deep_encodes(item) for item in value)
    return True


def _encodes(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
