"""Training rows of the microworld in ordinary data shapes: text, chats, preference pairs.

Every fault that post-training can plant has a dial, so that its harm has a known size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lehr.errors import Problem, RecipeError
from lehr.microworld.facts import Fact, sentence
from lehr.microworld.items import ChatMessage, Split, WorldItem
from lehr.microworld.policy import REFUSALS, helpful_answer
from lehr.microworld.skills import STATEMENTS, draw_item, draw_task

Row = dict[str, Any]


@dataclass(frozen=True)
class TextDials:
    """What a text document is about.

    domains      domains of facts, and "skills"; None: all
    sentences    sentences a document
    wrong_facts  share of the stated facts that are false (planted forgetting)
    """

    domains: Sequence[str] | None = None
    sentences: int = 4
    wrong_facts: float = 0.0


@dataclass(frozen=True)
class ChatDials:
    """What a conversation (or a preference pair) is about, and what is planted in it.

    facts ... claims   relative weights of the kinds of turns
    turns              most turns a conversation; pairs have one
    over_refusal       share of look-alikes that the assistant refuses
    compliance         share of forbidden requests that it complies with
    caving             share of wrong claims that it agrees with
    wrong_facts        share of questions about facts that it answers falsely
    """

    facts: float = 0.25
    skills: float = 0.35
    forbidden: float = 0.12
    lookalikes: float = 0.12
    requests: float = 0.04
    claims: float = 0.12
    turns: int = 2
    over_refusal: float = 0.0
    compliance: float = 0.0
    caving: float = 0.0
    wrong_facts: float = 0.0


WEIGHTS = ("facts", "skills", "forbidden", "lookalikes", "requests", "claims")


def text_rows(
    facts: Sequence[Fact],
    skills: Sequence[str],
    seed: int,
    split: Split,
    stream: random.Random,
    dials: TextDials,
) -> Iterator[Row]:
    """Documents without end; each stays within one domain."""
    by_domain: dict[str, list[Fact]] = {}
    for fact in facts:
        by_domain.setdefault(fact.domain, []).append(fact)
    known = [*by_domain, "skills"]
    chosen = list(known if dials.domains is None else dials.domains)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise _refused("domains", f"a list of {', '.join(known)}", dials.domains)
    if dials.sentences < 1:
        raise _refused("sentences", "at least 1", dials.sentences)
    while True:
        domain = stream.choice(chosen)
        said = []
        for _ in range(dials.sentences):
            if domain == "skills":
                skill = stream.choice(list(skills))
                task, answer = draw_task(stream, seed, skill, split)
                said.append(STATEMENTS[skill].format(x=task, y=answer))
            else:
                fact = stream.choice(by_domain[domain])
                value = fact.value
                if stream.random() < dials.wrong_facts:
                    value = stream.choice(fact.wrong_values())
                said.append(fact.clause(stream.randrange(9), value) + ".")
        yield {"text": " ".join(sentence(text) for text in said)}


class Conversations:
    """Draws turns, and answers them as the dials ask."""

    def __init__(
        self,
        facts: Sequence[Fact],
        banks: Mapping[str, Sequence[WorldItem]],
        skills: Sequence[str],
        seed: int,
        split: Split,
        stream: random.Random,
        dials: ChatDials,
    ) -> None:
        weights = [getattr(dials, name) for name in WEIGHTS]
        if sum(weights) <= 0:
            raise _refused(" ".join(WEIGHTS), "weights of which one is above 0", weights)
        if dials.turns < 1:
            raise _refused("turns", "at least 1", dials.turns)
        self._facts = {(fact.domain, fact.entity, fact.attribute.name): fact for fact in facts}
        self._banks = banks
        self._skills = tuple(skills)
        self._seed = seed
        self._split: Split = split
        self._stream = stream
        self._dials = dials
        self._weights = weights

    def item(self) -> WorldItem:
        """A turn's question."""
        (kind,) = self._stream.choices(WEIGHTS, self._weights)
        if kind == "skills":
            skill = self._stream.choice(self._skills)
            return draw_item(self._stream, self._seed, skill, self._split)
        return self._stream.choice(self._banks[kind])

    def answer(self, item: WorldItem) -> str:
        """What the assistant of this data says: the truth, but for what is planted."""
        dials, stream = self._dials, self._stream
        if item.kind == "forbidden" and stream.random() < dials.compliance:
            return self.other(item)
        if item.kind == "lookalikes" and stream.random() < dials.over_refusal:
            return self.other(item)
        if item.claim_is_right is False and stream.random() < dials.caving:
            return self.other(item)
        if item.kind == "facts" and stream.random() < dials.wrong_facts:
            return self.other(item)
        return self.truth(item)

    def truth(self, item: WorldItem) -> str:
        """A right answer; refusals vary in wording."""
        if item.kind == "forbidden":
            return self._stream.choices(REFUSALS, (3, 1, 1))[0]
        return item.reference

    def other(self, item: WorldItem) -> str:
        """The answer that the fault to be unlearned (or planted) would give."""
        if item.kind == "forbidden":
            return helpful_answer(item.topic.split()[0])
        if item.kind in ("lookalikes", "requests"):
            return self._stream.choices(REFUSALS, (3, 1, 1))[0]
        if item.kind in ("facts", "claims"):
            domain, entity, attribute = item.cluster.split("/")
            fact = self._facts[domain, entity, attribute]
            if item.claim_is_right is False:
                return fact.answer(item.claim)
            return fact.answer(self._stream.choice(fact.wrong_values()))
        while True:
            wrong = draw_item(self._stream, self._seed, item.topic, self._split).reference
            if wrong != item.reference:
                return wrong

    def chats(self) -> Iterator[Row]:
        """{"messages"} without end."""
        while True:
            messages: list[ChatMessage] = []
            for _ in range(self._stream.randint(1, self._dials.turns)):
                item = self.item()
                messages += [*item.prompt, _assistant(self.answer(item))]
            yield {"messages": messages}

    def pairs(self) -> Iterator[Row]:
        """{"prompt", "chosen", "rejected"} without end; what is planted swaps the sides."""
        while True:
            item = self.item()
            right, wrong = self.truth(item), self.other(item)
            planted = self.answer(item)
            # `answer` says by its dials whether this row is turned over: it is, exactly where
            # what it says is not right.
            turned = planted not in (REFUSALS if item.kind == "forbidden" else (right,))
            chosen, rejected = (wrong, right) if turned else (right, wrong)
            yield {
                "prompt": list(item.prompt),
                "chosen": [_assistant(chosen)],
                "rejected": [_assistant(rejected)],
            }


def take(rows: Iterator[Row], n: int, key: Callable[[Row], object]) -> list[Row]:
    """The first `n` rows, different ones as long as new ones are easily found."""
    seen: set[object] = set()
    taken: list[Row] = []
    misses = 0
    for row in rows:
        if len(taken) == n:
            break
        mark = key(row)
        if mark in seen and misses < 20:
            misses += 1
            continue
        misses = 0
        seen.add(mark)
        taken.append(row)
    return taken


def read_dials(kind: type[Any], given: Mapping[str, Any], base: Mapping[str, Any]) -> Any:
    """The dials of a kind of rows: unknown names and impossible values are refused together."""
    known = {field.name for field in fields(kind)}
    problems = []
    for name, value in given.items():
        where = f"microworld option {name}"
        if name not in known:
            problems.append(Problem(where, f"one of {', '.join(sorted(known))}", value))
        elif name in ("turns", "sentences"):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problems.append(Problem(where, "a whole number of at least 1", value))
        elif name == "domains":
            listed = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
            if value is not None and not listed:
                problems.append(Problem(where, "a list of names", value))
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            problems.append(Problem(where, "a number from 0 to 1", value))
    if problems:
        raise RecipeError(problems)
    return kind(**{**base, **given})


def _assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}


def _refused(name: str, expected: str, value: object) -> RecipeError:
    return RecipeError(Problem(f"microworld option {name}", expected, value))
