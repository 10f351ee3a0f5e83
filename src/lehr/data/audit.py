"""What a person should know about the data before training on it.

Findings never change the data: each is counted, in one plain sentence, with the first places
where it can be seen. Contents are not quoted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

from lehr.data.messages import is_blank
from lehr.data.near_duplicates import Print, near_duplicates, near_matches, prints_of
from lehr.data.shapes import Encoded, Example, Message, Origin
from lehr.streams import content_hash

PLACES_SHOWN = 5
LONG_CHARACTERS = 20_000  # some 5,000 tokens of English
NEAR_ROWS = 20_000  # rows compared for near-duplicates: the first ones, so that it takes seconds
_BIAS_PAIRS = 20
_BIAS_SHARE = 0.1  # from a half: less is harmless even where it is certain
_BIAS_Z = 2.58  # 1 % two-sided
_CONTROL = re.compile(
    r"<[|｜][^|｜<>\s]{1,40}[|｜]>|</?s>|<(?:unk|pad|bos|eos|mask|start_of_turn|end_of_turn)>"
    r"|\[/?INST\]|<</?SYS>>"
)


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing. `count` rows; `examples` are the first places, file:line."""

    kind: str
    count: int
    examples: list[str]
    source: str
    sentence: str

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "count": self.count,
            "examples": list(self.examples),
            "source": self.source,
            "sentence": self.sentence,
        }


def findings(
    examples_by_source: Mapping[str, Sequence[Example]],
    encoded_by_source: Mapping[str, Sequence[Encoded]] | None = None,
    heldout_by_source: Mapping[str, Sequence[Example]] | None = None,
) -> list[Finding]:
    """All findings, source by source: first what spoils a measurement, then what spoils training.

    `examples_by_source` are the rows to train on, `heldout_by_source` those held out.
    """
    heldout_by_source = heldout_by_source or {}
    found: list[Finding] = []
    for source, train in examples_by_source.items():
        heldout = heldout_by_source.get(source, ())
        examples = [*train, *heldout]
        found += _copies(source, train, heldout)
        found += _pairs(source, [example for example in examples if example.kind == "pair"])
        found += _conflicts(source, examples)
        for check in _ROW_CHECKS:
            found += check(source, examples)
    found += _across_sources(examples_by_source)
    found += _held_out_elsewhere(examples_by_source, heldout_by_source)
    for source, encoded in (encoded_by_source or {}).items():
        found += _unsupervised(source, encoded)
    return found


def _finding(
    kind: str, source: str, places: Iterable[Origin], sentence: str, unit: str = "row"
) -> list[Finding]:
    """The finding for these places, or none where there is no place. {n} is "12 rows"."""
    listed = [str(place) for place in places]
    if not listed:
        return []
    text = sentence.format(n=f"{len(listed):,} {unit if len(listed) == 1 else unit + 's'}")
    return [Finding(kind, len(listed), listed[:PLACES_SHOWN], source, text)]


def text_of(example: Example) -> str:
    """What the row says, without system messages (a shared one would make all rows alike)."""
    turns = (*example.messages, *example.chosen, *example.rejected)
    said = [str(turn["content"]) for turn in turns if turn["role"] not in ("system", "developer")]
    return "\n".join([example.text, *said]) if example.text else "\n".join(said)


def _copies(source: str, train: Sequence[Example], heldout: Sequence[Example]) -> list[Finding]:
    """Rows that repeat others, exactly or nearly, and held-out rows that training has seen."""
    examples = [*heldout, *train]
    first: dict[str, int] = {}
    copies: list[Origin] = []
    for index, example in enumerate(examples):
        if first.setdefault(example.content_key(), index) != index:
            copies.append(example.origin)
    distinct = list(first.values())
    compared = distinct[:NEAR_ROWS]
    prints = dict(zip(compared, prints_of([text_of(examples[i]) for i in compared]), strict=True))
    limit = "" if len(compared) == len(distinct) else f" (first {NEAR_ROWS:,} rows compared)"
    near = near_duplicates(list(prints.values()))
    return [
        *_overlap(source, examples, len(heldout), prints, limit),
        *_finding("exact duplicate", source, copies, "{n} saying exactly what another row says"),
        *_finding(
            "near duplicate",
            source,
            (examples[compared[later]].origin for later, _ in near),
            f"{{n}} saying nearly what another row says{limit}",
        ),
    ]


def _overlap(
    source: str, examples: Sequence[Example], heldout: int, prints: Mapping[int, Print], limit: str
) -> list[Finding]:
    """The first `heldout` examples are those held out."""
    held = [index for index in prints if index < heldout]
    matches = near_matches(
        [prints[index] for index in held], [prints[index] for index in prints if index >= heldout]
    )
    return _finding(
        "near overlap of train and held-out",
        source,
        (examples[held[index]].origin for index, _ in matches),
        f"{{n}} of {heldout:,} held out saying nearly what a training row says{limit}: held-out "
        "measures are too good by that much",
    )


def _across_sources(examples_by_source: Mapping[str, Sequence[Example]]) -> list[Finding]:
    owner: dict[str, str] = {}
    places: dict[str, list[Origin]] = {}
    for source, examples in examples_by_source.items():
        for example in examples:
            other = owner.setdefault(example.content_key(), source)
            if other != source:
                places.setdefault(source, []).append(example.origin)
    found: list[Finding] = []
    for source, listed in places.items():
        found += _finding(
            "in two sources", source, listed, "{n} also in another source of the recipe"
        )
    return found


def _held_out_elsewhere(
    examples_by_source: Mapping[str, Sequence[Example]],
    heldout_by_source: Mapping[str, Sequence[Example]],
) -> list[Finding]:
    """Rows that one source holds out and another one trains on."""
    trained: dict[str, list[str]] = {}
    for source, examples in examples_by_source.items():
        for key in {example.content_key() for example in examples}:
            trained.setdefault(key, []).append(source)
    found: list[Finding] = []
    for source, heldout in heldout_by_source.items():
        places: dict[str, list[Origin]] = {}
        for example in heldout:
            for other in trained.get(example.content_key(), ()):
                if other != source:
                    places.setdefault(other, []).append(example.origin)
        for other, listed in places.items():
            found += _finding(
                "held out here, trained on there",
                source,
                listed,
                f"{{n}} of {len(heldout):,} held out also trained on in source {other}: held-out "
                f"measures of {source} are too good; hold the same rows out of both",
            )
    return found


def _said(messages: Sequence[Message]) -> list[tuple[Any, ...]]:
    return [(turn["role"], turn["content"], turn.get("tool_calls")) for turn in messages]


def _pairs(source: str, pairs: Sequence[Example]) -> list[Finding]:
    identical = [p.origin for p in pairs if _said(p.chosen) == _said(p.rejected)]
    found = _finding(
        "identical pair",
        source,
        identical,
        "{n} with the same text on both sides: nothing to learn, counted as ties",
        "pair",
    )
    return found + _length_bias(source, pairs)


def _length_bias(source: str, pairs: Sequence[Example]) -> list[Finding]:
    """Is the better answer mostly the longer (or the shorter) one? Normal test against 1/2."""
    longer: list[Origin] = []
    shorter: list[Origin] = []
    for pair in pairs:
        difference = _characters(pair.chosen) - _characters(pair.rejected)
        if difference:
            (longer if difference > 0 else shorter).append(pair.origin)
    decided = len(longer) + len(shorter)
    if decided < _BIAS_PAIRS:
        return []
    share = len(longer) / decided
    if abs(share - 0.5) < max(_BIAS_SHARE, _BIAS_Z * sqrt(0.25 / decided)):
        return []
    places, word = (longer, "longer") if share > 0.5 else (shorter, "shorter")
    return _finding(
        "length bias",
        source,
        places,
        f"the chosen answer is the {word} one in {len(places) / decided:.0%} of {decided:,} pairs: "
        "the model may learn length instead of quality",
    )


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(str(turn["content"])) for turn in messages)


def _conflicts(source: str, examples: Sequence[Example]) -> list[Finding]:
    """The same prompt with answers, verdicts or preferences that contradict each other."""
    answers: dict[str, dict[str, Origin]] = {}
    verdicts: dict[str, dict[bool | None, Origin]] = {}
    preferred: dict[str, Origin] = {}
    contradicted: list[Origin] = []
    for example in examples:
        if example.kind == "chat" and example.messages[-1]["role"] == "assistant":
            prompt = content_hash(_said(example.messages[:-1]))
            answer = content_hash(_said(example.messages[-1:]))
            answers.setdefault(prompt, {}).setdefault(answer, example.origin)
        elif example.kind == "labelled":
            said = content_hash([_said(example.messages), _said(example.chosen)])
            verdicts.setdefault(said, {}).setdefault(example.label, example.origin)
        elif example.kind == "pair":
            prompt = content_hash(_said(example.messages))
            sides = [content_hash(_said(side)) for side in (example.chosen, example.rejected)]
            if sides[0] != sides[1]:
                preferred.setdefault("".join([prompt, *sides]), example.origin)
                if "".join([prompt, *reversed(sides)]) in preferred:
                    contradicted.append(example.origin)
    return [
        *_finding(
            "several answers to one prompt",
            source,
            (list(places.values())[1] for places in answers.values() if len(places) > 1),
            "{n} with more than one answer",
            "prompt",
        ),
        *_finding(
            "label conflict",
            source,
            (list(places.values())[1] for places in verdicts.values() if len(places) > 1),
            "{n} labelled both good and bad",
            "answer",
        ),
        *_finding(
            "contradicting pair",
            source,
            contradicted,
            "{n} preferring what another pair of the same prompt rejects",
            "pair",
        ),
    ]


def _turns(example: Example) -> tuple[Message, ...]:
    return (*example.messages, *example.chosen, *example.rejected)


def _empty_turns(source: str, examples: Sequence[Example]) -> list[Finding]:
    return _finding(
        "empty turn",
        source,
        (e.origin for e in examples if any(is_blank(turn) for turn in _turns(e))),
        "{n} with a turn that says nothing",
    )


def _repeated_roles(source: str, examples: Sequence[Example]) -> list[Finding]:
    def repeats(example: Example) -> bool:
        roles = [turn["role"] for turn in (*example.messages, *example.chosen)]
        return any(
            left == right and left in ("user", "assistant") for left, right in pairwise(roles)
        )

    return _finding(
        "two turns of one role in a row",
        source,
        (example.origin for example in examples if repeats(example)),
        "{n} with two turns of the same role in a row: some templates refuse them",
    )


def _control_text(source: str, examples: Sequence[Example]) -> list[Finding]:
    def has_control(example: Example) -> bool:
        said = [example.text, *(str(turn["content"]) for turn in _turns(example))]
        return any(_CONTROL.search(text) for text in said)

    return _finding(
        "text that looks like a control token",
        source,
        (example.origin for example in examples if has_control(example)),
        "{n} with text that looks like a control token: it stays text, but it may come from a "
        "chat that was already rendered",
    )


def _long_rows(source: str, examples: Sequence[Example]) -> list[Finding]:
    return _finding(
        "long row",
        source,
        (
            example.origin
            for example in examples
            if len(example.text) + _characters(_turns(example)) > LONG_CHARACTERS
        ),
        f"{{n}} longer than {LONG_CHARACTERS:,} characters",
    )


_ROW_CHECKS: tuple[Callable[[str, Sequence[Example]], list[Finding]], ...] = (
    _empty_turns,
    _repeated_roles,
    _control_text,
    _long_rows,
)


def _unsupervised(source: str, encoded: Sequence[Encoded]) -> list[Finding]:
    return _finding(
        "nothing to learn",
        source,
        (row.origin for row in encoded if row.supervised_tokens == 0),
        "{n} without a token to learn from",
    )
