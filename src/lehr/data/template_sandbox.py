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
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.nodes import EvalContext
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
from lehr.data.template_limits import (
    COUNTED_FILTER,
    count_loops,
    counted,
    limit_binop,
    limit_pattern,
    limit_widths,
    step,
    write,
)

WIDE_FILTERS = ("batch", "center", "indent", "slice", "wordwrap")

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


class _CountingCode(CodeGenerator):
    """Compiles `a ~ b` to a call of the environment, which counts it and may keep origins."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class PlainEnvironment(ImmutableSandboxedEnvironment):
    """Renders ordinary strings."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = to_json
        self._limit_filters()
        self.filters[COUNTED_FILTER] = counted
        self.globals.pop("lipsum", None)  # no chat has one, and it can be of any length
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_GuardedDict(),
            namespace=_GuardedNamespace,
        )

    code_generator_class = _CountingCode
    intercepted_binops = frozenset({"%", "*", "**", "+"})

    @staticmethod
    def concat_values(values: Iterable[Any]) -> str:
        texts = [str(value) for value in values]
        write(sum(map(len, texts)))
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            limit_pattern(value.__self__)
        return wrapped

    def _limit_filters(self) -> None:
        for name in WIDE_FILTERS:
            self.filters[name] = _narrow(self.filters[name])
        for name in ("format", "join", "replace"):
            self.filters[name] = _bounded(self.filters[name], name)

    def _parse(self, *arguments: Any, **named: Any) -> nodes.Template:
        return count_loops(super()._parse(*arguments, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limit_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(*arguments: Any, **named: Any) -> Any:
        """Call a function of a template, counted."""
        # All positional, because a template may name any argument (even `self`).
        self, context, function, *values = arguments
        step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            limit_widths((*values, *named.values()))
            if function.__name__ in ("format", "format_map"):
                limit_pattern(owner)
            elif function.__name__ in ("join", "replace"):
                _limit_joined(owner, function.__name__, values)
        return super(PlainEnvironment, self).call(context, function, *values, **named)


def _limit_joined(owner: str, method: str, values: Sequence[Any]) -> None:
    """Count what `join` and `replace` may make of texts that are each of an allowed length."""
    if method == "join" and values and hasattr(values[0], "__len__"):
        write(len(owner) * len(values[0]))
    elif method == "replace" and len(values) > 1 and isinstance(values[1], str):
        write(len(values[1]) * (str(owner).count(str(values[0])) if values[0] else len(owner)))


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing numbers that no chat needs."""

    @functools.wraps(function)
    def narrow(*values: Any, **named: Any) -> Any:
        limit_widths((*values, *named.values()))
        return function(*values, **named)

    return narrow


def _bounded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`format`, `join` or `replace` as a filter, its result bounded beforehand."""

    @functools.wraps(function)
    def bounded(*values: Any, **named: Any) -> Any:
        # Jinja hands some filters its environment before their own values.
        own = values[1:] if isinstance(values[0], PlainEnvironment | EvalContext) else values
        if name == "format":
            limit_pattern(str(own[0]))
            limit_widths((*own[1:], *named.values()))
        elif name == "replace" and isinstance(own[0], str):
            _limit_joined(own[0], name, own[1:])
        elif name == "join":
            separator = str(own[1] if len(own) > 1 else named.get("d", ""))
            _limit_joined(separator, name, own[:1])
        return function(*values, **named)

    return bounded


class TrackingEnvironment(PlainEnvironment):
    """Renders tracked strings: the result is tracked wherever a message is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.finalize = text_of
        for name, function in list(self.filters.items()):
            if name not in SELECTING_FILTERS:
                wrap = opaque if name in OPAQUE_FILTERS else keep_or_taint
                self.filters[name] = wrap(function)
        self.filters.update(ORIGIN_FILTERS)
        self._limit_filters()

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]
        return join_text("", pieces)

    @staticmethod
    def concat_values(values: Iterable[Any]) -> str:
        texts = [text_of(value) for value in values]
        write(sum(map(len, texts)))
        return join_text("", texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            limit_binop(operator, left, right)
            return format_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        pattern: str = value.__self__
        limit_pattern(pattern)
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
