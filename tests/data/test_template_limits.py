"""A template that never ends, or makes more text than memory holds, is refused at once."""

from __future__ import annotations

import pytest
from tests.fixtures_tokens import tok

from lehr.data.encoding import Encoder
from lehr.data.templates import CHATML, Template, TemplateEndless, TemplateRaised, control_tokens

USER = {"role": "user", "content": "a"}
HUGE = [
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * 'x' }}",
    "{{ messages[0].content * 10000000000 }}",
    "{{ [1] * 10000000000 }}",
    "{{ 'x'.center(10000000000) }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ messages[0].content.rjust(width=10000000000) }}",
    "{{ '1'.zfill(10000000000) }}",
    "{{ 'x'|center(10000000000) }}",
    "{{ 'x'|indent(10000000000, first=true) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '%10000000000d'|format(1) }}",
    "{{ '{:>10000000000}'.format('x') }}",
    "{{ ('x' * 40000000).join(['a'] * 1000) }}",
    "{{ ('a' * 10000).replace('a', 'b' * 100000) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 2 ** 64 ** 64 ** 64 }}",
    "{{ lipsum(n=100000000) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999)|select %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=7) %}{% for a in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "{% for a in range(100000000000) %}x{% endfor %}",
]


@pytest.mark.parametrize("source", HUGE)
def test_templates_without_an_end(source):
    template = Template(source + CHATML)
    with pytest.raises(TemplateRaised):
        template.render([USER])
    with pytest.raises(TemplateRaised):
        template.text([USER])


@pytest.mark.parametrize("source", [HUGE[0], HUGE[19], HUGE[24]])
def test_no_other_renderer_is_asked(source):
    tokenizer = tok()
    tokenizer.chat_template = source + CHATML
    with pytest.raises(TemplateEndless, match="the template"):
        Encoder(tokenizer, Template.from_tokenizer(tokenizer), "2026-01-31")
    with pytest.raises(TemplateEndless):
        control_tokens(source + CHATML)


def test_what_chats_need_is_far_below_the_limits():
    long = [{"role": "user", "content": "word " * 200_000}] + [USER] * 5_000
    source = (
        "{% set n = namespace(s='') %}{% for m in messages %}{{ '-' * 40 + '=' ~ loop.index }}"
        "{{ m.content|trim|indent(4) + '%5d' % loop.length }}{{ '{:>8}'.format(m.role) }}"
        "{% if loop.last %}{{ loop.revindex }}{% endif %}{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k }}{% else %}none{% endfor %}"
        "{% for m in messages recursive %}{{ loop.index0 }}{% break %}{% endfor %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.length }}{% break %}{% endfor %}"
        "{% for a in missing %}x{% else %}nothing{% endfor %}{{ 2 ** 10 }}{{ 3 + 4 }}{{ 3 * 4 }}"
    )
    template = Template(source)
    assert template.render(long).text == template.text(long)
    assert template.text(long).endswith("rolecontent05001nothing1024712")
