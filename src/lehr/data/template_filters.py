"""Jinja filters and format functions that keep the origin of every character."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

from jinja2 import pass_environment
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter

from lehr.data.provenance import (
    TrackedText,
    codes_of,
    format_percent,
    join_text,
    plain,
    sources_in,
    taint,
    text_of,
)

__all__ = ["ORIGIN_FILTERS", "format_braces", "keep_or_taint", "to_json"]


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps` of the same arguments (no HTML escapes, as chat templates expect)."""
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    sources = list(sources_in(value))
    if not sources:
        return text
    walked = _walk_json(value, ensure_ascii, indent, separators, sort_keys)
    return walked if walked == text else taint(text, sources)


def _walk_json(
    value: Any,
    ensure_ascii: bool,
    indent: int | str | None,
    separators: tuple[str, str] | None,
    sort_keys: bool,
) -> str:
    step = " " * indent if isinstance(indent, int) else indent
    item_separator, key_separator = separators or (", " if step is None else ",", ": ")

    def string(text: str) -> str:
        if not isinstance(text, TrackedText):
            return json.dumps(text, ensure_ascii=ensure_ascii)
        whole = json.dumps(plain(text), ensure_ascii=ensure_ascii)
        if len(whole) == len(text) + 2:  # nothing was escaped
            return '"' + TrackedText(whole[1:-1], codes_of(text)) + '"'
        escaped = [json.dumps(letter, ensure_ascii=ensure_ascii)[1:-1] for letter in plain(text)]
        origins = [
            origin * len(letter) for letter, origin in zip(escaped, codes_of(text), strict=True)
        ]
        return '"' + TrackedText("".join(escaped), "".join(origins)) + '"'

    def block(items: list[str], opening: str, closing: str, depth: int) -> str:
        if not items:
            return opening + closing
        if step is None:
            return join_text("", [opening, join_text(item_separator, items), closing])
        inner, outer = "\n" + step * (depth + 1), "\n" + step * depth
        body = join_text(item_separator + inner, items)
        return join_text("", [opening, inner, body, outer, closing])

    def write(item: Any, depth: int) -> str:
        if isinstance(item, str):
            return string(item)
        if isinstance(item, Mapping):
            pairs = sorted(item.items()) if sort_keys else list(item.items())
            written = [
                join_text("", [_key(key, string), key_separator, write(inner, depth + 1)])
                for key, inner in pairs
            ]
            return block(written, "{", "}", depth)
        if isinstance(item, list | tuple):
            return block([write(inner, depth + 1) for inner in item], "[", "]", depth)
        return json.dumps(item, ensure_ascii=ensure_ascii)

    return write(value, 0)


def _key(key: Any, string: Callable[[str], str]) -> str:
    return string(key) if isinstance(key, str) else json.dumps({key: 0})[1:-4]


def format_braces(
    formatter: Formatter, pattern: str, values: tuple[Any, ...], named: Mapping[str, Any]
) -> str:
    """`pattern.format(...)`: exact origins for bare `{}` fields, else tainted."""
    result = formatter.vformat(plain(pattern), values, named)
    pieces: list[str] = []
    next_index = 0
    for literal, field, specification, conversion in formatter.parse(plain(pattern)):
        pieces.append(literal)
        if field is None:
            continue
        if specification or conversion:
            return taint(result, (pattern, values, named))
        if field == "":
            field, next_index = str(next_index), next_index + 1
        pieces.append(text_of(formatter.get_field(field, values, named)[0]))
    joined = join_text("", pieces)
    return joined if joined == result else taint(result, (pattern, values, named))


@pass_environment
def _join(
    environment: Environment,
    values: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return join_text(text_of(d), [text_of(value) for value in values])


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = text_of(s)
    tracked = text if isinstance(text, TrackedText) else _written(text)
    return tracked.replace(text_of(old), text_of(new), -1 if count is None else count)


def _format(value: Any, *values: Any, **named: Any) -> str:
    return format_percent(text_of(value), named or values)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * width
    text = text_of(s) + "\n"  # so that a final empty line survives, as in Jinja
    if blank:
        result = join_text("\n" + margin, text.splitlines())
    else:
        head, *tail = text.splitlines()
        result = join_text("\n", [head, *(margin + line if line else line for line in tail)])
    return margin + result if first else result


def _trim(value: Any, chars: str | None = None) -> str:
    return text_of(value).strip(chars)


def _string(value: Any) -> str:
    return text_of(value)


def _written(text: str) -> TrackedText:
    """Plain text as tracked text of the template, so that its methods see origins."""
    return TrackedText(text, codes_of(text))


def keep_or_taint(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of unknown workings: what it makes from tracked text is at best tainted.

    Text that it hands on untouched keeps its origins.
    """

    @functools.wraps(function)
    def filtered(*values: Any, **named: Any) -> Any:
        result = function(*values, **named)
        if isinstance(result, str) and not isinstance(result, TrackedText):
            return taint(result, (values, named))
        return result

    return filtered


# Every filter that makes one string out of others, rewritten over tracked text.
ORIGIN_FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": to_json,
    "join": _join,
    "replace": _replace,
    "format": _format,
    "indent": _indent,
    "trim": _trim,
    "string": _string,
}

# Filters whose inner steps would mistake text of a message for text of the template.
OPAQUE_FILTERS = (
    "center",
    "capitalize",
    "e",
    "escape",
    "filesizeformat",
    "forceescape",
    "pprint",
    "striptags",
    "title",
    "truncate",
    "urlencode",
    "urlize",
    "wordwrap",
    "xmlattr",
)

# Filters that hand on one of their values as it is.
SELECTING_FILTERS = ("attr", "d", "default", "first", "last", "max", "min", "random")


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter on plain text, its whole result tainted by what went in."""

    @functools.wraps(function)
    def filtered(*values: Any, **named: Any) -> Any:
        sources = list(sources_in((values, named)))
        if not sources:
            return function(*values, **named)
        plain_values = [_plain_copy(value) for value in values]
        result = function(*plain_values, **{key: _plain_copy(v) for key, v in named.items()})
        return taint(plain(str(result)), sources)

    return filtered


def _plain_copy(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {_plain_copy(key): _plain_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain_copy(item) for item in value)
    return value
