"""A model that is a table: the next token's logits depend on the last token only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lehr.data.shapes import Origin, Pack, Segments
from lehr.streams import generator_for

VOCABULARY = 7


@dataclass(frozen=True)
class Stats:
    log_probability: Tensor
    log_z: Tensor
    argmax: Tensor | None


class TableModel(nn.Module):
    """`hidden` looks a row of logits up; `token_stats` normalises it."""

    def __init__(self) -> None:
        super().__init__()
        stream = generator_for("table")
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=stream))

    def hidden(self, pack: Pack) -> Tensor:
        return self.table[pack.ids]

    def token_stats(
        self, hidden: Tensor, predict_from: Tensor, targets: Tensor, argmax: bool = False
    ) -> Stats:
        logits = hidden[predict_from]
        chosen = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        best = logits.argmax(-1) if argmax else None
        return Stats(chosen, torch.logsumexp(logits, -1), best)

    def log_probability(self, token: int, target: int) -> float:
        return float(torch.log_softmax(self.table[token].detach(), -1)[target])


def text_pack(rows: list[list[int]], sources: list[str] | None = None) -> Pack:
    """Plain rows, every token after the first supervised, weight 1."""
    return _pack([([], [row]) for row in rows], sources, skip_first=True)


def pair_pack(pairs: list[tuple[list[int], list[int], list[int]]]) -> Pack:
    """(prompt, chosen, rejected) of each example, the prompt stored once."""
    return _pack([(prompt, [chosen, rejected]) for prompt, chosen, rejected in pairs], None)


def _pack(
    examples: list[tuple[list[int], list[list[int]]]],
    sources: list[str] | None,
    skip_first: bool = False,
) -> Pack:
    ids: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, int, int]] = []
    pairs: list[tuple[int, int, int]] = []
    example_of: list[int] = []
    for example, (prompt, answers) in enumerate(examples):
        prompt_segment = -1
        if prompt:
            prompt_segment = len(segments)
            segments.append((len(ids), len(prompt), -1))
            positions += range(len(prompt))
            ids += prompt
        last_of_prompt = len(ids) - 1
        for answer in answers:
            start, sequence = len(ids), len(example_of)
            example_of.append(example)
            segments.append((start, len(answer), prompt_segment))
            positions += range(len(prompt), len(prompt) + len(answer))
            ids += answer
            for offset, target in enumerate(answer):
                if offset == 0 and skip_first:
                    continue
                before = start + offset - 1 if offset else last_of_prompt
                pairs.append((before, target, sequence))
    columns = [torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True)]
    start, length, prefix = (
        torch.tensor(column, dtype=torch.int64) for column in zip(*segments, strict=True)
    )
    names = sources or ["rows"] * len(examples)
    return Pack(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        segments=Segments(start, length, prefix),
        predict_from=columns[0],
        targets=columns[1],
        sequence=columns[2],
        weights=torch.ones(len(pairs)),
        sequence_example=torch.tensor(example_of),
        items=tuple(range(len(examples))),
        origins=tuple(Origin(name, f"{name}.jsonl", i + 1) for i, name in enumerate(names)),
    )
