"""Sandboxed Jinja environments for chat templates: a plain one and a tracking one.

Both offer what chat templates are written against: `raise_exception`,
`strftime_now` (of a frozen date), `tojson` without HTML escapes, loop controls, the
`generation` block and guarded `dict` and `namespace`. The tracking environment
carries the origin of each character through concatenation, `~`, filters, string
methods and formatting. transformers' own renderer turns str subclasses into plain
text before it renders, so it cannot be reused for that; it is the oracle instead.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from lehr.data.provenance import (
    TrackedText,
    codes_of,
    format_percent,
    join_text,
    taint,
    text_of,
)
from lehr.data.template_filters import (
    OPAQUE_FILTERS,
    ORIGIN_FILTERS,
    SELECTING_FILTERS,
    format_braces,
    keep_or_taint,
    opaque,
    to_json,
)

_frozen_date: contextvars.ContextVar[str] = contextvars.ContextVar("frozen_date")


@contextmanager
def frozen_date(date: str) -> Iterator[None]:
    """Within the block, templates see `date` (YYYY-MM-DD, midnight) as the present."""
    token = _frozen_date.set(date)
    try:
        yield
    finally:
        _frozen_date.reset(token)


def _strftime_now(pattern: str) -> str:
    return datetime.fromisoformat(_frozen_date.get()).strftime(pattern)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


class _GuardedDict:
    """`dict(...)` and `dict.fromkeys(...)`, and no way to the real type."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class _GuardedNamespace(Namespace):
    """A namespace that stores no underscore names."""

    def __init__(*values: Any, **named: Any) -> None:  # a template may pass `self=...` by name
        this, rest = values[0], values[1:]
        attributes = dict(*rest, **named)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(this, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not store {name!r} on a namespace")


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}` and renders what is inside.

    Spans do not come from these marks: most templates have none, and where they have
    them, they do not always agree with what serving makes the model emit.
    """

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render_inside")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_inside(self, caller: Callable[[], str]) -> str:
        return caller()


class PlainEnvironment(ImmutableSandboxedEnvironment):
    """Renders ordinary strings."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = to_json
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_GuardedDict(),
            namespace=_GuardedNamespace,
        )


class _TrackingCode(CodeGenerator):
    """Compiles `a ~ b` to a join that keeps origins."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TrackingEnvironment(PlainEnvironment):
    """Renders tracked strings: the result is tracked wherever a message is in it."""

    code_generator_class = _TrackingCode
    intercepted_binops = frozenset({"%"})

    def __init__(self) -> None:
        super().__init__()
        self.finalize = text_of
        for name, function in list(self.filters.items()):
            if name not in SELECTING_FILTERS:
                wrap = opaque if name in OPAQUE_FILTERS else keep_or_taint
                self.filters[name] = wrap(function)
        self.filters.update(ORIGIN_FILTERS)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]
        return join_text("", pieces)

    @staticmethod
    def concat_values(values: Iterable[Any]) -> str:
        return join_text("", [text_of(value) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            return format_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        pattern: str = value.__self__
        formatter = SandboxedFormatter(self)
        if value.__name__ == "format_map":
            return lambda mapping: format_braces(formatter, pattern, (), mapping)
        return lambda *values, **named: format_braces(formatter, pattern, values, named)

    def call(*arguments: Any, **named: Any) -> Any:
        """Call a function of a template; methods of plain strings see tracked arguments."""
        # All positional, because a template may name any argument (even `self`).
        self, context, function, *values = arguments
        owner = getattr(function, "__self__", None)
        if type(owner) is str and isinstance(function, BuiltinMethodType):
            function = getattr(TrackedText(owner, codes_of(owner)), function.__name__)
        result = super(TrackingEnvironment, self).call(context, function, *values, **named)
        handed_on = isinstance(function, Macro) or isinstance(owner, dict | list | tuple)
        if type(result) is str and not handed_on:
            if isinstance(owner, bytes | bytearray):
                return TrackedText(result)  # decoded: the way back to its origin is lost
            return taint(result, (values, named, owner))
        return result


PLAIN = PlainEnvironment()
TRACKING = TrackingEnvironment()


def variables_for(
    tokens: Mapping[str, Any],
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    add_generation_prompt: bool,
) -> dict[str, Any]:
    """What a chat template is given, under the names that templates expect."""
    return {
        **tokens,
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
