"""Encoder: which tokens are trained, and where control tokens may come from."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fixtures_templates import FAMILIES, tokenizer_of
from tests.fixtures_tokens import ASST, BOS, END, END_THINK, EOS, SYS, THINK, USER, tok, tok_m

from lehr.data.encoded_rows import (
    DROPPED_BRANCH,
    DROPPED_EMPTY,
    DROPPED_NO_ANSWER,
    DROPPED_TOO_LONG,
    DROPPED_UNICODE,
    DROPPED_UNSUPERVISED,
    NOTE_EQUAL_BRANCHES,
    Encoding,
)
from lehr.data.encoding import Encoder
from lehr.data.losses import (
    NOTE_REASONING_LOST,
    NOTE_SYSTEM_LOST,
    NOTE_TOOL_CALLS_LOST,
    NOTE_TOOLS_LOST,
)
from lehr.data.preview import every_end_token
from lehr.data.shapes import Encoded, Example, Message, Origin
from lehr.data.templates import CHATML, Template, TemplateRaised
from lehr.data.turns import (
    NOTE_EMPTY,
    NOTE_EOS_ADDED,
    NOTE_HISTORY_SPLIT,
    NOTE_JOINED,
    NOTE_NO_PROMPT,
    NOTE_PROMPT_SPLIT,
    NOTE_STOP_SPLIT,
    NOTE_THINK_CLOSED,
)
from lehr.errors import RecipeError

ORIGIN = Origin("chats", "chats.jsonl", 7)
DATE = "2026-01-31"


def encoder(tokenizer: Any = None, **options: Any) -> Encoder:
    tokenizer = tokenizer or tok()
    return Encoder(tokenizer, Template.from_tokenizer(tokenizer), DATE, **options)


@lru_cache
def family(name: str, merges: bool = False) -> Encoder:
    return encoder(tokenizer_of(name, merges=merges))


def chat(*contents: str | dict[str, Any], system: str | None = None) -> Example:
    """user, assistant, user, ... ; a dict stands for a whole message."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for index, content in enumerate(contents):
        role = "user" if index % 2 == 0 else "assistant"
        messages.append(
            content if isinstance(content, dict) else {"role": role, "content": content}
        )
    return Example("chat", ORIGIN, messages=tuple(messages))


def pair(prompt: str, chosen: str, rejected: str) -> Example:
    return Example(
        "pair",
        ORIGIN,
        messages=({"role": "user", "content": prompt},),
        chosen=({"role": "assistant", "content": chosen},),
        rejected=({"role": "assistant", "content": rejected},),
    )


def one(encoding: Encoding) -> Encoded:
    assert not encoding.dropped
    assert len(encoding.encoded) == 1
    return encoding.encoded[0]


def trained_text(encoded: Encoded, tokenizer: Any) -> list[str]:
    """Each stretch of supervised tokens, decoded."""
    stretches: list[list[int]] = [[]]
    for number, supervised in zip(encoded.ids.tolist(), encoded.supervised.tolist(), strict=True):
        if supervised:
            stretches[-1].append(number)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in stretches if ids]


def test_two_turns_in_closed_form() -> None:
    encoded = one(encoder().encode(chat("ab", "cd", "e", "f", system="s")))
    assert encoded.ids.tolist() == [
        BOS, SYS, 115, END, USER, 97, 98, END, ASST, 99, 100, END, USER, 101, END, ASST, 102, END,
    ]  # fmt: skip
    assert encoded.supervised.nonzero().flatten().tolist() == [9, 10, 11, 16, 17]
    assert encoded.supervised_bytes == 3
    assert encoded.ids.dtype == torch.int64 and encoded.supervised.dtype == torch.bool


def test_train_on() -> None:
    e, tokenizer = encoder(), tok()
    example = chat("a", "b", "c", {"role": "assistant", "content": "d", "train": False})
    assert trained_text(one(e.encode(example)), tokenizer) == ["b<end>"]
    assert e.encode(example, "last").dropped[0].reason == DROPPED_NO_ANSWER
    example = chat("a", "b", "c", "d")
    for train_on in ("last", "completion"):
        assert trained_text(one(e.encode(example, train_on)), tokenizer) == ["d<end>"]  # type: ignore[arg-type]
    assert e.encode(chat("a")).dropped[0].reason == DROPPED_NO_ANSWER


def test_what_follows_the_last_trained_answer_is_left_out() -> None:
    encoded = one(encoder().encode(chat("a", "b", "c")))
    assert encoded.ids.tolist() == [BOS, USER, 97, END, ASST, 98, END]


TRAINED = {
    "tpl": ["yo\nyo<end>", " no 🧊<end>"],
    "chatml": ["yo\nyo<|im_end|>", " no 🧊<|im_end|>"],
    "llama2": [" yo\nyo <eos>", " no 🧊 <eos>"],
    "llama3": ["yo\nyo<|eot|>", "no 🧊<|eot|>"],
    "gemma": ["yo\nyo<end_of_turn>", "no 🧊<end_of_turn>"],
    "mistral": [" yo\nyo<eos>", "  no 🧊<eos>"],
    "reasoning": ["yo\nyo<|im_end|>", " no 🧊<|im_end|>"],
    "thinking_prompt": ["</think>\n\nyo\nyo<eos>", "</think>\n\n no 🧊<eos>"],
    "history": ["yo\nyo<|stop|>", " no 🧊<|stop|>"],
    "glm": ["yo\nyo<eos>", " no 🧊<eos>"],
    "channels": ["<|message|>yo\nyo<|return|>", "<|message|> no 🧊<|return|>"],
    "plain_words": ["yo\nyo<eos>", " no 🧊<eos>"],
    "marked": ["yo\nyo<|im_end|>", " no 🧊<|im_end|>"],
}
SPLIT_NOTES = {
    "thinking_prompt": [NOTE_PROMPT_SPLIT, NOTE_JOINED, NOTE_THINK_CLOSED],
    "history": [
        NOTE_HISTORY_SPLIT,
        "the template changes white space inside content of a assistant turn",
    ],
    "glm": [NOTE_STOP_SPLIT, NOTE_EOS_ADDED],
    "channels": [NOTE_STOP_SPLIT],
}


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_each_family_trains_exactly_what_the_model_must_emit(name: str) -> None:
    e = family(name)
    tokenizer = e.tokenizer
    result = e.encode(chat("hi", "yo\nyo", "and?", " no 🧊"))
    assert not result.dropped
    found = [text for encoded in result.encoded for text in trained_text(encoded, tokenizer)]
    assert found == TRAINED[name]
    assert every_end_token(result.encoded, e.stop_ids)
    assert result.notes == [f"{note} (chats.jsonl:7)" for note in SPLIT_NOTES.get(name, [])]
    assert len(result.encoded) == (2 if name in SPLIT_NOTES else 1)
    assert result.kept_tokens == sum(encoded.tokens for encoded in result.encoded)
    for encoded in result.encoded:
        first = int(encoded.supervised.nonzero()[0])
        assert encoded.ids.tolist()[:first] == e.prompt_ids(
            [{"role": "user", "content": "hi"}]
        ) or (encoded is not result.encoded[0])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ids_without_control_text_are_those_of_transformers(name: str) -> None:
    messages = [{"role": "user", "content": "hi a\nb"}]
    theirs = family(name).tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
        "input_ids"
    ]
    if name != "llama3":  # its date is frozen
        assert family(name).prompt_ids(messages) == theirs


CONTROL_TEXT = st.sampled_from(
    [
        "<bos>",
        "<eos>",
        "<end>",
        "<user>",
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|im_start|>",
        "<end_of_turn>",
        "<|eot|>",
        "<|",
        "|>",
        "=.",
        ":",
        "<e",
        "nd>",
    ]
)
CONTENT = st.lists(
    CONTROL_TEXT | st.sampled_from(" \n") | st.text(max_size=5), min_size=1, max_size=5
).map("".join)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(contents=st.lists(CONTENT, min_size=4, max_size=4), merges=st.booleans())
def test_user_text_is_never_a_control_token_and_prompts_are_prefixes(
    name: str, merges: bool, contents: list[str]
) -> None:
    e = family(name, merges)
    example = chat(*contents)
    shortest = e.prompt_ids(example.messages[:1])
    control = e.text.control_ids
    harmless = e.prompt_ids([{"role": "user", "content": "x"}])
    assert [i for i in shortest if i in control] == [i for i in harmless if i in control]
    result = e.encode(example, max_length=100_000)
    prompts = [e.prompt_ids(example.messages[:length]) for length in (1, 3)]
    if len(result.encoded) == 1 and name != "thinking_prompt":  # which fits no two turns
        answered = [bool(contents[1].strip()), bool(contents[3].strip())]
        for prompt in prompts[: 2 if answered[1] else 1]:
            assert result.encoded[0].ids.tolist()[: len(prompt)] == prompt
    elif len(result.encoded) == 2:  # one example per turn
        for encoded, prompt in zip(result.encoded, prompts, strict=False):
            first = int(encoded.supervised.nonzero()[0])
            assert encoded.ids.tolist()[:first] == prompt
    for encoded in result.encoded:
        assert not encoded.supervised[0]
    assert not result.encoded or every_end_token(result.encoded, e.stop_ids)


def test_a_merge_across_the_boundary_is_cut() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}="
        "{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    )
    tokenizer = tok_m(template=template)
    assert tokenizer("1=.5").input_ids == [49, 300, 53]  # whole: the boundary is gone
    e = encoder(tokenizer)
    encoded = one(e.encode(chat("1", ".5", "2", ".6")))
    assert e.prompt_ids(chat("1").messages) == [49, 61]
    assert encoded.ids.tolist() == [49, 61, 46, 53, END, 50, 61, 46, 54, END]
    assert trained_text(encoded, tokenizer) == [".5<end>", ".6<end>"]
    # An answer in the history is cut at the same place, trained or not.
    assert e.prompt_ids(chat("1", ".5", "2").messages) == encoded.ids.tolist()[:7]
    assert one(e.encode(chat("1", ".5", "2", ".6"), "last")).ids.tolist() == encoded.ids.tolist()


def test_markers_of_an_answer_are_control_tokens_only_in_answers() -> None:
    e = encoder()
    text = "<think>x</think>y<end>"
    encoded = one(e.encode(chat(text, text)))
    user = list(text.encode())
    answer = [THINK, 120, END_THINK, 121, *b"<end>"]
    assert encoded.ids.tolist() == [BOS, USER, *user, END, ASST, *answer, END]
    assert e.text.markers == ("<think>", "</think>")
    assert e.decode([*answer, END]) == text
    assert encoded.supervised_bytes == len("xy<end>")


def test_losses_are_reported_with_the_row() -> None:
    row = " (chats.jsonl:7)"
    lost = encoder(tokenizer_of("llama2")).encode(chat("a", "b", system="be kind"))
    assert lost.notes == [NOTE_SYSTEM_LOST + row] and lost.encoded
    e = encoder(tokenizer_of("reasoning"))
    thought = "<think>\nhm\n</think>\n\nb"
    split = e.encode(chat("a", thought, "c", thought))
    assert split.notes == [NOTE_HISTORY_SPLIT + row, NOTE_REASONING_LOST + row]
    texts = [trained_text(encoded, e.tokenizer) for encoded in split.encoded]
    assert texts == [[thought + "<|im_end|>"], [thought + "<|im_end|>"]]
    reasoned = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    assert encoder(tokenizer_of("chatml")).encode(chat("a", reasoned)).notes == [
        NOTE_REASONING_LOST + row
    ]
    short = tok(template="{% for m in messages %}{{ m.content[:3] }}<end>{% endfor %}")
    changed = "the template drops or changes content of a user turn" + row
    assert changed in encoder(short).encode(chat("abcdef", "b")).notes


def test_tools() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1, "b": "<|im_end|>"}'}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "3"}
    tools = ({"type": "function", "function": {"name": "add"}},)
    messages = (*chat("a").messages, asks, result, {"role": "assistant", "content": "3."})
    example = Example("chat", ORIGIN, messages=messages, tools=tools)
    e = encoder(tokenizer_of("reasoning"))
    result_of = e.encode(example)
    first, last = trained_text(one(result_of), e.tokenizer)
    wanted = (
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<|im_end|>"}}\n</tool_call>'
    )
    assert first == wanted + "<|im_end|>"
    assert last == "3.<|im_end|>"
    assert not result_of.notes
    end = e.text.controls["<|im_end|>"]
    assert result_of.encoded[0].ids.tolist().count(end) == 5  # tools, user, call, result, answer
    without = encoder(tokenizer_of("chatml")).encode(example)
    row = " (chats.jsonl:7)"
    assert {NOTE_TOOL_CALLS_LOST + row, NOTE_TOOLS_LOST + row} <= set(without.notes)


def test_system_policy() -> None:
    example = chat("a", "b", system="s")
    tokenizer = tokenizer_of("gemma")
    dropped = encoder(tokenizer).encode(example).dropped
    assert [d.reason for d in dropped] == [
        "the template raises: System role not supported (remedy: system: merge)"
    ]
    merged = encoder(tokenizer, system="merge")
    text = tokenizer.decode(one(merged.encode(example)).ids, skip_special_tokens=False)
    assert "user\ns\n\na<end_of_turn>" in text
    without = encoder(tokenizer, system="drop")
    assert one(without.encode(example)).ids.equal(one(merged.encode(chat("a", "b"))).ids)
    ids = one(merged.encode(example)).ids.tolist()
    prompt = merged.prompt_ids(example.messages[:2])
    assert ids[: len(prompt)] == prompt


def test_a_system_text_without_a_user_turn_becomes_one() -> None:
    e = encoder(tokenizer_of("gemma"), system="merge")
    system = ({"role": "system", "content": "s"},)
    answers = tuple({"role": "assistant", "content": text} for text in ("yes", "no"))
    row = Example("pair", ORIGIN, messages=system, chosen=answers[:1], rejected=answers[1:])
    encoded = one(e.encode(row))
    assert encoded.ids.tolist() == e.prompt_ids(system)
    assert encoded.ids.tolist() == e.prompt_ids([{"role": "user", "content": "s"}])
    assert [len(branch.ids) for branch in encoded.branches] == [4, 3]


def test_answers_without_text_or_question() -> None:
    e = encoder()
    assert e.encode(chat("a", "")).dropped[0].reason == DROPPED_EMPTY
    result = e.encode(chat("a", " ", "b", "c"))
    assert result.notes == [f"{NOTE_EMPTY} (chats.jsonl:7)"]
    assert trained_text(result.encoded[0], e.tokenizer) == ["c<end>"]
    greeting = {"role": "assistant", "content": "hello"}
    opened = Example("chat", ORIGIN, messages=(greeting, *chat("a", "b").messages))
    result = e.encode(opened)
    assert result.notes == [f"{NOTE_NO_PROMPT} (chats.jsonl:7)"]
    assert trained_text(result.encoded[0], e.tokenizer) == ["b<end>"]
    again = Example("chat", ORIGIN, messages=(*chat("a", "b").messages, greeting))
    assert trained_text(one(e.encode(again)), e.tokenizer) == ["b<end>", "hello<end>"]


def test_pairs() -> None:
    e = encoder()
    encoded = one(e.encode(pair("ab", "yes", "n")))
    prompt = [BOS, USER, 97, 98, END, ASST]
    assert encoded.ids.tolist() == prompt == e.prompt_ids(chat("ab").messages)
    assert not encoded.supervised.any()
    chosen, rejected = encoded.branches
    assert chosen.ids.tolist() == [*b"yes", END] and chosen.supervised.all()
    assert rejected.ids.tolist() == [*b"n", END] and rejected.supervised.all()
    assert chosen.supervised_bytes == 3 and encoded.tokens == 6 + 4 + 2
    same = e.encode(pair("a", "yes", "yes"))
    assert same.notes == [f"{NOTE_EQUAL_BRANCHES} (chats.jsonl:7)"]
    labelled = Example(
        "labelled",
        ORIGIN,
        messages=chat("a").messages,
        chosen=chat("a", "b").messages[1:],
        label=True,
    )
    assert len(one(e.encode(labelled)).branches) == 1
    wrong = Example("pair", ORIGIN, messages=chat("a").messages, chosen=chat("b").messages)
    assert e.encode(wrong).dropped[0].reason == DROPPED_BRANCH


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_pairs_of_every_family_share_the_serving_prompt(name: str) -> None:
    e = family(name)
    encoded = one(e.encode(pair("q", "yes", "no")))
    assert encoded.ids.tolist() == e.prompt_ids(chat("q").messages)
    for branch in encoded.branches:
        assert branch.supervised.all() and int(branch.ids[-1]) in e.stop_ids
    if name != "plain_words":
        ends = [e.tokenizer.decode(branch.ids[-4:]) for branch in encoded.branches]
        assert ends[0] != ends[1]


def test_pairs_within_max_length() -> None:
    e = encoder()
    cut = e.encode(pair("ab", "yes", "n"), max_length=8)
    assert [branch.ids.tolist() for branch in cut.encoded[0].branches] == [[*b"ye"], [110, END]]
    assert (cut.kept_tokens, cut.dropped_tokens) == (10, 2)
    over = e.encode(pair("ab", "yes", "n"), max_length=8, overflow="drop")
    assert over.dropped[0].reason == DROPPED_TOO_LONG
    assert (over.kept_tokens, over.dropped_tokens) == (0, 12)
    none = e.encode(pair("ab", "yes", "n"), max_length=6)
    assert none.dropped[0].reason == DROPPED_UNSUPERVISED
    assert (none.kept_tokens, none.dropped_tokens) == (0, 12)


def test_truncation_of_chats() -> None:
    e = encoder()
    whole = one(e.encode(chat("abc", "defg")))
    for limit in range(1, 14):
        result = e.encode(chat("abc", "defg"), max_length=limit)
        assert result.kept_tokens + result.dropped_tokens == whole.tokens
        if limit <= 7:  # BOS USER a b c END ASST and nothing to learn
            assert result.dropped[0].reason == DROPPED_UNSUPERVISED
        if result.encoded:
            kept = result.encoded[0]
            assert kept.ids.tolist() == whole.ids.tolist()[:limit]
            assert kept.supervised_bytes == min(4, limit - 7)
    assert e.encode(chat("abc", "defg"), max_length=11, overflow="drop").dropped
    with pytest.raises(RecipeError, match="only plain text can be split"):
        e.encode(chat("abc", "defg"), overflow="split")


def test_bad_rows_are_dropped_with_a_reason() -> None:
    e = encoder()
    assert e.encode(chat("\ud800", "b")).dropped[0].reason == DROPPED_UNICODE
    assert e.encode(Example("text", ORIGIN, text="a\udfff")).dropped[0].reason == DROPPED_UNICODE
    broken = encoder(tok(template="{{ messages[0].content + 1 }}<end>"))
    assert broken.encode(chat("a", "b")).dropped[0].reason.startswith("the template raises: ")


def test_refusals() -> None:
    tokenizer = tok(template=None)
    e = Encoder(tokenizer, None, DATE)
    assert e.text_ids("a") == [97, EOS]
    with pytest.raises(RecipeError, match="template: chatml"):
        e.encode(chat("a", "b"))
    with pytest.raises(TemplateRaised):
        encoder(tokenizer_of("gemma")).prompt_ids([*chat("a").messages, *chat("b").messages])
    nameless = tok(template=CHATML)
    nameless.eos_token = None
    with pytest.raises(RecipeError, match="to learn to stop"):
        encoder(nameless)


def test_fingerprint_changes_with_everything_that_changes_ids() -> None:
    base = encoder().fingerprint
    assert encoder().fingerprint == base
    others = [
        encoder(tok_m()),
        encoder(tok(adds_bos=True)),
        encoder(tok(template=FAMILIES["plain_words"].source)),
        encoder(system="merge"),
        encoder(document_end=False),
        encoder(stop_ids=[7]),
        Encoder(tok(), Template.from_tokenizer(tok()), "2026-02-01"),
    ]
    fingerprints = {base, *(other.fingerprint for other in others)}
    assert len(fingerprints) == 1 + len(others)
