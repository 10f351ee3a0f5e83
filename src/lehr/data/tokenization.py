"""Text to ids, with control tokens only where the template itself wrote them.

A rendered chat is cut at control tokens made wholly of template characters and at
the end of every generation prompt; the stretches between are encoded by tokenizers
that know no control tokens. So text of a user cannot become one, and what a model
is prompted with is a prefix of what it was trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from tokenizers import Tokenizer

from lehr.data.provenance import TEMPLATE
from lehr.data.rendered import Rendered
from lehr.errors import Problem, RecipeError
from lehr.streams import content_hash

# Markers that the text of an *assistant* message may carry as control tokens, where
# the tokenizer has them: they structure an answer, and none of them ends one.
ASSISTANT_MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<answer>",
    "</answer>",
    "[TOOL_CALLS]",
    "[THINK]",
    "[/THINK]",
)

# Where a stretch of text stands decides whether a tokenizer puts a space before it.
Place = Literal["start", "after_control", "inside"]

_TEMPLATE_RUN = re.compile(f"{TEMPLATE}+")
_SPACES = re.compile(r"[\sĠĊĉ▁]+\Z")
_LONGEST_REMEMBERED = 24
_MOST_REMEMBERED = 8192


@dataclass(frozen=True)
class Control:
    """A control token at characters [start, end)."""

    start: int
    end: int
    id: int


@dataclass(frozen=True)
class Piece:
    """Tokens [first, last) of a stretch of text, or of one control token (text is "")."""

    text: str
    place: Place
    first: int
    last: int


@dataclass(frozen=True)
class Tokenized:
    """ids, the pieces that they come from, and the token index at each cut (a character)."""

    ids: list[int]
    pieces: list[Piece]
    token_at: dict[int, int]


class TextTokenizer:
    """A tokenizer taken apart: its control tokens, and encoders that know none of them.

    Raises RecipeError for a tokenizer without the `tokenizers` backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            expected = "a tokenizer with a `tokenizers` backend (tokenizer.json)"
            raise RecipeError(Problem("model", expected, type(tokenizer).__name__))
        description = json.loads(backend.to_str())
        description["truncation"] = description["padding"] = None
        description["post_processor"] = None
        self.fingerprint = content_hash([description, _additions(backend)])
        self.controls: dict[str, int] = {}
        self._swallows: dict[int, tuple[bool, bool]] = {}
        for token in description["added_tokens"]:
            if _SPACES.match(token["content"]):
                continue  # runs of white space are ordinary text under another name
            self.controls[token["content"]] = token["id"]
            self._swallows[token["id"]] = (token["lstrip"], token["rstrip"])
            token["special"] = True  # so that `encode_special_tokens` covers it
        self.control_ids = frozenset(self.controls.values())
        self.unknown_id = self.controls.get(str(getattr(tokenizer, "unk_token", None)), -1)
        self.markers = tuple(name for name in ASSISTANT_MARKERS if name in self.controls)
        self._control_pattern = _any_of(self.controls)
        self._marker_pattern = _any_of(self.markers)
        self._encoders = _encoders(description)
        self._remembered: dict[tuple[Place, str], list[int]] = {}

    def ids(self, text: str, place: Place = "start") -> list[int]:
        """`text` as text: no control token, whatever it says."""
        if len(text) > _LONGEST_REMEMBERED:
            return self._ids(text, place)
        key = (place, text)
        found = self._remembered.get(key)
        if found is None:
            found = self._ids(text, place)
            if len(self._remembered) < _MOST_REMEMBERED:
                self._remembered[key] = found
        return found

    def _ids(self, text: str, place: Place) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._encoders[place].encode(text, add_special_tokens=False).ids
        if self._has_control(text, ids):
            parts = self._broken(text, place)
            return [number for part, where in parts for number in self._checked(part, where)]
        return ids

    def _has_control(self, text: str, ids: Sequence[int]) -> bool:
        if self.control_ids.isdisjoint(ids):
            return False
        found = self.control_ids.intersection(ids)
        if self.unknown_id in found and not any(
            name in text for name, number in self.controls.items() if number == self.unknown_id
        ):
            found -= {self.unknown_id}  # an unknown character, not the token's name
        return bool(found)

    def _broken(self, text: str, place: Place) -> list[tuple[str, Place]]:
        """The text cut inside every control name, for models that hold the names as words."""
        cuts = [match.start() + 1 for match in re.finditer(self._control_pattern, text)]
        bounds = [0, *cuts, len(text)]
        return [
            (text[start:end], place if start == 0 else "inside") for start, end in pairwise(bounds)
        ]

    def _checked(self, text: str, place: Place) -> list[int]:
        ids: list[int] = self._encoders[place].encode(text, add_special_tokens=False).ids
        if self._has_control(text, ids):
            expected = "a tokenizer that can spell the names of its control tokens as text"
            raise RecipeError(Problem("model", expected, text[:40]))
        return ids

    def ids_and_bytes(self, text: str, place: Place = "start") -> tuple[list[int], list[int]]:
        """`ids(text)`, and the UTF-8 bytes that each token accounts for; they add up to all.

        A character spread over several tokens counts at the first of them.
        """
        parts: list[tuple[str, Place]] = [(text, place)]
        encoding = self._encoders[place].encode(text, add_special_tokens=False)
        if self._has_control(text, encoding.ids):
            parts = self._broken(text, place)
        ids: list[int] = []
        counts: list[int] = []
        for part, where in parts:
            if len(parts) > 1:
                encoding = self._encoders[where].encode(part, add_special_tokens=False)
            ids += encoding.ids
            ends = [end for _, end in encoding.offsets]
            if ends:
                ends[-1] = len(part)
            done = 0
            for end in ends:
                counts.append(utf8_bytes(part[done:end]))
                done = max(end, done)
        return ids, counts

    def controls_in(self, rendered: Rendered, assistant: Collection[int]) -> list[Control]:
        """Control tokens that the template wrote, and markers in messages of `assistant`."""
        found = [
            Control(match.start(), match.end(), self.controls[match[0]])
            for run in _TEMPLATE_RUN.finditer(rendered.codes)
            for match in self._control_pattern.finditer(rendered.text, run.start(), run.end())
        ]
        if self.markers and assistant:
            found += [
                Control(match.start(), match.end(), self.controls[match[0]])
                for run in rendered.runs
                if run.owner in assistant
                for match in self._marker_pattern.finditer(rendered.text, run.start, run.end)
            ]
            found.sort(key=lambda control: control.start)
        return found

    def tokenize(
        self, rendered: Rendered, controls: Sequence[Control], boundaries: Collection[int]
    ) -> Tokenized:
        """Ids of a rendered chat; `boundaries` are characters where a token must end."""
        cuts = set(boundaries)
        events = [(cut, cut, -1) for cut in cuts] + [
            (control.start, control.end, control.id)
            for control in controls
            if not any(control.start < cut < control.end for cut in cuts)
        ]
        events.sort()
        events.append((len(rendered.text), len(rendered.text), -1))
        ids: list[int] = []
        pieces: list[Piece] = []
        token_at: dict[int, int] = {}
        position = 0
        place: Place = "start"
        previous: tuple[int, int] = (-1, -1)  # the control token just written, and its end

        for start, end, number in events:
            begin, stop = position, start
            if previous[1] == begin and self._swallows[previous[0]][1]:
                while begin < stop and _template_space(rendered, begin):
                    begin += 1
            if number >= 0 and self._swallows[number][0]:
                while stop > begin and _template_space(rendered, stop - 1):
                    stop -= 1
            if stop > begin:
                text = rendered.text[begin:stop]
                first = len(ids)
                ids += self.ids(text, place)
                pieces.append(Piece(text, place, first, len(ids)))
                place = "inside"
            if number >= 0:
                pieces.append(Piece("", "inside", len(ids), len(ids) + 1))
                ids.append(number)
                place, previous = "after_control", (number, end)
            position = end
            token_at[end] = len(ids)
        return Tokenized(ids, pieces, token_at)


def utf8_bytes(text: str) -> int:
    """Length in UTF-8; a lone surrogate counts as the three bytes of its escaped form."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _template_space(rendered: Rendered, index: int) -> bool:
    return rendered.codes[index] == TEMPLATE and rendered.text[index].isspace()


def _any_of(names: Collection[str]) -> re.Pattern[str]:
    """Matches the longest of the names; nothing when there are none."""
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _additions(backend: Any) -> list[int]:
    """What the tokenizer would put around a text by itself."""
    return list(backend.encode("a", add_special_tokens=True).ids)


def _encoders(description: dict[str, Any]) -> dict[Place, Tokenizer]:
    """One tokenizer per place, shared where a place makes no difference."""
    built: dict[str, Tokenizer] = {}
    encoders: dict[Place, Tokenizer] = {}
    places: tuple[Place, ...] = ("start", "after_control", "inside")
    for place in places:
        parts = {
            "normalizer": _without_prefix(description["normalizer"], place),
            "pre_tokenizer": _without_prefix(description["pre_tokenizer"], place),
        }
        key = json.dumps(parts)
        if key not in built:
            built[key] = Tokenizer.from_str(json.dumps({**description, **parts}))
            built[key].encode_special_tokens = True
        encoders[place] = built[key]
    return encoders


def _without_prefix(part: Any, place: Place) -> Any:
    """A normalizer or pre-tokenizer that puts no space where `place` has none.

    At the start of a text and after a control token tokenizers do as they always do,
    except that the scheme "first" means the start only; inside a text, none does.
    """
    if place == "start" or not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        inner = [_without_prefix(step, place) for step in part[key]]
        return {**part, key: [step for step in inner if step is not None]}
    if kind == "Metaspace" and (place == "inside" or part.get("prepend_scheme") == "first"):
        return {**part, "prepend_scheme": "never"}
    if place == "inside" and kind == "Prepend":
        return None
    if place == "inside" and kind == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part
