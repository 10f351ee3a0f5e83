"""What a template left out of a chat, found by the origin of what it rendered."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from lehr.data.conversations import ChatMessage, Tools
from lehr.data.provenance import CONTENT, FIRST_OTHER, MIXED, REASONING, code
from lehr.data.rendered import OWNER_TEMPLATE, OWNER_TOOLS, REASONING_NAMES, Rendered
from lehr.data.turns import Script

NOTE_SYSTEM_LOST = "system text lost: the template has no place for it (remedy: system: merge)"
NOTE_REASONING_LOST = "the template drops the reasoning of an answer"
NOTE_TOOL_CALLS_LOST = "the template drops tool calls"
NOTE_OWN_WORDS = "the template writes words of its own into an answer: they are trained"
NOTE_OTHERS_WORDS = "the template writes another turn's text into an answer: it is trained"
NOTE_TOOLS_LOST = "the template drops the tool definitions"


# Marks of structure such as <think> and </think>, and the names of channels between them.
_MARKUP = re.compile(r"</?[\w:|\-]+>|\[/?[A-Z_]+\]")


def losses(rendered: Rendered, messages: Sequence[ChatMessage], tools: Tools) -> list[str]:
    """What the template left out of the chat, as notes."""
    notes: list[str] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            notes += _of_content(rendered, index, str(message.get("role")), content)
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


def _of_content(rendered: Rendered, index: int, role: str, content: str) -> list[str]:
    """How the content of one message is rendered, where that is not once and as it stands."""
    if rendered.kept(index, CONTENT, content):
        said = rendered.written(index, CONTENT)
        # Templates trim; what is inside a text is the text.
        if said.strip() == content.strip():
            return []
        return [f"the template changes white space inside content of a {role} turn"]
    times = rendered.times(index, CONTENT, content)
    if times > 1:
        return [f"the template renders content of a {role} turn {times} times"]
    if role == "system":
        lost = not rendered.written(index, CONTENT)
        return [NOTE_SYSTEM_LOST if lost else "the template changes content of a system turn"]
    if role == "assistant" and "</think>" in content:
        return [NOTE_REASONING_LOST]
    if role == "tool" and _escaped(rendered.written(index, CONTENT), content):
        return []
    return [f"the template drops or changes content of a {role} turn"]


def _escaped(written: str, content: str) -> bool:
    """Whether a tool's result stands there as a JSON string, as many templates show it."""
    forms = (json.dumps(content, ensure_ascii=plain)[1:-1] for plain in (False, True))
    return written in forms


def own_words(script: Script, messages: Sequence[ChatMessage]) -> list[str]:
    """A note where a trained answer holds words that its message does not."""
    for answer in script.answers:
        rendered = script.rendered
        owners = set(rendered.owners[answer.start : answer.end].tolist())
        said = [o for o in owners if o >= 0]
        if any(messages[o].get("role") != "assistant" for o in said if o < len(messages)):
            return [NOTE_OTHERS_WORDS]
        if any(messages[o].get("tool_calls") for o in said if o < len(messages)):
            continue
        letters = list(rendered.text[answer.start : answer.end])
        for place, owner in enumerate(rendered.owners[answer.start : answer.end].tolist()):
            if owner != OWNER_TEMPLATE:
                letters[place] = "\0"
        for control in script.controls:
            first, last = control.start - answer.start, control.end - answer.start
            if first < len(letters) and last > 0:
                span = range(max(first, 0), min(last, len(letters)))
                for place in span:
                    letters[place] = "\0"
        rest = _MARKUP.sub("", "".join(letters))
        if any(letter.isalnum() for letter in rest):
            return [NOTE_OWN_WORDS]
    return []


def _has_other_fields(rendered: Rendered, index: int) -> bool:
    lowest, highest = code(1 + index, FIRST_OTHER), code(1 + index, MIXED)
    return any(lowest <= origin <= highest for origin in set(rendered.codes))
