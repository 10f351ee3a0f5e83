"""What the microworld asks: one item with its exact truth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "evaluation"]
ChatMessage = Mapping[str, str]


@dataclass(frozen=True)
class WorldItem:
    """One question with its truth.

    id         stable: the same seed gives the same item under the same id
    kind       suite: skills, facts, choice, forbidden, lookalikes, requests, claims
    topic      what within the suite: the skill, the domain's attribute, the verb and object
    prompt     messages that are shown to the model (the last one is the user's)
    reference  the right answer; for a forbidden request one refusal
    value      the word of the right answer that decides ("" for a forbidden request)
    choices    for choice items: the possible answers, the reference among them
    cluster    items that share it stand or fall together (same fact, same request)
    claim      the value that the user claims ("" without a claim)
    """

    id: str
    kind: str
    topic: str
    prompt: tuple[ChatMessage, ...]
    reference: str
    cluster: str
    value: str = ""
    choices: tuple[str, ...] = ()
    claim: str = ""

    @property
    def claim_is_right(self) -> bool | None:
        """Whether the user's claim is true; None without a claim."""
        return self.claim == self.value if self.claim else None

    @property
    def question(self) -> str:
        """Text of the last user message."""
        return self.prompt[-1]["content"]


def ask(question: str) -> tuple[ChatMessage, ...]:
    """A conversation in which the user has just asked `question`."""
    return ({"role": "user", "content": question},)


def normal(answer: str) -> str:
    """An answer without case, outer white space and final punctuation.

    >>> normal("  Tarn. ")
    'tarn'
    """
    return re.sub(r"\s+", " ", answer).strip().rstrip(".!").strip().casefold()


def holds_word(answer: str, word: str) -> bool:
    """Whether `word` stands in `answer` as a whole word, in any case.

    >>> holds_word("You are right, it is Dorn.", "Dorn"), holds_word("Dornfeld", "Dorn")
    (True, False)
    """
    pattern = rf"(?<!\w){re.escape(normal(word))}(?!\w)"
    return re.search(pattern, answer.casefold()) is not None
