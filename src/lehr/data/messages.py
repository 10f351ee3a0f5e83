"""Messages in one form: role, text, tool calls; whatever the file called them.

A message is a mapping with `role` (system, user, assistant, tool, developer) and `content` (a
text), and where the row has them: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`,
`thinking`, and `train: False` for an assistant turn that is not to be learned. Other keys (ids,
dates, scores) say nothing to a model and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lehr.data.json_values import JsonError, JsonParser
from lehr.data.shapes import Message


class RowError(Exception):
    """The row cannot be used. `reason` is a short fixed phrase that never quotes the row."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
_CALLING_ROLES = ("function_call", "tool_call")
_COPIED = ("name", "tool_call_id", "reasoning_content", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")
_MEDIA = {"image": "an image", "audio": "sound", "video": "video", "file": "a file"}


def messages_of(value: Any, column: str = "messages") -> tuple[Message, ...]:
    """The messages of a list (or of a list written as JSON text). Raises RowError."""
    if isinstance(value, str):
        value = json_of(value, column)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RowError(f"{column} is not a list")
    if not value:
        raise RowError(f"{column} is empty")
    return tuple(message_of(item) for item in value)


def turns_of(value: Any, role: str, column: str) -> tuple[Message, ...]:
    """What a column holds, as messages: a text becomes one message of `role`. Raises RowError."""
    if value is None:
        raise RowError(f"{column} is null")
    if isinstance(value, str):
        if value.lstrip().startswith("[{"):
            try:
                return messages_of(value, column)
            except RowError:
                pass  # a text that happens to begin like a list
        return ({"role": role, "content": value},)
    if not isinstance(value, Mapping | list | tuple):
        raise RowError(f"{column} is not text")
    return messages_of(value, column)


def message_of(value: Any) -> Message:
    """One message in lehr's form. Raises RowError."""
    if not isinstance(value, Mapping):
        raise RowError("a message is not an object")
    spelled = value.get("role", value.get("from"))
    role = ROLES.get(spelled.strip().lower()) if isinstance(spelled, str) else None
    if role is None:
        raise RowError("a message without a role" if spelled is None else "unknown role")
    content = value.get("content", value.get("value"))
    message: dict[str, Any] = {"role": role, "content": ""}
    for key in _COPIED:
        if value.get(key) is not None:
            message[key] = _text(value[key], key)
    calls = _calls_of(value)
    if isinstance(spelled, str) and spelled.strip().lower() in _CALLING_ROLES:
        calls += _calls(content, "tool_calls")
    elif isinstance(content, Mapping) or (
        isinstance(content, Sequence) and not isinstance(content, str | bytes)
    ):
        calls += _parts(content, message)
    elif content is None:
        refusal = value.get("refusal")
        if not calls and not isinstance(refusal, str):
            raise RowError("content is null")
        message["content"] = refusal if isinstance(refusal, str) else ""
    else:
        message["content"] = _text(content, "content")
    if calls:
        message["tool_calls"] = calls
    if not _is_trained(value):
        message["train"] = False
    return message


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{column} is not text")
    return value


def _is_trained(value: Mapping[str, Any]) -> bool:
    """`train: false`, `loss: false` and `weight: 0` all say: context, not a target."""
    for key in ("train", "loss", "weight"):
        flag = value.get(key)
        if flag is None:
            continue
        if isinstance(flag, str) and flag.lower() in ("true", "false"):
            flag = flag.lower() == "true"
        if flag not in (0, 1):  # True and False are 1 and 0
            raise RowError(f"{key} of a message is neither 0 nor 1")
        if not flag:
            return False
    return True


def _parts(content: Any, message: dict[str, Any]) -> list[Mapping[str, Any]]:
    """Joins the text parts of `content` into `message`; returns the tool calls among them."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for part in [content] if isinstance(content, Mapping) else content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise RowError("content is not text")
        kind = str(part.get("type", "text"))
        body = part.get(kind, part.get("value", part.get("text")))
        if kind in _TEXT_PARTS:
            texts.append(_text(part.get("text", body), "content"))
        elif kind in _REASONING_PARTS:
            reasoning.append(_text(body, "reasoning"))
        elif kind in ("tool_call", "tool_use", "function_call"):
            calls += _calls(part if body is None else body, "tool_calls")
        else:
            raise RowError(_media_reason(kind))
    message["content"] = "".join(texts)
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    return calls


def _media_reason(kind: str) -> str:
    for word, name in _MEDIA.items():
        if word in kind:
            return f"content holds {name}: only text is read"
    return "content has a part of an unknown type"


def _calls_of(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls: list[Mapping[str, Any]] = []
    if value.get("tool_calls"):
        calls += _calls(value["tool_calls"], "tool_calls")
    if value.get("function_call"):  # the older spelling of one call
        calls += _calls(value["function_call"], "function_call")
    return calls


def _calls(value: Any, column: str) -> list[Mapping[str, Any]]:
    """Tool calls as {"type": "function", "function": {"name", "arguments"}}, arguments parsed."""
    if isinstance(value, str):
        value = json_of(value, column)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RowError(f"{column} is not a list")
    return [_call(item, column) for item in value]


def _call(item: Any, column: str) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise RowError(f"{column} holds something that is no call")
    function = item.get("function", item)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"{column} holds a call without a name")
    arguments = function.get("arguments", function.get("input", function.get("parameters")))
    if isinstance(arguments, str):
        # Templates print arguments as JSON: left as text they would come out quoted twice.
        arguments = json_of(arguments, "tool call arguments") if arguments.strip() else {}
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }
    if isinstance(item.get("id"), str):
        call["id"] = item["id"]
    return call


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Tool descriptions, as a list or as JSON text, each as {"type": "function", ...}."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = json_of(value, "tools")
    if isinstance(value, Mapping):
        value = [value]
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RowError("tools is not a list")
    tools: list[Mapping[str, Any]] = []
    for tool in value:
        if isinstance(tool, str):
            tool = json_of(tool, "tools")
        if not isinstance(tool, Mapping):
            raise RowError("tools holds something that is no tool")
        bare = "function" not in tool and isinstance(tool.get("name"), str)
        tools.append({"type": "function", "function": dict(tool)} if bare else dict(tool))
    return tuple(tools)


def json_of(text: str, column: str) -> Any:
    """The JSON value that a text column holds. Raises RowError naming the column."""
    try:
        return JsonParser().parse(text)
    except JsonError:
        raise RowError(f"{column} is text that is not JSON") from None


def is_blank(message: Message) -> bool:
    """True for a message that says nothing: no text, no call, no reasoning."""
    said = (message.get("content"), message.get("reasoning_content"), message.get("thinking"))
    return not message.get("tool_calls") and not any(text and text.strip() for text in said)


def require_answers(messages: Sequence[Message]) -> None:
    """Raises RowError where nothing, or an empty turn, would be learned."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise RowError("no assistant message")
    if any(is_blank(answer) and answer.get("train", True) for answer in answers):
        raise RowError("empty answer")
