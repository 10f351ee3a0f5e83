"""A rendered chat with the owner of every character, and messages made trackable."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lehr.data.provenance import (
    CONTENT,
    FIELDS,
    FIRST_OTHER,
    MOST_MESSAGES,
    REASONING,
    TOOLS,
    TrackedText,
    code,
    slot_of,
)

OWNER_TEMPLATE, OWNER_TAINTED, OWNER_TOOLS = -1, -2, -3

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_ROLE = re.compile(r"[A-Za-z_]+\Z")
_RUN_OF_ONE_ORIGIN = re.compile(r"([^\0])\1*", re.DOTALL)


@dataclass(frozen=True)
class Run:
    """Characters [start, end) that one message (or the tools, or no single one) wrote."""

    start: int
    end: int
    owner: int


@dataclass(frozen=True)
class Rendered:
    """A rendered chat.

    text    what transformers would render
    codes   one character of origin per character of `text` (see `provenance`)
    """

    text: str
    codes: str

    @cached_property
    def owners(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """int32 [characters]: message index, OWNER_TEMPLATE, OWNER_TAINTED or OWNER_TOOLS."""
        return np.array([_owner(origin) for origin in self.codes], dtype=np.int32)

    @cached_property
    def runs(self) -> list[Run]:
        """All text that the template did not write itself, in order."""
        return [
            Run(match.start(), match.end(), _owner(match[1]))
            for match in _RUN_OF_ONE_ORIGIN.finditer(self.codes)
        ]

    def written(self, message: int, part: int) -> str:
        """All characters of one field of one message, in the order of the text."""
        origin = code(1 + message, part)
        start, end = self.codes.find(origin), self.codes.rfind(origin) + 1
        if start < 0:
            return ""
        if self.codes.count(origin) == end - start:
            return self.text[start:end]
        pairs = zip(self.text[start:end], self.codes[start:end], strict=True)
        return "".join(letter for letter, owner in pairs if owner == origin)

    def kept(self, message: int, part: int, source: str) -> bool:
        """Whether that field is in the text once and unchanged, white space apart."""
        return squeezed(self.written(message, part)) == squeezed(source)

    def times(self, message: int, part: int, source: str) -> int:
        """How often the field is in the text whole and with nothing else; 0 where it is not."""
        said, wanted = squeezed(self.written(message, part)), squeezed(source)
        count = len(said) // len(wanted) if wanted else 0
        return count if count and said == wanted * count else 0

    def mentions(self, owner: int) -> bool:
        """Whether any character of that owner is in the text."""
        return any(run.owner == owner for run in self.runs)


def squeezed(text: str) -> str:
    """The text without its white space."""
    return "".join(text.split())


def _owner(origin: str) -> int:
    slot = slot_of(origin)
    return slot - 1 if slot > TOOLS else OWNER_TOOLS if slot == TOOLS else slot


def normalised(message: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers prepares a message: no nulls, reasoning under all of its names."""
    kept = {key: value for key, value in message.items() if value is not None}
    for name in REASONING_NAMES:
        if name in kept:
            return {"thinking": kept[name], **kept, "reasoning_content": kept[name]}
    return kept


def track_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with all its strings tracked, except a role that is a plain word.

    A role is a choice from a list, and some templates build a control token around it.
    """
    slot = 1 + index
    fields = iter(range(FIRST_OTHER, FIELDS * MOST_MESSAGES))

    def next_code() -> str:
        return code(slot, next(fields))

    tracked: dict[str, Any] = {}
    for key, value in normalised(message).items():
        if type(value) is str:
            if key == "content":
                tracked[key] = TrackedText(value, code(slot, CONTENT) * len(value))
            elif key in REASONING_NAMES:
                tracked[key] = TrackedText(value, code(slot, REASONING) * len(value))
            elif key == "role" and _ROLE.match(value):
                tracked[key] = value
            else:
                tracked[key] = track(value, next_code)
        else:
            tracked[key] = track(value, next_code)
    return tracked


def track(value: Any, next_code: Callable[[], str]) -> Any:
    """A copy of plain data in which every string, keys included, has an origin."""
    if isinstance(value, str):
        return TrackedText(value, next_code() * len(value))
    if isinstance(value, Mapping):
        return {track(key, next_code): track(item, next_code) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(track(item, next_code) for item in value)
    return value
