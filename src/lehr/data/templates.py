"""Chat templates: rendering with the origin of every character.

`Template.render` gives the text that transformers would give, and for each character
who wrote it: the template or a message. Supervision, control tokens and lost content
are all decided from that, never by searching the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from lehr.data.provenance import CONTENT, MOST_MESSAGES, TOOLS, code, codes_of, plain
from lehr.data.rendered import (
    OWNER_TAINTED,
    OWNER_TEMPLATE,
    OWNER_TOOLS,
    Rendered,
    Run,
    normalised,
    track,
    track_message,
)
from lehr.data.template_limits import TemplateTooLarge, counted_rendering
from lehr.data.template_sandbox import PLAIN, TRACKING, frozen_date, variables_for
from lehr.errors import Problem, RecipeError

__all__ = [
    "CHATML",
    "OWNER_TAINTED",
    "OWNER_TEMPLATE",
    "OWNER_TOOLS",
    "Rendered",
    "Run",
    "Template",
    "TemplateRaised",
    "control_tokens",
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TAG = re.compile(r"\s*(<[^\s<>]+>|\[[^\s\[\]]+\])")
_CONTROL_SHAPE = re.compile(r"<\|[^\s<>|'\"{}%]+\|>|<｜[^\s<>｜]+｜>|<(?:start|end)_of_turn>")


class TemplateRaised(RecipeError):
    """The template cannot render these messages; `reason` is in the template's own words."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(Problem("template", f"messages that it can render: {reason}"))


class TemplateEndless(TemplateRaised):
    """The template does more than any chat needs; no other renderer should be asked, either."""


@dataclass(frozen=True)
class Template:
    """A Jinja chat template with the special tokens that it may name (`bos_token`, ...).

    source       the template
    tool_source  another template for chats with tools, where the model has one
    """

    source: str
    tokens: Mapping[str, Any] = field(default_factory=dict)
    tool_source: str | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Template | None:
        """The model's own template, or None for a model without one."""
        source = getattr(tokenizer, "chat_template", None)
        if not source:
            return None
        if isinstance(source, Mapping):
            default = source.get("default") or next(iter(source.values()))
            return cls(default, dict(tokenizer.special_tokens_map), source.get("tool_use"))
        return cls(source, dict(tokenizer.special_tokens_map))

    @classmethod
    def load(cls, name: str, tokenizer: Any, folder: Path = Path()) -> Template | None:
        """`auto` (the model's own), `chatml`, or a Jinja file (relative to `folder`).

        Raises RecipeError when there is no such file or it is no valid template.
        """
        if name == "auto":
            template = cls.from_tokenizer(tokenizer)
        elif name == "chatml":
            template = cls(CHATML, dict(tokenizer.special_tokens_map))
        else:
            path = folder / name
            if not path.is_file():
                wanted = "auto, chatml or a Jinja file that exists"
                raise RecipeError(Problem("template", wanted, name))
            template = cls(path.read_text("utf-8"), dict(tokenizer.special_tokens_map))
        if template is not None:
            template.compile_or_refuse(name)
        return template

    def compile_or_refuse(self, name: str) -> None:
        try:
            _compiled(self.source)
            if self.tool_source is not None:
                _compiled(self.tool_source)
        except jinja2.TemplateSyntaxError as error:
            where = f"template {name}, line {error.lineno}"
            raise RecipeError(Problem(where, f"a valid Jinja template: {error.message}")) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        date: str = "2000-01-01",
    ) -> Rendered:
        """The chat as text with origins; `date` (YYYY-MM-DD) is what the template sees as now.

        Raises TemplateRaised with the template's own message.
        """
        if len(messages) > MOST_MESSAGES:
            raise TemplateRaised(f"more than {MOST_MESSAGES} messages")
        tracked = [track_message(index, message) for index, message in enumerate(messages)]
        tool_list = [track(tool, lambda: code(TOOLS, CONTENT)) for tool in tools] or None
        text = self._run(True, tracked, tool_list, add_generation_prompt, date)
        return Rendered(plain(text), codes_of(text))

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        date: str = "2000-01-01",
    ) -> str:
        """The same text without origins, from an environment that knows of none."""
        prepared = [normalised(message) for message in messages]
        return self._run(False, prepared, list(tools) or None, add_generation_prompt, date)

    def _run(
        self,
        tracking: bool,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        date: str,
    ) -> str:
        source = self.tool_source if tools and self.tool_source else self.source
        variables = variables_for(self.tokens, messages, tools, add_generation_prompt)
        try:
            with frozen_date(date), counted_rendering():
                return _compiled(source)[tracking].render(variables)
        except (TemplateTooLarge, MemoryError) as error:
            raise TemplateEndless(str(error) or "the template needs too much memory") from error
        except Exception as error:  # a template is a program: whatever it raises is the row's
            detail = str(error) or type(error).__name__
            raise TemplateRaised(detail) from error

    def difference_from_transformers(self, tokenizer: Any) -> str | None:
        """A description of the first sample chat that transformers renders otherwise."""
        if "strftime_now" in self.source and re.search(r"%[HMSIpcXfsTRr]", self.source):
            return None  # shows the time of day: no two renderings are alike
        for messages in _sample_chats():
            for prompt in (False, True):
                today = datetime.now().date().isoformat()
                ours = self._rendered_or_none(messages, prompt, today)
                theirs = self._by_transformers(tokenizer, messages, prompt)
                same_day = datetime.now().date().isoformat() == today
                if ours != theirs and same_day:
                    return f"{ours!r} where transformers renders {theirs!r}"
        return None

    def _rendered_or_none(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, date: str
    ) -> str | None:
        try:
            return self.render(messages, (), add_generation_prompt, date).text
        except TemplateEndless:
            raise  # transformers would render it without any limit
        except TemplateRaised:
            return None

    def _by_transformers(
        self, tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool
    ) -> str | None:
        try:
            text: str = tokenizer.apply_chat_template(
                messages,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception:  # a template is a program; only whether it raises is compared
            return None
        return text


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[jinja2.Template, jinja2.Template]:
    compiled = PLAIN.from_string(source), TRACKING.from_string(source)
    for template in compiled:
        template.globals = dict(template.globals)  # Jinja's chain of maps is slow to copy
    return compiled


def _sample_chats() -> Iterator[list[dict[str, Any]]]:
    system = {"role": "system", "content": "Be\nbrief. "}
    first = {"role": "user", "content": " How many? <b>&amp; é \U0001f9ca"}
    answer = {"role": "assistant", "content": "\n7, I think."}
    second = {"role": "user", "content": "And\ttwice that?"}
    yield [first]
    yield [first, answer]
    yield [system, first, answer]
    yield [first, answer, second, {"role": "assistant", "content": "14 "}]
    yield [system, first, {"role": "assistant", "content": "14", "reasoning_content": "7 + 7"}]
    function = {"name": "add", "arguments": {"a": 7, "b": "7"}}
    call = {"type": "function", "id": "call12345", "function": function}
    result = {"role": "tool", "content": "14", "tool_call_id": "call12345"}
    yield [first, {"role": "assistant", "content": "", "tool_calls": [call]}, result, answer]


def control_tokens(source: str) -> list[str]:
    """The control tokens that a template writes, for a base model that lacks them.

    Found among the template's literals and in what it renders itself around sample
    chats. Only shapes that cannot be meant as prose count (`<|name|>`, `<end_of_turn>`),
    and any tag right after an answer, because it ends the turn.

    Raises RecipeError for a source that is no valid template.

    >>> control_tokens(CHATML)
    ['<|im_start|>', '<|im_end|>']
    """
    found: dict[str, None] = {}
    template = Template(source)
    template.compile_or_refuse("source")
    for messages in _sample_chats():
        try:
            rendered = template.render(messages, (), True)
        except TemplateEndless:
            raise
        except TemplateRaised:
            continue
        for match in re.finditer("\0+", rendered.codes):
            written = rendered.text[match.start() : match.end()]
            found.update(dict.fromkeys(_CONTROL_SHAPE.findall(written)))
        for run, following in zip(rendered.runs, [*rendered.runs[1:], None], strict=True):
            limit = following.start if following else len(rendered.text)
            tag = _TAG.match(rendered.text, run.end, limit)
            if tag and run.owner >= 0 and messages[run.owner]["role"] == "assistant":
                found[tag[1]] = None
    found.update(dict.fromkeys(_CONTROL_SHAPE.findall(source)))
    return list(found)
