"""Shapes: what each row means, whoever wrote it; bad rows are dropped with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.data.audit import findings
from lehr.data.formats import convert, to_examples
from lehr.data.row_shapes import FORMATS
from lehr.data.rows import Row
from lehr.data.shapes import Example
from lehr.errors import RecipeError

Json = Mapping[str, Any]


def convert_values(*values: Any, format: str = "auto") -> tuple[list[Example], list[str], str]:
    rows = [Row(value, line) for line, value in enumerate(values, start=1)]
    examples, dropped, shape = to_examples(rows, "s", "f.jsonl", format)
    assert len(examples) + len(dropped) >= len(values)
    return examples, [entry.reason for entry in dropped], shape


def one(value: Any, format: str = "auto") -> Example:
    examples, reasons, _ = convert_values(value, format=format)
    assert reasons == []
    assert len(examples) == 1
    return examples[0]


def reason(value: Any, format: str = "auto") -> str:
    examples, reasons, _ = convert_values(value, format=format)
    assert examples == []
    assert len(reasons) == 1
    return reasons[0]


def said(messages: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Json:
    return {"role": "assistant", "content": content, **more}


QA = [("user", "q"), ("assistant", "a")]

CHATS: list[tuple[str, Json]] = [
    ("messages", {"messages": [user("q"), assistant("a")]}),
    ("messages", {"messages": json.dumps([user("q"), assistant("a")])}),
    ("messages", {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ),
    ("sharegpt", {"conversations": [user("q"), assistant("a")], "id": 7}),
    ("alpaca", {"instruction": "q", "input": "", "output": "a"}),
    ("alpaca", {"instruction": "q", "input": None, "output": "a", "extra": [1, {"b": None}]}),
    ("instruction+instances", {"instruction": "q", "instances": [{"input": "", "output": "a"}]}),
    ("prompt+completion", {"prompt": "q", "completion": "a"}),
    ("prompt+completion", {"prompt": [user("q")], "completion": [assistant("a")]}),
    ("prompt+completion", {"prompt": [user("q")], "completion": "a"}),
    ("prompt+completion", {"prompt": "\n\nHuman: q\n\nAssistant:", "completion": "a"}),
    ("prompt+response", {"prompt": "q", "response": "a"}),
    ("question+answer", {"question": "q", "answer": "a"}),
    ("query+response", {"query": "q", "response": "a"}),
    ("instruction+response", {"instruction": "q", "context": "", "response": "a"}),
    ("input+output", {"input": "q", "output": "a"}),
]


@pytest.mark.parametrize(("shape", "row"), CHATS)
def test_chats_in_every_spelling(shape: str, row: Json) -> None:
    examples, reasons, found = convert_values(row)
    assert reasons == []
    assert found == shape
    assert examples[0].kind == "chat"
    assert said(examples[0].messages) == QA


@pytest.mark.parametrize(
    "row", [{"text": "t"}, {"content": "t"}, "t", {"text": "t", "label": 3, "content": None}]
)
def test_text(row: Any) -> None:
    example = one(row)
    assert (example.kind, example.text) == ("text", "t")


PAIRS: list[Json] = [
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
    {"prompt": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
    {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
    {"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
    {
        "chosen": "\n\nHuman: q\n\nAssistant: a",
        "rejected": "\n\nHuman: q\n\nAssistant: b",
    },
    {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " a".strip(), "rejected": "b"},
    {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
    {"instruction": "q", "input": "", "output": "x", "chosen": "a", "rejected": "b"},
    {"question": "q", "chosen": "a", "rejected": "b"},
    {"messages": [user("q"), assistant("a")], "rejected_response": "b"},
]


@pytest.mark.parametrize("format", ["auto", "pair"])
@pytest.mark.parametrize("row", PAIRS)
def test_pairs_in_every_spelling(row: Json, format: str) -> None:
    example = one(row, format)
    assert example.kind == "pair"
    assert said(example.messages) == [("user", "q")]
    assert said(example.chosen) == [("assistant", "a")]
    assert said(example.rejected) == [("assistant", "b")]


def test_implicit_prompt_is_the_longest_shared_beginning_before_an_answer() -> None:
    shared = [user("q"), assistant("x"), user("r")]
    example = one(
        {
            "chosen": [*shared, assistant("a")],
            "rejected": [*shared, assistant("b"), user("s"), assistant("c")],
        }
    )
    assert said(example.messages) == said(shared)
    assert said(example.rejected) == [("assistant", "b"), ("user", "s"), ("assistant", "c")]
    # Where one side is the beginning of the other, both still keep an answer.
    example = one({"chosen": [*shared, assistant("a")], "rejected": shared[:2]})
    assert said(example.messages) == [("user", "q")]
    assert said(example.rejected) == [("assistant", "x")]
    # Identical sides are kept: the audit counts them.
    example = one({"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("a")]})
    assert said(example.chosen) == said(example.rejected) == [("assistant", "a")]
    assert reason(
        {"chosen": [user("p"), assistant("a")], "rejected": [user("q"), assistant("a")]}
    ) == ("chosen and rejected do not share a prompt")
    assert reason({"chosen": "a", "rejected": "b"}) == "a pair without a prompt"


LABELLED: list[Json] = [
    {"prompt": "q", "completion": "a", "label": True},
    {"prompt": "q", "response": "a", "label": "True"},
    {"instruction": "q", "output": "a", "kto_tag": 1},
    {"messages": [user("q"), assistant("a")], "label": True},
    {"conversations": [user("q"), assistant("a")], "kto_tag": True},
]


@pytest.mark.parametrize("row", LABELLED)
def test_labelled(row: Json) -> None:
    example = one(row)
    assert example.kind == "labelled"
    assert example.label is True
    assert said(example.messages) == [("user", "q")]
    assert said(example.chosen) == [("assistant", "a")]


def test_a_label_that_names_a_class_is_no_verdict() -> None:
    rows = [{"prompt": "q", "completion": "a", "label": label} for label in (0, 1, 2)]
    examples, _, shape = convert_values(*rows)
    assert {example.kind for example in examples} == {"chat"}
    assert shape == "prompt+completion"
    rows = [{"prompt": "q", "completion": "a", "label": label} for label in (0, 1, None)]
    examples, _, shape = convert_values(*rows)
    assert [example.kind for example in examples] == ["labelled", "labelled", "chat"]
    assert shape == "prompt+completion+label"


def test_alpaca_with_chosen_and_rejected_follows_the_format() -> None:
    row = {"instruction": "q", "input": "i", "output": "o", "chosen": "a", "rejected": "b"}
    assert one(row).kind == one(row, "pair").kind == "pair"
    assert said(one(row).messages) == [("user", "q\n\ni")]
    assert said(one(row, "alpaca").messages) == [("user", "q\n\ni"), ("assistant", "o")]
    assert said(one(row, "chat").messages) == [("user", "q\n\ni"), ("assistant", "o")]


def test_system_history_and_context() -> None:
    row = {
        "system": "s",
        "history": [["h1", "h2"]],
        "instruction": "q",
        "input": "i",
        "output": "a",
    }
    assert said(one(row).messages) == [
        ("system", "s"),
        ("user", "h1"),
        ("assistant", "h2"),
        ("user", "q\n\ni"),
        ("assistant", "a"),
    ]
    assert said(one({"system_prompt": "s", "prompt": "q", "completion": "a"}).messages) == [
        ("system", "s"),
        *QA,
    ]
    own = {
        "system": "s",
        "messages": [{"role": "system", "content": "own"}, user("q"), assistant("a")],
    }
    assert said(one(own).messages) == [("system", "own"), *QA]


def test_answers_in_a_prompt_are_context() -> None:
    row = {"prompt": [user("q"), assistant("x"), user("r")], "completion": [assistant("a")]}
    assert [m.get("train", True) for m in one(row).messages] == [True, False, True, True]
    flagged = {
        "messages": [user("q"), assistant("x", weight=0), user("r"), assistant("a", weight=1)]
    }
    assert [m.get("train", True) for m in one(flagged).messages] == [True, False, True, True]
    flagged = {"messages": [user("q"), assistant("", train=False), user("r"), assistant("a")]}
    assert [m.get("train", True) for m in one(flagged).messages] == [True, False, True, True]
    assert reason({"messages": [user("q"), assistant("a", weight=0.5)]}) == (
        "weight of a message is neither 0 nor 1"
    )


def test_tools_and_calls_have_one_form() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    spellings: list[Json] = [
        assistant(None, tool_calls=[{"id": "c", **call}]),
        assistant("", tool_calls=[{"name": "add", "arguments": '{"x": 1}'}]),
        assistant(None, tool_calls=json.dumps([call])),
        assistant(None, function_call={"name": "add", "arguments": '{"x": 1}'}),
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
        assistant([{"type": "tool_call", "value": '{"name": "add", "arguments": {"x": 1}}'}]),
        assistant([{"type": "tool_use", "id": "c", "name": "add", "input": {"x": 1}}]),
    ]
    for spelled in spellings:
        row = {
            "messages": [
                user("q"),
                spelled,
                {"role": "observation", "content": "2"},
                assistant("a"),
            ],
            "tools": json.dumps([{"name": "add", "parameters": {}}]),
        }
        example = one(row)
        assert [m["role"] for m in example.messages] == ["user", "assistant", "tool", "assistant"]
        assert example.messages[1]["tool_calls"][0]["function"] == call["function"]
        assert example.messages[1]["content"] == ""
        assert example.tools == (
            {"type": "function", "function": {"name": "add", "parameters": {}}},
        )
    assert one({"messages": [user("q"), assistant(None, tool_calls=[{"name": "f"}])]}).messages[1][
        "tool_calls"
    ][0]["function"] == {"name": "f", "arguments": {}}
    bad = {"messages": [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": "{x"}])]}
    assert reason(bad) == "tool call arguments is text that is not JSON"


def test_content_parts_and_reasoning() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}, "c"]
    assert one({"messages": [user(parts), assistant("a")]}).messages[0]["content"] == "abc"
    thinking = [{"type": "reasoning", "value": "r"}, {"type": "text", "value": "a"}]
    message = one({"messages": [user("q"), assistant(thinking)]}).messages[1]
    assert (message["reasoning_content"], message["content"]) == ("r", "a")
    message = one({"messages": [user("q"), assistant("a", reasoning_content="r")]}).messages[1]
    assert message["reasoning_content"] == "r"
    image = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}]
    assert reason({"messages": [user(image), assistant("a")]}) == (
        "content holds an image: only text is read"
    )
    assert "images" in reason({"messages": [user("q"), assistant("a")], "images": ["x.png"]})


REASONS: list[tuple[str, Any]] = [
    ("content is null", {"messages": [user(None), assistant("a")]}),
    ("content is null", {"messages": [user("q"), assistant(None)]}),
    ("content is not text", {"messages": [user(3), assistant("a")]}),
    ("empty answer", {"messages": [user("q"), assistant(" \n")]}),
    ("empty answer", {"prompt": "q", "completion": ""}),
    ("empty answer", {"instruction": "q", "output": ""}),
    ("empty answer", {"prompt": "q", "chosen": "a", "rejected": ""}),
    ("empty answer", {"prompt": "q", "completion": "", "label": False}),
    ("no assistant message", {"messages": [user("q")]}),
    ("unknown role", {"messages": [user("q"), {"role": "critic", "content": "a"}]}),
    ("a message without a role", {"messages": [{"content": "a"}]}),
    ("a message is not an object", {"messages": ["q", "a"]}),
    ("messages is empty", {"messages": []}),
    ("messages is not a list", {"messages": 3}),
    ("messages is text that is not JSON", {"messages": "[{'role': 'user'}]"}),
    ("messages is null", {"messages": None}),
    ("text is null", {"text": None}),
    ("text is not text", {"text": ["a"]}),
    ("empty text", {"text": " "}),
    ("empty text", " "),
    ("completion is null", {"prompt": "q", "completion": None}),
    ("completion is not text", {"prompt": "q", "completion": 42}),
    ("prompt is not text", {"prompt": 42, "completion": "a"}),
    ("instruction is not text", {"instruction": 42, "output": "a"}),
    ("a prompt without an answer", {"prompt": "q"}),
    ("rejected is null", {"prompt": "q", "chosen": "a", "rejected": None}),
    ("a pair with one side missing", {"prompt": "q", "chosen": "a"}),
    ("rejected is not text", {"prompt": "q", "chosen": "a", "rejected": 3}),
    (
        "history is not a list of (user, assistant) texts",
        {"instruction": "q", "output": "a", "history": ["x"]},
    ),
    ("an empty object", {}),
    ("no known shape", {"a": 1, "b": None}),
    (
        "the conversation does not end with an assistant turn",
        {"messages": [user("q")], "label": True},
    ),
    ("half of a surrogate pair: text that no tokenizer can take", {"text": "a\ud83d"}),
    (
        "half of a surrogate pair: text that no tokenizer can take",
        {"messages": [user("\udc00"), assistant("a")]},
    ),
    ("undecodable line", None),
]


@pytest.mark.parametrize(("expected", "row"), REASONS)
def test_bad_rows_have_a_fixed_reason(expected: str, row: Any) -> None:
    good = {"text": "t"}
    rows = [Row(good, 1), Row(row, 2, None if row is not None else "undecodable line")]
    examples, dropped, _ = to_examples(rows, "s", "f.jsonl")
    assert len(examples) == 1
    assert [entry.reason for entry in dropped] == [expected]
    assert str(dropped[0].origin) == "f.jsonl:2"


def test_two_user_turns_in_a_row_are_left_to_the_template() -> None:
    assert len(one({"messages": [user("q"), user("r"), assistant("a")]}).messages) == 3


def test_mixed_shapes_in_one_file_each_by_its_own() -> None:
    rows = [row for _, row in CHATS] + PAIRS + LABELLED + [{"text": "t"}, "t"]
    examples, reasons, _ = convert_values(*rows)
    assert reasons == []
    assert len(examples) == len(rows)
    kinds = [example.kind for example in examples]
    assert (
        kinds
        == ["chat"] * len(CHATS)
        + ["pair"] * len(PAIRS)
        + ["labelled"] * len(LABELLED)
        + ["text"] * 2
    )


def test_the_shape_of_most_rows_decides_where_a_row_fits_several() -> None:
    # As a table with the columns of several shapes has it: absent columns are null or empty.
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "instruction": "q", "output": "o"}
    half = {**pair, "rejected": ""}
    examples, reasons, shape = convert_values(pair, pair, half)
    assert (len(examples), reasons, shape) == (2, ["empty answer"], "prompt+chosen+rejected")
    chat = {"messages": [user("q"), assistant("a")], "text": "rendered"}
    text = {"messages": [], "text": "plain"}
    examples, reasons, shape = convert_values(chat, chat, text)
    assert (shape, reasons) == ("messages", [])
    assert [example.kind for example in examples] == ["chat", "chat", "text"]
    examples, reasons, shape = convert_values(chat, text, text)
    assert [example.kind for example in examples] == ["text"] * 3


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("pair", {"prompt": "q", "completion": "a"}),
        ("text", {"messages": [user("q"), assistant("a")]}),
        ("chat", {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ("alpaca", {"prompt": "q", "completion": "a"}),
        ("sharegpt", {"prompt": "q", "completion": "a"}),
        ("completion", {"text": "t"}),
        ("labelled", {"prompt": "q", "completion": "a"}),
    ],
)
def test_a_format_that_is_asked_for_is_kept_to(format: str, row: Json) -> None:
    assert reason(row, format).startswith("another format than asked for")


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="sharegpt"):
        to_examples([], "s", "f", "chatml")


def test_self_instruct_instances_are_counted_as_rows() -> None:
    row = {
        "instruction": "q",
        "instances": [{"input": "", "output": "a"}, {"input": "i", "output": "b"}],
    }
    conversion = convert([Row(row, 1)], "s", "f")
    assert [said(e.messages)[-1][1] for e in conversion.examples] == ["a", "b"]
    assert any("several instances" in note for note in conversion.notes)


KEYS = [
    "messages", "conversations", "prompt", "completion", "chosen", "rejected", "label", "text",
    "instruction", "output", "input", "history", "system", "tools", "instances", "role", "from",
    "content", "value", "tool_calls", "function", "name", "arguments", "type", "train", "weight",
    "images", "function_call", "kto_tag", "reasoning_content",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2),
    st.floats(),
    st.sampled_from(
        ["", "user", "assistant", "tool", "[{", "\n\nHuman: a\n\nAssistant: b", "\ud800"]
    ),
    st.binary(max_size=2),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=25,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=6), ANYTHING),
        max_size=4,
    ),
    st.sampled_from(sorted(FORMATS)),
)
def test_no_row_can_crash_a_reader(values: list[Any], format: str) -> None:
    rows = [Row(value if isinstance(value, dict | str) else None, 1) for value in values]
    examples, dropped, _ = to_examples(rows, "s", "f", format)
    assert len(examples) + len(dropped) >= len(values)
    for example in examples:
        assert len(example.content_key()) == 64
        turns = [*example.messages, *example.chosen, *example.rejected]
        assert all(isinstance(turn["content"], str) for turn in turns)
        assert all(isinstance(turn["role"], str) for turn in turns)
    findings({"s": examples})


def test_reasons_never_quote_the_row() -> None:
    secret = "TOPSECRET"
    rows = [
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": secret},
        {"messages": [user([{"type": secret, secret: secret}]), assistant("a")]},
        {"messages": [user("q"), assistant("", tool_calls=secret)]},
        {secret: secret},
    ]
    _, reasons, _ = convert_values(*rows)
    assert len(reasons) == len(rows)
    assert not any(secret in text for text in reasons)
