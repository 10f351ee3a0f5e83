"""Templates: the text of transformers, and the right owner for every character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fixtures_templates import FAMILIES, template_of, tokenizer_of
from tests.fixtures_tokens import tok

from lehr.data.templates import (
    CHATML,
    OWNER_TAINTED,
    OWNER_TEMPLATE,
    OWNER_TOOLS,
    Template,
    TemplateRaised,
    control_tokens,
)
from lehr.errors import RecipeError

USER = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Seven."}
CONTENTS = st.text(max_size=20) | st.sampled_from(
    ["<|im_end|>", "<end>", " <eos> ", "\n\n", "</think>", "<think>\na\n</think>\n\nb", "{{ x }}"]
)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_samples_are_rendered_as_transformers_renders_them(name: str) -> None:
    assert template_of(name).difference_from_transformers(tokenizer_of(name)) is None


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(contents=st.lists(CONTENTS, min_size=1, max_size=4), prompt=st.booleans())
def test_tracked_text_is_plain_text_and_owners_point_home(
    name: str, contents: list[str], prompt: bool
) -> None:
    template = template_of(name)
    roles = ["user", "assistant"] * 2
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    rendered = template.render(messages, (), prompt, "2026-01-31")
    assert rendered.text == template.text(messages, (), prompt, "2026-01-31")
    assert len(rendered.owners) == len(rendered.text)
    if name != "filters":  # it changes letters
        for letter, owner in zip(rendered.text, rendered.owners, strict=True):
            if owner >= 0:
                assert letter in messages[owner]["content"] + " "


def test_control_text_of_a_user_belongs_to_the_user() -> None:
    template = Template(CHATML)
    rendered = template.render([{"role": "user", "content": "<|im_end|>"}])
    assert rendered.text == "<|im_start|>user\n<|im_end|><|im_end|>\n"
    assert rendered.owners.tolist() == [OWNER_TEMPLATE] * 17 + [0] * 10 + [OWNER_TEMPLATE] * 11


def test_a_role_that_is_no_word_is_text_of_its_message() -> None:
    rendered = Template(CHATML).render([{"role": "user<|im_end|>", "content": "x"}])
    assert set(rendered.owners[12:26]) == {0}


@pytest.mark.parametrize(
    ("source", "tainted"),
    [
        ("{{ messages }}", False),  # one message only, but two fields: still that message
        ("{{ [messages[0].content, messages[1].content] }}", True),
        ("{{ ', '.join(messages | map(attribute='content')) }}", False),
        ("{{ '%s and %s' % (messages[0].content, messages[1].content) }}", False),
        ("{{ '{1}{0}'.format(messages[0].content, messages[1].content) }}", False),
        ("{{ '{a!r:>9}'.format(a=messages[0].content) }}", False),
        ("{% set x %}{{ messages[0].content }}{% endset %}{{ x.replace('o', 'oo') }}", False),
        (
            "{% macro m(a) %}<{{ a }}>{{ caller() }}{% endmacro %}"
            "{% call m(messages[1].content) %}{{ messages[0].content }}{% endcall %}",
            False,
        ),
        ("{% filter upper %}a{{ messages[0].content }}{% endfilter %}", False),
        ("{{ messages[0].content | wordwrap(3) | center(20) | urlencode }}", False),
        ("{{ (messages[0].content ~ messages[1].content) | escape }}", True),
        ("{{ messages[0].content.encode().decode() }}", True),
        ("{{ messages[0].content | list | reverse | join('-') }}", False),
        ("{{ messages | map(attribute='content') | sort | first }}", False),
        ("{{ messages | tojson(indent=2) }}{{ messages | tojson(sort_keys=true) }}", False),
        ("{{ messages[0] | tojson(separators=(',', ':'), ensure_ascii=true) }}", False),
        ("{{ dict(a=messages[0].content).a }}{{ namespace(b=messages[1].content).b }}", False),
        ("{{ messages[0].content | truncate(4, true, '') | striptags }}", False),
    ],
)
def test_whatever_a_template_does_no_letter_of_a_message_passes_for_its_own(
    source: str, tainted: bool
) -> None:
    messages = [{"role": "user", "content": "QZQ éQ"}, {"role": "assistant", "content": "ZQ"}]
    template = Template(source)
    rendered = template.render(messages)
    assert rendered.text == template.text(messages)
    for letter, owner in zip(rendered.text, rendered.owners, strict=True):
        assert letter not in "QZ" or owner != OWNER_TEMPLATE
    assert (OWNER_TAINTED in rendered.owners) == (tainted or source == "{{ messages }}")


def test_text_that_a_template_chooses_by_a_message_stays_its_own() -> None:
    source = (
        "{% macro tag(m) %}{% if m.content %}<|{{ m.role }}|>{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ tag(m) }}{{ m.get('role', m.content) }}"
        "{{ m.role | default(m.content) }}{% endfor %}"
    )
    rendered = Template(source).render([USER])
    assert rendered.text == "<|user|>useruser"
    assert set(rendered.owners) == {OWNER_TEMPLATE}


def test_tools_and_tool_calls_have_owners() -> None:
    template = template_of("reasoning")
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "zwei"}}}
    tool = {"type": "function", "function": {"name": "add", "description": "adds <|im_end|>"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rendered = template.render(messages, [tool])
    start = rendered.text.index("adds <|im_end|>")
    assert set(rendered.owners[start : start + 15]) == {OWNER_TOOLS}
    start = rendered.text.index("zwei")
    assert set(rendered.owners[start : start + 4]) == {1}
    theirs = tokenizer_of("reasoning").apply_chat_template(messages, [tool], tokenize=False)
    assert rendered.text == theirs


def test_the_date_is_frozen() -> None:
    template = template_of("llama3")
    assert "Today: 09 Mar 2021" in template.render([USER], date="2021-03-09").text
    assert "Today: 10 Mar 2021" in template.render([USER], date="2021-03-10").text


def test_errors_of_a_template_come_in_its_own_words() -> None:
    template = template_of("gemma")
    with pytest.raises(TemplateRaised, match=r": Roles must take turns: user, assistant, \.\.\.$"):
        template.render([USER, USER])
    with pytest.raises(TemplateRaised, match=r": System role not supported$"):
        template.render([{"role": "system", "content": "x"}, USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content._codes }}",
        "{{ '{0.__class__}'.format(messages[0].content) }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(_x=1) %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = Template(source).render([USER]).text
    except TemplateRaised:
        return
    assert text in ("", "<>")  # Jinja renders some refused attributes as nothing


def test_the_kept_check_sees_what_a_template_dropped() -> None:
    rendered = Template("{% for m in messages %}{{ m.content[:4] }}{% endfor %}").render([USER])
    assert not rendered.kept(0, 0, USER["content"])
    rendered = Template("{% for m in messages %}{{ m.content | trim }}{% endfor %}").render(
        [{"role": "user", "content": "  a b\n"}]
    )
    assert rendered.kept(0, 0, "  a b\n")


def test_loading(tmp_path: Path) -> None:
    tokenizer = tok(template=None)
    assert Template.load("auto", tokenizer) is None
    chatml = Template.load("chatml", tokenizer)
    assert chatml is not None and chatml.source == CHATML
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}{{ eos_token }}", "utf-8")
    own = Template.load("own.jinja", tokenizer, tmp_path)
    assert own is not None and own.render([USER]).text == "How many?<eos>"
    with pytest.raises(RecipeError, match="a Jinja file that exists"):
        Template.load("missing.jinja", tokenizer, tmp_path)
    (tmp_path / "bad.jinja").write_text("{% if %}", "utf-8")
    with pytest.raises(RecipeError, match=r"bad\.jinja, line 1"):
        Template.load("bad.jinja", tokenizer, tmp_path)


def test_a_model_with_several_templates() -> None:
    tokenizer = tok(template=None)
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    template = Template.from_tokenizer(tokenizer)
    assert template is not None
    assert template.render([USER]).text == "plain"
    assert template.render([USER], [{"name": "t"}]).text == "tools"


def test_control_tokens_that_a_template_needs() -> None:
    assert control_tokens(CHATML) == ["<|im_start|>", "<|im_end|>"]
    needed: dict[str, Any] = {name: control_tokens(f.source) for name, f in FAMILIES.items()}
    assert needed["gemma"] == ["<start_of_turn>", "<end_of_turn>"]
    assert needed["filters"][:4] == ["<|user|>", "<|end|>", "<|assistant|>", "<|system|>"]
    assert needed["tpl"] == ["<end>"]  # the tag that ends an answer, whatever its shape
    assert needed["plain_words"] == []
