"""Rows with a verdict: a better and a worse answer, or one answer with a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lehr.data.chat_shapes import Columns, conversation, question_turns, with_system
from lehr.data.messages import RowError, require_answers, turns_of
from lehr.data.shapes import Message
from lehr.data.transcripts import transcript_turns

Turns = tuple[Message, ...]

_TRUE = ("true", "1", "1.0", "yes", "+1")
_FALSE = ("false", "0", "0.0", "no", "-1")
LABELS = ("label", "kto_tag")


def verdict_of(value: Any) -> bool | None:
    """The verdict that a label means, or None where it is something else.

    >>> verdict_of("False"), verdict_of(1), verdict_of("safe")
    (False, True, None)
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    if isinstance(value, str):
        word = value.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return None


def pair(
    row: Columns, prompt_column: str | None, chosen_column: str, rejected_column: str
) -> tuple[Turns, Turns, Turns]:
    """(prompt, chosen, rejected). Without a prompt column it is what both sides begin with."""
    chosen = _side(row[chosen_column], chosen_column)
    rejected = _side(row[rejected_column], rejected_column)
    if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
        # Both sides hold the whole conversation: a prompt column can only repeat it.
        prompt, chosen, rejected = split_common_prompt(chosen, rejected)
        prompt = with_system(row, prompt)
    elif prompt_column is None:
        raise RowError("a pair without a prompt")
    else:
        prompt = prompt_turns(row, prompt_column)
    for side in (chosen, rejected):
        require_answers(side)
    return prompt, chosen, rejected


def prompt_turns(row: Columns, column: str) -> Turns:
    """The prompt of a pair or of a labelled answer, from whatever column holds it."""
    if column in ("messages", "conversations", "conversation", "dialogue"):
        return conversation(row, column)
    return question_turns(row, column)


def _side(value: Any, column: str) -> Turns:
    turns = transcript_turns(value) if isinstance(value, str) else None
    return turns or turns_of(value, "assistant", column)


def split_common_prompt(chosen: Turns, rejected: Turns) -> tuple[Turns, Turns, Turns]:
    """Splits two conversations after the longest shared beginning that leaves both an answer."""
    shared = 0
    for left, right in zip(chosen, rejected, strict=False):
        if left != right:
            break
        shared += 1
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    while shared > 0 and not _both_answer(chosen, rejected, shared):
        shared -= 1
    if shared == 0:
        raise RowError("chosen and rejected do not share a prompt")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _both_answer(chosen: Sequence[Message], rejected: Sequence[Message], at: int) -> bool:
    return chosen[at]["role"] == "assistant" and rejected[at]["role"] == "assistant"


def split_last_answer(messages: Turns) -> tuple[Turns, Turns]:
    """(prompt, answer): the answer is the last assistant turn."""
    if messages[-1]["role"] != "assistant":
        raise RowError("the conversation does not end with an assistant turn")
    require_answers(messages[-1:])
    return messages[:-1], messages[-1:]


def with_rejected_answer(row: Columns, column: str, rejected_column: str) -> tuple[Turns, ...]:
    """(prompt, chosen, rejected) where the conversation ends with the better answer."""
    prompt, chosen = split_last_answer(conversation(row, column))
    rejected = turns_of(row[rejected_column], "assistant", rejected_column)
    require_answers(rejected)
    return prompt, chosen, rejected


def label_of(row: Mapping[str, Any]) -> bool:
    """The row's verdict. Raises RowError."""
    for column in LABELS:
        if column in row:
            verdict = verdict_of(row[column])
            if verdict is not None:
                return verdict
            raise RowError(f"{column} is neither true nor false")
    raise RowError("no label")
