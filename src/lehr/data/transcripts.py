"""Conversations written as one text: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""

from __future__ import annotations

import re

from lehr.data.shapes import Message

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLE = {"Human": "user", "Assistant": "assistant"}


def transcript_turns(text: str) -> tuple[Message, ...] | None:
    """The turns of a transcript, or None where `text` is not one.

    >>> turns = transcript_turns("\\n\\nHuman: Hi\\n\\nAssistant: Hello")
    >>> [turn["content"] for turn in turns]
    ['Hi', 'Hello']
    >>> transcript_turns("A Human: is a word too") is None
    True
    """
    marks = list(_TURN.finditer(text))
    if not marks or marks[0].start() != 0 or marks[0].group(1) != "Human":
        return None
    if not any(mark.group(1) == "Assistant" for mark in marks):
        return None
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return tuple(
        {"role": _ROLE[mark.group(1)], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    )
