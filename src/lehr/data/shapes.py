"""The shapes that data passes through: row -> Example -> Encoded -> Pack.

Nothing is shifted. A Pack carries explicit pairs: hidden position
`predict_from[r]` predicts token `targets[r]`; teacher forcing, masks, packing and
shared prompts are all a choice of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lehr.device import moved
from lehr.streams import content_hash

Message = Mapping[str, Any]  # {"role", "content", and perhaps "tool_calls", "train", ...}
ExampleKind = Literal["text", "chat", "pair", "labelled"]


@dataclass(frozen=True)
class Origin:
    """Where a row came from. `line` counts from 1 (row number in containers without lines)."""

    source: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Example:
    """One row after reading.

    kind      text      `text`
              chat      `messages`: the whole conversation
              pair      `messages`: the prompt; `chosen` and `rejected` continue it
              labelled  `messages`: the prompt; `chosen` continues it; `label` is its verdict
    """

    kind: ExampleKind
    origin: Origin
    text: str = ""
    messages: tuple[Message, ...] = ()
    chosen: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    label: bool | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    def content_key(self) -> str:
        """Hash of what the row says, wherever it stands: decides the hold-out side."""
        sides = [self.messages, self.chosen, self.rejected]
        return content_hash([self.kind, self.text, *sides, self.label, self.tools])


@dataclass(frozen=True)
class Encoded:
    """One example, tokenised.

    ids              int64 [t]
    supervised       bool [t]: this token is a target, predicted from the position before it
    branches         () or continuations of this prompt: (chosen, rejected), or a group
    supervised_bytes UTF-8 bytes of the supervised text (for bits per byte)

    A branch's first token is predicted from the last position of its prompt. In an
    example without branches token 0 has no position before it and is never supervised.
    """

    ids: Tensor
    supervised: Tensor
    origin: Origin
    branches: tuple[Encoded, ...] = ()
    supervised_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the example with its branches, the prompt counted once."""
        return int(self.ids.numel()) + sum(branch.tokens for branch in self.branches)

    @property
    def unshared_tokens(self) -> int:
        """Tokens where each branch is a row of its own, with the prompt before it."""
        if not self.branches:
            return self.tokens
        return self.tokens + (len(self.branches) - 1) * int(self.ids.numel())

    @property
    def supervised_tokens(self) -> int:
        return int(self.supervised.sum()) + sum(b.supervised_tokens for b in self.branches)


@dataclass(frozen=True)
class Segments:
    """Who may look at whom: each segment is causal in itself and sees all of its prefix segment.

    start   int64 [S] first position in the pack
    length  int64 [S]
    prefix  int64 [S] index of the segment that it continues, or -1
    """

    start: Tensor
    length: Tensor
    prefix: Tensor


@dataclass(frozen=True)
class Pack:
    """Several Encoded in one row of tokens.

    ids, positions   int64 [T]; positions restart per example, a branch continues its prompt's
    segments         as above
    predict_from     int64 [R] hidden positions that go through the head, ordered by sequence
    targets          int64 [R]
    sequence         int64 [R] which sequence each pair belongs to
    weights          float32 [R]
    sequence_example int64 [Q] which example (of this pack) each sequence belongs to;
                     an example without branches is one sequence, else each branch is one
    items            dataset index of each example of this pack
    origins          origin of each example of this pack
    """

    ids: Tensor
    positions: Tensor
    segments: Segments
    predict_from: Tensor
    targets: Tensor
    sequence: Tensor
    weights: Tensor
    sequence_example: Tensor
    items: tuple[int, ...]
    origins: tuple[Origin, ...]

    @property
    def tokens(self) -> int:
        return int(self.ids.numel())

    @property
    def sequences(self) -> int:
        return int(self.sequence_example.numel())

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum of per-pair `values` [R] over each sequence -> [Q]."""
        total = torch.zeros(self.sequences, dtype=values.dtype, device=values.device)
        return total.index_add(0, moved(self.sequence, values.device), values)
