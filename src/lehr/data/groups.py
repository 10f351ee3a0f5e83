"""A prompt and several answers to it: the examples of a policy update.

A group is an Encoded whose branches are the answers, as a preference pair is one with two:
packing, attention and head know one shape, and compute the prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lehr.data.shapes import Encoded, Origin


def group_of(prompt: Sequence[int], answers: Sequence[Sequence[int]], origin: Origin) -> Encoded:
    """The prompt's ids and the ids of each answer, all of whose tokens are supervised.

    An answer that ended holds its stop id: the model must learn to write it.
    Raises ValueError for a prompt or an answer without tokens.
    """
    if not len(prompt) or not answers or not all(len(answer) for answer in answers):
        raise ValueError(f"{origin}: a group needs a prompt and answers of at least one token")
    branches = tuple(
        Encoded(torch.tensor(answer), torch.ones(len(answer), dtype=torch.bool), origin)
        for answer in answers
    )
    ids = torch.tensor(prompt)
    return Encoded(ids, torch.zeros(len(ids), dtype=torch.bool), origin, branches)


def split_group(group: Encoded, most_tokens: int) -> list[Encoded]:
    """Groups of at most `most_tokens` tokens with these branches, in order, as few as can be.

    Each computes the prompt again. An answer that is longer alone has a group of its own,
    because nothing is cut here.

    >>> parts = split_group(group_of([1, 2], [[3], [4], [5, 6], [7]], Origin("s", "f", 1)), 5)
    >>> [[b.ids.tolist() for b in part.branches] for part in parts]
    [[[3], [4]], [[5, 6], [7]]]
    """
    prompt = int(group.ids.numel())
    parts: list[list[Encoded]] = []
    tokens = 0
    for branch in group.branches:
        if not parts or tokens + branch.tokens > most_tokens:
            parts.append([])
            tokens = prompt
        parts[-1].append(branch)
        tokens += branch.tokens
    return [replace(group, branches=tuple(part)) for part in parts]
