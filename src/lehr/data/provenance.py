"""Text that remembers, character by character, where it came from.

`TrackedText` is a `str` beside a second string of the same length whose characters
are codes of origin: slicing, joining or stripping the text does the same to the
codes, at the speed of `str`. What a chat template writes itself has code TEMPLATE;
text of a message has a code that names the message and the field. An operation
that cannot keep single origins taints its result: it is never taken for text of the
template. A plain `str` among tracked text counts as written by the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

TEMPLATE = "\0"
TAINTED = "\x01"
_FIRST_CODE = 2
FIELDS = 64  # codes a message owns; the last one is text mixed from several of its fields
CONTENT, REASONING, FIRST_OTHER, MIXED = 0, 1, 2, FIELDS - 1
TOOLS = 0  # slot 0 belongs to the tool definitions, slot 1 + i to message i
MOST_MESSAGES = 16_000  # so that every code is a Unicode code point

_KNOWN_CONVERSION = re.compile(r"%(?:\((?P<name>[^)]*)\))?(?P<kind>[s%])")


def code(slot: int, field: int) -> str:
    """The code of `field` of the owner in `slot` (0 tools, 1 + i message i)."""
    return chr(_FIRST_CODE + slot * FIELDS + min(field, MIXED))


def slot_of(origin: str) -> int:
    """The owner's slot of one code; -1 for TEMPLATE, -2 for TAINTED."""
    number = ord(origin)
    return number - 1 if number == 0 else -2 if number == 1 else (number - _FIRST_CODE) // FIELDS


class TrackedText(str):
    """A string with one code of origin per character; every method keeps or taints it.

    >>> text = TrackedText("  hi ", code(1, CONTENT) * 5)
    >>> codes_of("<" + text.strip() + ">") == "\\0" + code(1, CONTENT) * 2 + "\\0"
    True
    """

    __slots__ = ("_codes",)
    _codes: str

    def __new__(cls, text: str, codes: str | None = None) -> TrackedText:
        self = super().__new__(cls, text)
        self._codes = TAINTED * len(text) if codes is None else codes
        return self

    def __str__(self) -> str:
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return plain(self), self._codes

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedText(str.__add__(self, other), self._codes + codes_of(other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedText(str.__add__(other, self), codes_of(other) + self._codes)

    def __mul__(self, count: SupportsIndex) -> str:
        return TrackedText(str.__mul__(self, count), self._codes * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return format_percent(self, values)

    def __rmod__(self, pattern: str) -> str:
        return format_percent(pattern, self)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return TrackedText(str.__getitem__(self, key), self._codes[key])

    def __iter__(self) -> Iterator[str]:
        for character, origin in zip(plain(self), self._codes, strict=True):
            yield TrackedText(character, origin)

    def _part(self, start: int, length: int) -> TrackedText:
        end = start + length
        return TrackedText(str.__getitem__(self, slice(start, end)), self._codes[start:end])

    def _parts(self, pieces: list[str], separator_length: int | None) -> list[str]:
        """The pieces with their origins; None: separated by white space of any length."""
        parts: list[str] = []
        position = 0
        for piece in pieces:
            if separator_length is None:
                position = str.find(self, piece, position)
            parts.append(self._part(position, len(piece)))
            position += len(piece) + (separator_length or 0)
        return parts

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._parts(str.split(self, sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._parts(str.rsplit(self, sep, maxsplit), None if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:  # type: ignore[override]
        lines = self._parts(str.splitlines(self, keepends=True), 0)
        if keepends:
            return lines
        return [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str) -> tuple[str, str, str]:  # type: ignore[override]
        head, middle, tail = self._parts(list(str.partition(self, sep)), 0)
        return head, middle, tail

    def rpartition(self, sep: str) -> tuple[str, str, str]:  # type: ignore[override]
        head, middle, tail = self._parts(list(str.rpartition(self, sep)), 0)
        return head, middle, tail

    def strip(self, chars: str | None = None) -> str:
        stripped = str.strip(self, chars)
        return self._part(len(self) - len(str.lstrip(self, chars)), len(stripped))

    def lstrip(self, chars: str | None = None) -> str:
        stripped = str.lstrip(self, chars)
        return self._part(len(self) - len(stripped), len(stripped))

    def rstrip(self, chars: str | None = None) -> str:
        return self._part(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> str:
        length = len(str.removeprefix(self, prefix))
        return self._part(len(self) - length, length)

    def removesuffix(self, suffix: str) -> str:
        return self._part(0, len(str.removesuffix(self, suffix)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return taint(str.replace(self, old, new, count), (self, new))
        return join_text(new, self.split(old, count))

    def join(self, pieces: Iterable[str]) -> str:
        return join_text(self, pieces)

    def _same_length(self, changed: str) -> str:
        """A change of case: character by character unless the length betrays that it is not."""
        if len(changed) == len(self):
            return TrackedText(changed, self._codes)
        return taint(changed, (self,))

    def upper(self) -> str:
        return self._same_length(str.upper(self))

    def lower(self) -> str:
        return self._same_length(str.lower(self))

    def title(self) -> str:
        return self._same_length(str.title(self))

    def capitalize(self) -> str:
        return self._same_length(str.capitalize(self))

    def swapcase(self) -> str:
        return self._same_length(str.swapcase(self))

    def casefold(self) -> str:
        return self._same_length(str.casefold(self))


def _tainting(name: str) -> Any:
    method = getattr(str, name)

    def tainted(self: TrackedText, *values: Any, **named: Any) -> str:
        return taint(method(self, *values, **named), (self, values, named))

    tainted.__name__ = name
    return tainted


for _name in ("center", "expandtabs", "ljust", "rjust", "zfill", "translate"):
    setattr(TrackedText, _name, _tainting(_name))


def plain(text: str) -> str:
    """The same characters as an exact `str`."""
    return str.__str__(text) if type(text) is not str else text


def codes_of(text: str) -> str:
    """One code per character of `text`."""
    return text._codes if isinstance(text, TrackedText) else TEMPLATE * len(text)


def sources_in(value: Any) -> Iterator[TrackedText]:
    """All tracked text inside nested containers."""
    if isinstance(value, TrackedText):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from sources_in(key)
            yield from sources_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from sources_in(item)


def taint(text: str, sources: Any) -> str:
    """`text`, made from `sources` in a way that no single character can be followed.

    Made from one field it belongs to that field; from one message, to that message;
    from several, to none. Without any tracked source it stays plain.
    """
    found = {origin for source in sources_in(sources) for origin in set(source._codes)}
    found.discard(TEMPLATE)
    if not found:
        return text
    if len(found) == 1:
        origin = found.pop()
    else:
        slots = {slot_of(origin) for origin in found}
        origin = code(slots.pop(), MIXED) if len(slots) == 1 and min(slots) >= 0 else TAINTED
    return TrackedText(plain(text), origin * len(text))


def text_of(value: Any) -> str:
    """`str(value)` that keeps origins; the printed form of a container is tainted."""
    if isinstance(value, str):
        return value
    text = str(value)
    if value is None or isinstance(value, bool | int | float):
        return text
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return taint(text, (value,))
    return TrackedText(text) if text else text


def join_text(separator: str, pieces: Iterable[str]) -> str:
    """`separator.join(pieces)` with origins."""
    items = list(pieces)
    text = plain(separator).join(items)
    for item in items:
        if type(item) is TrackedText:
            break
    else:
        if type(separator) is not TrackedText:
            return text
    return TrackedText(text, codes_of(separator).join([codes_of(item) for item in items]))


def format_percent(pattern: str, values: Any) -> str:
    """`pattern % values`: exact origins for `%s` and `%(name)s`, else tainted."""
    result = str.__mod__(plain(pattern), values)  # never the reflected method of tracked values
    rest = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    position = 0
    for match in _KNOWN_CONVERSION.finditer(plain(pattern)):
        pieces.append(pattern[position : match.start()])
        position = match.end()
        if match["kind"] == "%":
            pieces.append("%")
        elif match["name"] is not None:
            pieces.append(text_of(values[match["name"]]))
        else:
            pieces.append(text_of(next(rest, "")))
    pieces.append(pattern[position:])
    joined = join_text("", pieces)
    return joined if joined == result else taint(result, (pattern, values))
