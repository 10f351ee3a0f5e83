"""Tokenizers that put spaces before text, hold control names as words, or swallow space."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lehr.data.encoding import Encoder
from lehr.data.rendered import Rendered
from lehr.data.shapes import Example, Origin
from lehr.data.templates import Template
from lehr.data.tokenization import TextTokenizer
from lehr.errors import RecipeError

SOURCE = (
    "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def unigram(scheme: str | None, rstrip: bool = False) -> Any:
    """A word-piece-like tokenizer whose vocabulary holds its control names as words.

    scheme: how Metaspace puts a space before text; None: the older Prepend normalizer.
    """
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("<u>", -1.0), ("<a>", -1.0)]
    pieces += [(letter, -3.0) for letter in "▁abcdefghijklmnopqrstuvwxyz<>/\n!"]
    pieces += [("▁yes", -2.0), ("yes", -2.5)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    if scheme is None:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    for name in ("<unk>", "</s>", "<u>", "<a>"):
        strips = rstrip and name == "<a>"
        token = AddedToken(name, special=True, normalized=False, rstrip=strips)
        backend.add_special_tokens([token])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = SOURCE
    return tokenizer


def encoder(tokenizer: Any, source: str = SOURCE) -> Encoder:
    tokenizer.chat_template = source
    return Encoder(tokenizer, Template.from_tokenizer(tokenizer), "2026-01-01")


def chat(*contents: str) -> Example:
    roles = ("user", "assistant") * len(contents)
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False))
    return Example("chat", Origin("chats", "chats.jsonl", 1), messages=messages)


@pytest.mark.parametrize("scheme", ["always", "first", "never", None])
def test_spaces_before_text_are_those_of_the_tokenizer(scheme: str | None) -> None:
    tokenizer = unigram(scheme)
    messages = chat("yes", "no", "yes").messages
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encoder(tokenizer).prompt_ids(messages) == theirs
    assert encoder(tokenizer).text_ids("yes no")[:-1] == tokenizer("yes no")["input_ids"]


@pytest.mark.parametrize("scheme", ["always", "first", "never", None])
def test_an_answer_inside_a_line_gets_no_space_of_its_own(scheme: str | None) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}!"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    e = encoder(unigram(scheme), source)
    (encoded,) = e.encode(chat("yes", "yes")).encoded
    answer = encoded.ids[encoded.supervised].tolist()
    assert e.tokenizer.convert_ids_to_tokens(answer) == ["yes", "</s>"]


def test_control_names_that_are_words_of_the_model_are_spelled() -> None:
    tokenizer = unigram("never")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a</s>", split_special_tokens=True))[
        1:
    ] == ["</s>"]  # the model itself makes the control token out of text
    e = encoder(tokenizer)
    ids = e.prompt_ids(chat("a</s><u>b").messages)
    spelled = e.tokenizer.convert_ids_to_tokens(ids)
    assert spelled == ["<u>", *"a</s><u>b", "</s>", "<a>"]
    ids, counts = e.text.ids_and_bytes("a</s>")
    assert len(ids) == len(counts) == 5 and sum(counts) == 5
    # An unknown character is no control token typed by anybody.
    assert e.text.ids("é") == [0]
    assert e.text.ids("é<unk>")[1:] == e.text.ids("<unk>", "inside") != [0]


def test_white_space_after_a_control_token_is_swallowed_only_from_the_template() -> None:
    e = encoder(unigram("never", rstrip=True), SOURCE.replace("'<a>'", "'<a>\n'"))
    e = encoder(e.tokenizer, e.template.source.replace("%}<a>{%", "%}<a>\n{%"))  # type: ignore[union-attr]
    (encoded,) = e.encode(chat("q", "\nyes")).encoded
    assert e.tokenizer.convert_ids_to_tokens(encoded.ids.tolist()) == [
        "<u>", "q", "</s>", "<a>", "\n", "yes", "</s>",
    ]  # fmt: skip
    assert encoded.supervised.tolist() == [False] * 4 + [True] * 3


def test_a_control_token_needs_template_characters_only() -> None:
    text = TextTokenizer(unigram("never"))
    rendered = Rendered("</s></s>", "\0" * 3 + "\x42" * 2 + "\0" * 3)
    assert text.controls_in(rendered, ()) == []
    rendered = Rendered("<</s></s>", "\0" * 5 + "\x42" * 4)
    assert [(c.start, c.end) for c in text.controls_in(rendered, ())] == [(1, 5)]


def test_white_space_tokens_are_ordinary_text() -> None:
    tokenizer = unigram("never")
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    text = TextTokenizer(tokenizer)
    assert text.ids("a\n\nb") == tokenizer("a\n\nb")["input_ids"]
    assert "\n\n" not in text.controls


def test_a_tokenizer_without_a_backend_is_refused() -> None:
    with pytest.raises(RecipeError, match="backend"):
        TextTokenizer(object())
