"""Templates that render something else than the messages: noted, or refused, never unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.data.test_encoding import ORIGIN, chat, encoder, trained_text
from tests.fixtures_tokens import tok
from tests.pipeline.small import save_base

from lehr.data.encoded_rows import Encoding
from lehr.data.losses import NOTE_OTHERS_WORDS, NOTE_OWN_WORDS
from lehr.pipeline.auditing import audit

ONE = "'<user>' + m.content + '<end>' if m.role == 'user' else '<asst>' + m.content + '<end>'"
LOOP = "{% for m in messages %}{{ ONE }}{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<asst>' }}{% endif %}"


def through(template: str, *contents: str) -> tuple[Encoding, list[str]]:
    """What the template makes of a chat, and the stretches of text that are trained."""
    tokenizer = tok()
    tokenizer.chat_template = template.replace("ONE", ONE)
    made = encoder(tokenizer)
    encoding = made.encode(chat(*contents))
    trained = [text for one in encoding.encoded for text in trained_text(one, tokenizer)]
    return encoding, trained


def notes(encoding: Encoding) -> str:
    return "\n".join(encoding.notes)


@pytest.mark.parametrize(
    ("expression", "role", "said"),
    [
        ("m.content + m.content", "assistant", "content of a assistant turn 2 times"),
        ("m.content ~ m.content ~ m.content", "user", "content of a user turn 3 times"),
        ("m.content|upper", "assistant", "changes content of a assistant turn"),
        ("m.content.lower()", "user", "changes content of a user turn"),
        ("m.content|title", "assistant", "changes content of a assistant turn"),
        ("m.content|reverse", "assistant", "changes content of a assistant turn"),
        ("m.content[:3]", "assistant", "changes content of a assistant turn"),
        ("m.content|replace('e', 'E')", "assistant", "changes content of a assistant turn"),
        ("m.content|urlencode", "assistant", "changes content of a assistant turn"),
        ("m.content|tojson", "assistant", "changes content of a assistant turn"),
        ("m.content|replace('\\n', ' ')", "assistant", "changes white space inside content"),
        ("m.content.split()|join('')", "user", "changes white space inside content"),
    ],
)
def test_changed_content_is_noted_with_its_row(expression, role, said):
    body = LOOP.replace("ONE", f"(ONE) if m.role != '{role}' else ONE_CHANGED")
    body = body.replace("ONE_CHANGED", "(" + ONE.replace("m.content", f"({expression})") + ")")
    encoding, _ = through(body + ASK, "Where to\n<go>", 'One way\n"Left"')
    assert said in notes(encoding) and f"({ORIGIN})" in notes(encoding)


def test_a_faithful_or_trimming_template_is_not_noted():
    for text in ("m.content", "m.content|trim", "m.content.strip()", "m['content'] ~ ''"):
        body = LOOP.replace("ONE", ONE.replace("m.content", f"({text})"))
        encoding, trained = through(body + ASK, " Where to\n<go> ", ' One way\n"Left"')
        assert not encoding.notes and trained[0].strip() == 'One way\n"Left"<end>'


def test_words_of_the_template_inside_an_answer_are_noted():
    for extra in ("'Sure: ' + m.content", "m.content + ' Bye.'"):
        body = LOOP.replace("ONE", ONE.replace("'<asst>' + m.content", f"'<asst>' + {extra}"))
        encoding, trained = through(body + ASK, "a", "b")
        assert NOTE_OWN_WORDS in notes(encoding) and len(trained[0]) > len("b<end>")


def test_another_turn_inside_an_answer_is_noted():
    echo = "'<asst>' + m.content + ' (to ' + messages[0].content + ')'"
    body = LOOP.replace("ONE", ONE.replace("'<asst>' + m.content", echo))
    assert NOTE_OTHERS_WORDS in notes(through(body + ASK, "a", "b")[0])


LAST_ONLY = "{% set m = messages[-1] %}{{ ONE }}"


def test_a_header_is_never_trained_in_part():
    assert through(LAST_ONLY + ASK, "one", "two")[1] == ["two<end>"]
    words = LAST_ONLY.replace("ONE", "'[' + m.role + '] ' + m.content + '<end>'")
    ask = "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
    for content in ("two", "[assistant] two", "assistant"):
        assert through(words + ask, "one", content)[1] == [content + "<end>"]
    # The generation prompt names the role otherwise than the rendered answer does.
    ask = "{% if add_generation_prompt %}{{ '[assessor] ' }}{% endif %}"
    assert through(words + ask, "one", "two")[1] == ["two<end>"]
    spoken = "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '<end>' }}{% endfor %}"
    assert through(spoken + ask, "one", "two", "three", "four")[1] == ["two<end>", "four<end>"]


def test_a_prompt_that_agrees_with_the_answer_by_chance():
    bare = "{% for m in messages %}{{ m.content + '<end>' }}{% endfor %}"
    ask = "{% if add_generation_prompt %}A: {% endif %}"
    assert through(bare + ask, "one", "A: two")[1] == ["A: two<end>"]


def test_an_answer_before_its_question_is_refused():
    encoding, trained = through(LOOP.replace("messages", "messages|reverse") + ASK, "one", "two")
    assert not trained and "before what it answers" in encoding.dropped[0].reason
    # A copy of the answer at the top is no answer: only what follows the question is.
    top = "{% if messages[-1].role == 'assistant' %}{{ messages[-1].content + '<end>' }}{% endif %}"
    encoding, trained = through(top + LOOP + ASK, "one", "two")
    assert trained == ["two<end>"] and not encoding.dropped


def test_the_audit_hands_on_what_the_encoder_notes(tmp_path: Path):
    folder = save_base(tmp_path / "model")
    changed = ONE.replace("m.content", "(m.content|upper)").replace("<end>", "<|im_end|>")
    (folder / "chat_template.jinja").write_text((LOOP + ASK).replace("ONE", changed))
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data = tmp_path / "d.jsonl"
    data.write_text((json.dumps(row) + "\n") * 3)
    said = "\n".join(audit([data], model=str(folder)).as_json()["sources"][0]["notes"])
    assert f"changes content of a assistant turn (3 rows, first {data}:1)" in said
