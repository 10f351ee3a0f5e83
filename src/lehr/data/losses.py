"""What a template left out of a chat, found by the origin of what it rendered."""

from __future__ import annotations

from collections.abc import Sequence

from lehr.data.conversations import ChatMessage, Tools
from lehr.data.provenance import CONTENT, FIRST_OTHER, MIXED, REASONING, code
from lehr.data.rendered import OWNER_TOOLS, REASONING_NAMES, Rendered

NOTE_SYSTEM_LOST = "system text lost: the template has no place for it (remedy: system: merge)"
NOTE_REASONING_LOST = "the template drops the reasoning of an answer"
NOTE_TOOL_CALLS_LOST = "the template drops tool calls"
NOTE_TOOLS_LOST = "the template drops the tool definitions"


def losses(rendered: Rendered, messages: Sequence[ChatMessage], tools: Tools) -> list[str]:
    """What the template left out of the chat, as notes."""
    notes: list[str] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and not rendered.kept(index, CONTENT, content):
            role = message.get("role")
            if role == "system":
                notes.append(NOTE_SYSTEM_LOST)
            elif role == "assistant" and "</think>" in content:
                notes.append(NOTE_REASONING_LOST)
            else:
                notes.append(f"the template drops or changes content of a {role} turn")
        for name in REASONING_NAMES:
            thought = message.get(name)
            if isinstance(thought, str) and not rendered.kept(index, REASONING, thought):
                notes.append(NOTE_REASONING_LOST)
                break
        if message.get("tool_calls") and not _has_other_fields(rendered, index):
            notes.append(NOTE_TOOL_CALLS_LOST)
    if tools and not rendered.mentions(OWNER_TOOLS):
        notes.append(NOTE_TOOLS_LOST)
    return notes


def _has_other_fields(rendered: Rendered, index: int) -> bool:
    lowest, highest = code(1 + index, FIRST_OTHER), code(1 + index, MIXED)
    return any(lowest <= origin <= highest for origin in set(rendered.codes))
