"""Sentences for a person in 80 columns; nothing heavy is imported to say them."""

from __future__ import annotations

import textwrap

WIDTH = 80


def wrapped(text: str, width: int = WIDTH, begin: str = "  ", then: str = "    ") -> str:
    """`text` in lines of at most `width` columns; a word that is longer (a path) stays whole.

    >>> print(wrapped("a.yaml: expected a whole number", 16))
      a.yaml:
        expected a
        whole number
    """
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        lines += textwrap.wrap(
            line,
            width,
            initial_indent=then if number else begin,
            subsequent_indent=then,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
