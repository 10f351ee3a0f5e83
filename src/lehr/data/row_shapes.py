"""The table of shapes: which columns show a shape, and what builds Examples from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lehr.data import chat_shapes, pair_shapes
from lehr.data.chat_shapes import CONVERSATIONS, PROMPT_AND_ANSWER, Columns, tools_of_row
from lehr.data.messages import RowError, require_answers, turns_of
from lehr.data.shapes import Example, ExampleKind, Message, Origin

Names = tuple[str, ...]
Build = Callable[[Columns, Names, Origin], list[Example]]


@dataclass(frozen=True)
class Shape:
    """A shape of row.

    name     what is reported
    kind     of the Examples it gives
    columns  alternatives: the row shows the shape where it has all names of one of them
    build    Examples of a row (more than one only for self-instruct). Raises RowError
    """

    name: str
    kind: ExampleKind
    columns: tuple[Names, ...]
    build: Build


def _chat(origin: Origin, row: Columns, messages: tuple[Message, ...]) -> list[Example]:
    require_answers(messages)
    return [Example("chat", origin, messages=messages, tools=tools_of_row(row))]


def _text(row: Columns, names: Names, origin: Origin) -> list[Example]:
    text = row[names[0]]
    if not isinstance(text, str):
        raise RowError(f"{names[0]} is not text")
    if not text.strip():
        raise RowError("empty text")
    return [Example("text", origin, text=text)]


def _messages(row: Columns, names: Names, origin: Origin) -> list[Example]:
    return _chat(origin, row, chat_shapes.conversation(row, names[0]))


def _alpaca(row: Columns, names: Names, origin: Origin) -> list[Example]:
    return _chat(origin, row, chat_shapes.alpaca(row, names[1]))


def _instances(row: Columns, names: Names, origin: Origin) -> list[Example]:
    chats = chat_shapes.instances(row)
    return [example for messages in chats for example in _chat(origin, row, messages)]


def _completion(row: Columns, names: Names, origin: Origin) -> list[Example]:
    question = chat_shapes.question_turns(row, names[0])
    answer = turns_of(row[names[1]], "assistant", names[1])
    return _chat(origin, row, chat_shapes.answered(question, answer))


def _pair(row: Columns, names: Names, origin: Origin) -> list[Example]:
    prompt_column = names[0] if len(names) == 3 else None
    prompt, chosen, rejected = pair_shapes.pair(row, prompt_column, names[-2], names[-1])
    return [_pair_example(origin, row, prompt, chosen, rejected)]


def _rejected_answer(row: Columns, names: Names, origin: Origin) -> list[Example]:
    prompt, chosen, rejected = pair_shapes.with_rejected_answer(row, names[0], names[1])
    return [_pair_example(origin, row, prompt, chosen, rejected)]


def _pair_example(
    origin: Origin,
    row: Columns,
    prompt: tuple[Message, ...],
    chosen: tuple[Message, ...],
    rejected: tuple[Message, ...],
) -> Example:
    return Example(
        "pair",
        origin,
        messages=prompt,
        chosen=chosen,
        rejected=rejected,
        tools=tools_of_row(row),
    )


def _labelled_messages(row: Columns, names: Names, origin: Origin) -> list[Example]:
    prompt, answer = pair_shapes.split_last_answer(chat_shapes.conversation(row, names[0]))
    return [_labelled(origin, row, prompt, answer)]


def _labelled_completion(row: Columns, names: Names, origin: Origin) -> list[Example]:
    prompt = pair_shapes.prompt_turns(row, names[0])
    answer = turns_of(row[names[1]], "assistant", names[1])
    require_answers(answer)
    return [_labelled(origin, row, prompt, answer)]


def _labelled(
    origin: Origin, row: Columns, prompt: tuple[Message, ...], answer: tuple[Message, ...]
) -> Example:
    return Example(
        "labelled",
        origin,
        messages=prompt,
        chosen=answer,
        label=pair_shapes.label_of(row),
        tools=tools_of_row(row),
    )


_LABELS = pair_shapes.LABELS
_PAIR_PROMPTS = ("prompt", *CONVERSATIONS, "instruction", "question", "query", "input")
_SIDES = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
_ALPACA = ("instruction", "output")

PAIR = Shape(
    "prompt+chosen+rejected",
    "pair",
    tuple((prompt, *sides) for sides in _SIDES for prompt in _PAIR_PROMPTS),
    _pair,
)
PAIR_WITHOUT_PROMPT = Shape("chosen+rejected", "pair", _SIDES, _pair)
REJECTED_ANSWER = Shape(
    "messages+rejected_response",
    "pair",
    tuple((name, "rejected_response") for name in CONVERSATIONS),
    _rejected_answer,
)
LABELLED_MESSAGES = Shape(
    "messages+label",
    "labelled",
    tuple((name, label) for label in _LABELS for name in CONVERSATIONS),
    _labelled_messages,
)
LABELLED_COMPLETION = Shape(
    "prompt+completion+label",
    "labelled",
    tuple((*names, label) for label in _LABELS for names in (*PROMPT_AND_ANSWER, _ALPACA)),
    _labelled_completion,
)
MESSAGES = Shape("messages", "chat", (("messages",),), _messages)
SHAREGPT = Shape("sharegpt", "chat", tuple((name,) for name in CONVERSATIONS[1:]), _messages)
ALPACA = Shape("alpaca", "chat", (_ALPACA,), _alpaca)
INSTANCES = Shape("instruction+instances", "chat", (("instruction", "instances"),), _instances)
COMPLETIONS = tuple(
    Shape(f"{question}+{answer}", "chat", ((question, answer),), _completion)
    for question, answer in PROMPT_AND_ANSWER
)
TEXT = Shape("text", "text", (("text",), ("content",)), _text)

_PAIRS = (PAIR, PAIR_WITHOUT_PROMPT, REJECTED_ANSWER)
_LABELLED = (LABELLED_MESSAGES, LABELLED_COMPLETION)
_CHATS = (MESSAGES, SHAREGPT, ALPACA, INSTANCES, *COMPLETIONS)

# In the order in which they are looked for: a pair may also have an output, a chat also a text.
SHAPES = (*_PAIRS, *_LABELLED, *_CHATS, TEXT)

# What each `format` of a recipe's source allows.
FORMATS: dict[str, tuple[Shape, ...]] = {
    "auto": SHAPES,
    "text": (TEXT,),
    "chat": _CHATS,
    "pair": _PAIRS,
    "labelled": _LABELLED,
    "alpaca": (ALPACA, INSTANCES),
    "sharegpt": (
        Shape(PAIR.name, "pair", tuple(c for c in PAIR.columns if c[0] in CONVERSATIONS), _pair),
        LABELLED_MESSAGES,
        SHAREGPT,
        MESSAGES,
    ),
    "completion": (*COMPLETIONS, ALPACA, INSTANCES),
}
