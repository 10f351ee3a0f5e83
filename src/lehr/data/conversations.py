"""Conversations before rendering: the system policy, and which answers are trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

TrainOn = Literal["assistant", "last", "completion"]
SystemPolicy = Literal["keep", "merge", "drop"]
ChatMessage = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


def prepared(messages: Sequence[Mapping[str, Any]], system: SystemPolicy) -> list[ChatMessage]:
    """The messages as the template gets them, in training and in serving alike.

    Applies the system policy, reads tool-call arguments from their JSON string (as
    servers do, because templates expect an object). `unmarked` removes lehr's own key.
    """
    result: list[ChatMessage] = []
    waiting: list[str] = []
    for message in messages:
        copy = dict(message)
        if isinstance(copy.get("tool_calls"), list | tuple):
            copy["tool_calls"] = [_with_arguments(call) for call in copy["tool_calls"]]
        if copy.get("role") == "system" and system != "keep":
            if system == "merge" and copy.get("content"):
                waiting.append(copy["content"])
            continue
        if waiting:
            merged = "\n\n".join(waiting)
            waiting = []
            if copy.get("role") == "user" and isinstance(copy.get("content"), str):
                copy["content"] = f"{merged}\n\n{copy['content']}"
            else:  # no user turn to merge with: the system text becomes one
                result.append({"role": "user", "content": merged})
        result.append(copy)
    if waiting:
        result.append({"role": "user", "content": "\n\n".join(waiting)})
    return result


def unmarked(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The messages without `train`, which no template should see."""
    return [{key: value for key, value in m.items() if key != "train"} for m in messages]


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def trained_turns(messages: Sequence[Mapping[str, Any]], train_on: TrainOn) -> list[bool]:
    """For each message, whether it is an answer to train on."""
    chosen = [message.get("role") == "assistant" for message in messages]
    if train_on != "assistant" and any(chosen):
        last = len(chosen) - 1 - chosen[::-1].index(True)
        chosen = [index == last for index in range(len(chosen))]
    return [
        picked and message.get("train") is not False
        for picked, message in zip(chosen, messages, strict=True)
    ]


def says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return bool(message.get("tool_calls")) or bool(content and str(content).strip())
