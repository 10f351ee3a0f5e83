"""Rows that are conversations: messages, ShareGPT, Alpaca, prompt and answer, self-instruct."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lehr.data.messages import (
    RowError,
    messages_of,
    require_answers,
    tools_of,
    turns_of,
)
from lehr.data.shapes import Message
from lehr.data.transcripts import transcript_turns

Columns = Mapping[str, Any]

# (question, answer) column names, in the order in which they are looked for.
PROMPT_AND_ANSWER = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("instruction", "response"),
    ("prompt", "answer"),
    ("prompt", "output"),
    ("question", "response"),
    ("question", "output"),
    ("query", "answer"),
    ("input", "output"),
)
CONVERSATIONS = ("messages", "conversations", "conversation", "dialogue")
_SYSTEM_COLUMNS = ("system", "system_prompt")
_CONTEXT_COLUMNS = ("input", "context")


def with_system(row: Columns, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """`messages`, behind the row's own system column where they have no system message."""
    if any(message["role"] in ("system", "developer") for message in messages):
        return messages
    for column in _SYSTEM_COLUMNS:
        text = row.get(column)
        if text is None or text == "":
            continue
        if not isinstance(text, str):
            raise RowError(f"{column} is not text")
        return ({"role": "system", "content": text}, *messages)
    return messages


def tools_of_row(row: Columns) -> tuple[Mapping[str, Any], ...]:
    """The tools that the row offers to the model."""
    return tools_of(row.get("tools", row.get("functions")))


def conversation(row: Columns, column: str) -> tuple[Message, ...]:
    """The messages of a conversation column, with the row's system text."""
    return with_system(row, messages_of(row[column], column))


def question_turns(row: Columns, column: str) -> tuple[Message, ...]:
    """What comes before the answer: a text, messages, or a Human/Assistant transcript."""
    value = row[column]
    if column == "instruction":
        return _instruction_turns(row)
    turns = transcript_turns(value) if isinstance(value, str) else None
    if turns is not None and turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns = turns[:-1]  # "Assistant:" at the end only invites the answer
    if not turns:
        turns = turns_of(value, "user", column)
    return with_system(row, turns)


def _instruction_turns(row: Columns) -> tuple[Message, ...]:
    """Alpaca: system, history, then the instruction with its input below it."""
    text = row["instruction"]
    if not isinstance(text, str):
        raise RowError("instruction is not text")
    for column in _CONTEXT_COLUMNS:
        context = row.get(column)
        if context is not None and not isinstance(context, str):
            raise RowError(f"{column} is not text")
        if context and context.strip():
            text = f"{text}\n\n{context}" if text.strip() else context
            break
    return with_system(row, (*_history(row.get("history")), {"role": "user", "content": text}))


def _history(value: Any) -> tuple[Message, ...]:
    if value is None or value == "":
        return ()
    if not isinstance(value, list | tuple):
        raise RowError("history is not a list")
    turns: list[Message] = []
    for pair in value:
        texts = pair if isinstance(pair, list | tuple) else ()
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise RowError("history is not a list of (user, assistant) texts")
        turns.append({"role": "user", "content": texts[0]})
        turns.append({"role": "assistant", "content": texts[1]})
    return tuple(turns)


def answered(question: tuple[Message, ...], answer: tuple[Message, ...]) -> tuple[Message, ...]:
    """One conversation in which only the answer is to be learned.

    Answers inside a given prompt are context: a prompt and its completion say what is what.
    """
    if answer[0]["role"] != "assistant":
        raise RowError("the answer is not an assistant turn")
    require_answers(answer)
    context = tuple(
        {**message, "train": False} if message["role"] == "assistant" else message
        for message in question
    )
    return (*context, *answer)


def alpaca(row: Columns, answer_column: str = "output") -> tuple[Message, ...]:
    """Alpaca: instruction, input, output, system, history; the history is learned as well."""
    answer = turns_of(row[answer_column], "assistant", answer_column)
    messages = (*_instruction_turns(row), *answer)
    require_answers(messages)
    return messages


def instances(row: Columns) -> list[tuple[Message, ...]]:
    """Self-instruct: one instruction with a list of (input, output)."""
    if not isinstance(row["instances"], list) or not row["instances"]:
        raise RowError("instances is not a list")
    chats: list[tuple[Message, ...]] = []
    for instance in row["instances"]:
        if not isinstance(instance, Mapping) or "output" not in instance:
            raise RowError("an instance without an output")
        chats.append(alpaca({**instance, "instruction": row["instruction"]}))
    return chats
