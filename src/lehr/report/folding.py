"""A Markdown page folded to a width: paragraphs and lists flow, code and tables stay."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

ITEM = re.compile(r"(\s*(?:[-*]|\d+\.)\s+)")
CODE_INDENT = "    "
FENCE = "```"


def fold(page: str, width: int) -> str:
    """`page` with no line of prose wider than `width` columns.

    Code keeps its lines, so that commands can be copied; tables and headings keep theirs.

    >>> print(fold("one two\\nthree\\n\\n- four five six", 10))
    one two
    three
    <BLANKLINE>
    - four
      five six
    """
    lines: list[str] = []
    for block, flows in _blocks(page.split("\n")):
        lines += _folded(block, width) if flows else block
    return "\n".join(lines)


def _blocks(lines: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Groups of lines, and whether they are prose that flows together."""
    prose: list[str] = []
    fenced = False
    for line in lines:
        fence = line.startswith(FENCE)
        code = not prose and line.startswith(CODE_INDENT)
        if fenced or fence or code or not line.strip() or line.startswith(("#", "|")):
            if prose:
                yield prose, True
                prose = []
            yield [line], False
            fenced ^= fence
        elif prose and ITEM.match(line):
            yield prose, True
            prose = [line]
        else:
            prose.append(line)
    if prose:
        yield prose, True


def _folded(block: list[str], width: int) -> list[str]:
    """One paragraph or list item; an item's further lines are set below its first word."""
    item = ITEM.match(block[0])
    hanging = " " * len(item.group(1)) if item else ""
    text = " ".join(line.strip() for line in block)
    first = block[0][: len(block[0]) - len(block[0].lstrip())]
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
