"""What became of one example: its tokens, or the reason why it was dropped."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lehr.data.formats import Dropped
from lehr.data.shapes import Encoded, Origin

DROPPED_NO_ANSWER = "no answer to train on"
DROPPED_EMPTY = "empty answer"
DROPPED_TOO_LONG = "longer than max_length"
DROPPED_UNSUPERVISED = "no supervised token within max_length"
DROPPED_BRANCH = "a continuation does not begin with an answer"
DROPPED_PROMPT = "the template renders the prompt otherwise once an answer follows"
DROPPED_UNICODE = "text is not valid Unicode"
NOTE_EQUAL_BRANCHES = "chosen and rejected are equal within max_length"


@dataclass
class Encoding:
    """What one example became.

    encoded         usually one; several for a text of many blocks or a chat split by turn
    dropped         why it, or a part of it, was not used
    notes           what a person should know, each with the row at its end
    kept_tokens, dropped_tokens   together all tokens that the example was worth
    """

    encoded: list[Encoded] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept_tokens: int = 0
    dropped_tokens: int = 0

    def drop(self, reason: str, origin: Origin, tokens: int = 0) -> None:
        """Leave the example, or this part of it, out; `tokens` is what it was worth."""
        self.dropped.append(Dropped(reason, origin))
        self.dropped_tokens += tokens

    def settle(self, origin: Origin) -> None:
        """A row is either used or dropped: parts left out of a used row become notes."""
        if self.encoded:
            self.notes += [f"a part of the row was left out: {d.reason}" for d in self.dropped]
            self.dropped = []
        else:
            self.dropped = self.dropped[:1]
        self.notes = [f"{note} ({origin})" for note in dict.fromkeys(self.notes)]


def as_encoded(
    ids: list[int],
    supervised: list[bool],
    origin: Origin,
    supervised_bytes: int,
    branches: tuple[Encoded, ...] = (),
) -> Encoded:
    """Lists as the tensors of an Encoded."""
    return Encoded(
        ids=torch.tensor(ids, dtype=torch.int64),
        supervised=torch.tensor(supervised, dtype=torch.bool),
        origin=origin,
        branches=branches,
        supervised_bytes=supervised_bytes,
    )
