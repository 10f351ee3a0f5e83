"""The decoding loop: prompts wait, rows are decoded together, a finished one makes room.

What computes is behind `Batch`; what is written does not depend on it, nor on who shares
the batch: a row's random numbers are its item's, and its positions are its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lehr.errors import Diverged, Problem
from lehr.generation.sampling import Sampling, sample_rows
from lehr.generation.stops import StopStrings


@dataclass(frozen=True)
class Group:
    """One distinct prompt and the answers wanted for it: each answer serves some items."""

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


class Batch(Protocol):
    """Rows that are decoded together, by whatever computes them."""

    joins: bool  # prompts may be admitted, and groups divided, while others are being decoded

    def admit(self, groups: Sequence[Group]) -> Tensor:
        """Rows for each answer of `groups`, after those that are there -> their logits [n, V]."""

    def keep(self, rows: Sequence[int]) -> Sequence[int]:
        """Remove all rows but these -> for each row from now on, which one it was."""

    def step(self, tokens: Tensor) -> Tensor:
        """One more token [n] a row -> the next one's fp32 logits [n, V]."""


@dataclass
class Row:
    """An answer in the making."""

    items: tuple[int, ...]
    budget: int
    ids: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    stopped: bool = False
    stop_string: str | None = None


@dataclass(frozen=True)
class Ending:
    """What ends a row: these ids, these strings, or its budget of tokens."""

    stop_ids: frozenset[int]
    budget: Callable[[int], int]  # by the prompt's length
    strings: StopStrings | None = None

    def ends(self, row: Row) -> bool:
        """Whether the token that `row` just wrote was its last; notes why."""
        row.stopped = row.ids[-1] in self.stop_ids
        if self.strings is not None and not row.stopped:
            row.stop_string = self.strings.found(row.ids)
        return row.stopped or row.stop_string is not None or len(row.ids) >= row.budget


def decode_rows(
    batch: Batch,
    groups: Sequence[Group],
    rows_at_once: int,
    sampling: Sampling,
    uniform: Tensor | None,
    ending: Ending,
) -> list[Row]:
    """Every answer of `groups`, in no particular order.

    uniform  float64 [items, tokens], keyed by item; None where greedy
    Raises Diverged for logits that are not finite, with the prompt's first item.
    """
    waiting = deque(groups if batch.joins else _at_most(groups, rows_at_once))
    live: list[Row] = []
    done: list[Row] = []
    logits: Tensor | None = None
    while live or waiting:
        new = _next_to_admit(waiting, rows_at_once, len(live), batch.joins)
        if new:
            first = batch.admit(new)
            logits = first if logits is None or not live else torch.cat([logits, first])
            live += [
                Row(answer, ending.budget(len(group.prompt)))
                for group in new
                for answer in group.answers
            ]
        assert logits is not None
        chosen = _write(live, logits, sampling, uniform)
        finished = [ending.ends(row) for row in live]
        if any(finished):
            done += [row for row, end in zip(live, finished, strict=True) if end]
            kept = batch.keep([index for index, end in enumerate(finished) if not end])
            live, chosen = [live[index] for index in kept], chosen[list(kept)]
        if live:
            logits = batch.step(chosen)
    return done


def _at_most(groups: Sequence[Group], rows: int) -> list[Group]:
    """Groups of no more answers than are decoded at once: only larger ones are divided."""
    return [
        Group(group.prompt, group.answers[start : start + rows])
        for group in groups
        for start in range(0, len(group.answers), rows)
    ]


def _next_to_admit(waiting: deque[Group], rows: int, live: int, joins: bool) -> list[Group]:
    """Groups for the free rows. A few rows wait for more: prompts are cheaper together."""
    room = rows - live
    if live and (not joins or room < max(1, rows // 8)):
        return []
    new: list[Group] = []
    while waiting and (room if joins else len(waiting[0].answers) <= room):
        group = waiting.popleft()
        new.append(Group(group.prompt, group.answers[:room]))
        if group.answers[room:]:
            waiting.appendleft(Group(group.prompt, group.answers[room:]))
        room -= len(new[-1].answers)
    return new


def _write(
    live: Sequence[Row], logits: Tensor, sampling: Sampling, uniform: Tensor | None
) -> Tensor:
    """Choose a token for every row and write it down with its log-probability."""
    if uniform is None:
        chosen = logits.argmax(dim=-1)
    else:
        items = [row.items[0] for row in live]
        steps = [len(row.ids) for row in live]
        chosen = sample_rows(logits, sampling, uniform[items, steps])
    picked = logits.gather(-1, chosen[:, None]).squeeze(-1)
    values = (picked - torch.logsumexp(logits, dim=-1)).tolist()
    for row, token, value in zip(live, chosen.tolist(), values, strict=True):
        if not math.isfinite(value):
            raise Diverged(
                Problem(f"generation, prompt {row.items[0]}", "finite logits from the model")
            )
        row.ids.append(token)
        row.log_probabilities.append(value)
    return chosen
