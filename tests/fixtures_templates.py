"""Chat templates in the manner of well-known families, written for the tests.

Each has the control tokens that it needs in `controls`, so that a byte tokenizer can
be given them. None is a copy of a published template; each keeps one trait of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.fixtures_tokens import TPL, token_fixture

from lehr.data.templates import CHATML, Template


@dataclass(frozen=True)
class Family:
    """source: the template; controls: extra special tokens; stop: its end-of-turn token."""

    source: str
    controls: tuple[str, ...] = ()
    stop: str = "<end>"
    system: bool = True


_LLAMA2 = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ bos_token ~ '[INST] ' ~ m.content.strip() ~ ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' ~ m.content | trim ~ ' ' ~ eos_token }}{% endif %}"
    "{% endfor %}"
)
_LLAMA3 = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}"
    "{%- set system = messages[0]['content'] | trim %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}"
    "{{- '<|head|>system<|/head|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n' }}"
    "{{- system + '<|eot|>' }}"
    "{%- for m in rest %}"
    "{{- '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\n\n' }}{%- endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must take turns: user, assistant, ...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set ns = namespace(system=messages[0].content) %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set ns = namespace(system=none) %}"
    "{%- set turns = messages %}{%- endif %}{{- bos_token }}"
    "{%- for m in turns %}{%- if m['role'] == 'user' %}"
    "{%- if loop.last and ns.system is not none %}"
    "{{- '[INST] ' + ns.system + '\n\n' + m['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + m['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
_REASONING = (
    "{%- set ns = namespace(last_user=0) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{- '<|im_start|>system\nTools:' }}{%- for t in tools %}"
    "{{- '\n' ~ (t | tojson) }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- set content = m.content or '' %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
    "{%- elif m.role == 'assistant' and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
    "{%- set thought = thought.lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last_user and thought %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- content }}"
    "{%- if m.tool_calls %}{%- for call in m.tool_calls %}"
    '{{- \'\n<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_THINKING_PROMPT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|q|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|a|>{{ m.content.split('</think>') | last }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|a|><think>\n{% endif %}"
)
_HISTORY = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "<|role|>assistant<|text|>{{ m.content | replace('\n', ' ') }}<|stop|>"
    "{% else %}<|role|>{{ m.role }}<|text|>{{ m.content }}<|stop|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant<|text|>{% endif %}"
)
_GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_CHANNELS = (
    "{%- macro turn(name, text, ending) -%}"
    "<|start|>{{ name }}<|message|>{{ text }}{{ ending }}{%- endmacro -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{ turn('assistant', m.content, '<|return|>' if loop.last else '<|end|>') }}"
    "{%- else -%}{{ turn(m.role, m.content, '<|end|>') }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
_PLAIN_WORDS = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_FILTERS = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{% continue %}{% endif %}"
    "{{ '<|%s|>' % m.role }}{% set lines = m.content.splitlines() %}"
    "{{ lines | map('trim') | join('\n') }}{{ '|{}|{}'.format(m.content[:3], m.content[-2:]) }}"
    "{{ '%s/%s' | format(m.content | first | default('-'), m.content | upper) }}"
    "{{ ' '.join(m.content.split()) }}{{ {'text': m.content} | tojson }}"
    "{{ m.content | replace('a', '<b>') | indent(2) }}{{ m.content | title | reverse }}"
    "{{ m.content.partition(' ')[2] * 2 }}{{ [m.content, 1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

FAMILIES: dict[str, Family] = {
    "tpl": Family(TPL),
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama2": Family(_LLAMA2, (), "<eos>", system=False),
    "llama3": Family(_LLAMA3, ("<|head|>", "<|/head|>", "<|eot|>"), "<|eot|>"),
    "gemma": Family(_GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", system=False),
    "mistral": Family(_MISTRAL, ("[INST]", "[/INST]"), "<eos>"),
    "reasoning": Family(
        _REASONING,
        ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
        "<|im_end|>",
    ),
    "thinking_prompt": Family(_THINKING_PROMPT, ("<|q|>", "<|a|>"), "<eos>"),
    "history": Family(_HISTORY, ("<|role|>", "<|text|>", "<|stop|>"), "<|stop|>"),
    "glm": Family(_GLM, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"), "<eos>"),
    "channels": Family(
        _CHANNELS, ("<|start|>", "<|message|>", "<|end|>", "<|return|>"), "<|return|>"
    ),
    "plain_words": Family(_PLAIN_WORDS, (), "<eos>"),
    "marked": Family(_MARKED, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "filters": Family(_FILTERS, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
}


def tokenizer_of(name: str, **options: Any) -> Any:
    """TOK with the family's control tokens and template."""
    family = FAMILIES[name]
    return token_fixture(extra=family.controls, template=family.source, **options)


def template_of(name: str) -> Template:
    template = Template.from_tokenizer(tokenizer_of(name))
    assert template is not None
    return template
