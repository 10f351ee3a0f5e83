"""What one rendering of a chat template may do: a template is a program, and some never end.

Steps of loops, calls, and characters that are put together are counted. The limits are far
above what any chat needs, and are reached within seconds.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError

MOST_STEPS = 500_000  # of loops and calls together
MOST_CHARACTERS = 2_000_000_000  # written by all operations together
MOST_AT_ONCE = 50_000_000  # characters that one operation makes
COUNTED_FILTER = "_counted"
MOST_WIDTH = 1_000_000  # a number that a text may be padded to, or a list be cut into


class TemplateTooLarge(SecurityError):
    """A template does more than any chat needs."""


@dataclass
class _Spent:
    steps: int = 0
    characters: int = 0


_spent: contextvars.ContextVar[_Spent | None] = contextvars.ContextVar("spent", default=None)


@contextmanager
def counted_rendering() -> Iterator[None]:
    """Within the block, one rendering is counted from zero."""
    token = _spent.set(_Spent())
    try:
        yield
    finally:
        _spent.reset(token)


def step(count: int = 1) -> None:
    """Count steps; raises TemplateTooLarge."""
    spent = _spent.get()
    if spent is None:
        return
    spent.steps += count
    if spent.steps > MOST_STEPS:
        raise TemplateTooLarge(f"the template takes more than {MOST_STEPS:,} steps")


def write(characters: int) -> None:
    """Count characters before they are made; raises TemplateTooLarge."""
    spent = _spent.get() or _Spent()  # outside of a rendering, as in compiling, only at once
    spent.characters += characters
    if characters > MOST_AT_ONCE or spent.characters > MOST_CHARACTERS:
        raise TemplateTooLarge("the template makes a text of more characters than any chat has")


def limit_binop(operator: str, left: Any, right: Any) -> None:
    """Refuse a product, a sum or a power that is too large to be made."""
    if operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            write(len(left) + len(right))
    elif operator == "*":
        for sized, count in ((left, right), (right, left)):
            if hasattr(sized, "__len__") and isinstance(count, int):
                write(len(sized) * max(count, 0))
        _limit_numbers(left, right)
    elif operator == "**":
        if isinstance(right, int) and abs(right) > 64:
            raise TemplateTooLarge(f"the template takes a power of {right}")
        _limit_numbers(left, right)
    elif operator == "%" and isinstance(left, str):
        limit_pattern(left)
        limit_widths((right,) if not isinstance(right, tuple | list) else right)


def _limit_numbers(*values: Any) -> None:
    if any(isinstance(value, int) and value.bit_length() > 4096 for value in values):
        raise TemplateTooLarge("the template computes with numbers of over a thousand digits")


def limit_pattern(pattern: str) -> None:
    """Refuse a format such as `%9999999999d` or `{:>9999999999}`."""
    digits = 0
    for letter in str.__str__(pattern):
        digits = digits + 1 if letter.isdigit() else 0
        if digits > len(str(MOST_WIDTH)) and ("%" in pattern or "{" in pattern):
            raise TemplateTooLarge("the template pads a text to more characters than any chat has")


def limit_widths(values: Any) -> None:
    """Refuse whole numbers that would be a width no chat has."""
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_WIDTH:
            raise TemplateTooLarge(f"the template pads or cuts a text to {value:,} characters")


def counted(values: Any) -> Any:
    """What a loop runs over, its length counted beforehand; a generator becomes a list."""
    if hasattr(values, "__len__"):
        step(len(values) + 1)
        return values
    if hasattr(values, "__iter__"):
        found = []
        for value in values:
            step()
            found.append(value)
        return found
    return values  # no loop at all: Jinja says so in its own words


def count_loops(tree: nodes.Template) -> nodes.Template:
    """Let every loop of a template hand what it runs over to `counted` first."""
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, COUNTED_FILTER, [], [], None, None, lineno=loop.lineno)
    return tree
