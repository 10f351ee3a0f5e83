"""A small module with dropout, a deterministic source of packs, and runs of the engine on them.

Imported by the tests of the engine and by the fresh processes that they start.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lehr.data.shapes import Origin, Pack, Segments
from lehr.objectives.base import Loss
from lehr.streams import generator_for
from lehr.training.engine import Engine
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

VOCABULARY = 11


def make_pack(ids: list[int], item: int = 0, weights: list[float] | None = None) -> Pack:
    """One example of `ids`, every token after the first supervised."""
    pairs = len(ids) - 1
    return Pack(
        ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        segments=Segments(torch.tensor([0]), torch.tensor([len(ids)]), torch.tensor([-1])),
        predict_from=torch.arange(pairs),
        targets=torch.tensor(ids[1:]),
        sequence=torch.zeros(pairs, dtype=torch.int64),
        weights=torch.tensor(weights if weights is not None else [1.0] * pairs),
        sequence_example=torch.tensor([0]),
        items=(item,),
        origins=(Origin("small", "small.jsonl", item + 1),),
    )


def merge_packs(packs: list[Pack]) -> Pack:
    """A plain concatenation: enough for modules that look at one token at a time."""
    starts = [sum(pack.tokens for pack in packs[:index]) for index in range(len(packs))]
    counts = [sum(p.sequences for p in packs[:index]) for index in range(len(packs))]
    joined = list(zip(packs, starts, counts, strict=True))
    return Pack(
        ids=torch.cat([p.ids for p in packs]),
        positions=torch.cat([p.positions for p in packs]),
        segments=Segments(
            torch.cat([p.segments.start + start for p, start, _ in joined]),
            torch.cat([p.segments.length for p in packs]),
            torch.cat([p.segments.prefix for p in packs]),
        ),
        predict_from=torch.cat([p.predict_from + start for p, start, _ in joined]),
        targets=torch.cat([p.targets for p in packs]),
        sequence=torch.cat([p.sequence + count for p, _, count in joined]),
        weights=torch.cat([p.weights for p in packs]),
        sequence_example=torch.cat([p.sequence_example + count for p, _, count in joined]),
        items=tuple(item for p in packs for item in p.items),
        origins=tuple(origin for p in packs for origin in p.origins),
    )


def rows(count: int, shortest: int = 3, longest: int = 7) -> list[Pack]:
    """`count` packs of uneven length with fixed random ids."""
    stream = generator_for("rows", count)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=stream).tolist()
    return [
        make_pack(torch.randint(0, VOCABULARY, (length,), generator=stream).tolist(), item)
        for item, length in enumerate(lengths)
    ]


class Cycle:
    """Packs in seeded order, `size` an update, the last update of a pass may be smaller."""

    def __init__(self, packs: list[Pack], size: int) -> None:
        self.packs, self.size, self.position = packs, size, 0

    @property
    def epoch(self) -> float:
        return self.position / len(self.packs)

    def next(self) -> list[Pack]:
        done, start = divmod(self.position, len(self.packs))
        order = torch.randperm(len(self.packs), generator=generator_for("order", done)).tolist()
        taken = order[start : start + self.size]
        self.position += len(taken)
        return [self.packs[index] for index in taken]

    def state(self) -> Any:
        return {"position": self.position}

    def load(self, state: Any) -> None:
        self.position = state["position"]


class Small(nn.Module):
    """Embedding, dropout, normalised layer, head: next-token logits of each token alone."""

    def __init__(self, dropout: float = 0.1, batch_norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.head = nn.Linear(16, VOCABULARY)
        stream = generator_for("weights")
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=stream) + 0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.up(self.norm(self.drop(self.embed(ids))))))


class NextToken:
    """Weighted cross-entropy as a sum; counts its forward passes."""

    def __init__(self) -> None:
        self.calls = 0

    def weight(self, pack: Pack) -> float:
        return float(pack.weights.sum())

    def loss(self, model: nn.Module, pack: Pack) -> Loss:
        self.calls += 1
        logits = model(pack.ids)[pack.predict_from]
        losses = nn.functional.cross_entropy(logits, pack.targets, reduction="none")
        right = (logits.argmax(-1) == pack.targets).float().sum()
        total = (pack.weights * losses).sum()
        count = float(pack.targets.numel())
        metrics = {"accuracy": (right, count), "source.small.loss": (losses.detach().sum(), count)}
        return Loss(total, metrics)


def evaluate_on(model: nn.Module, packs: list[Pack]) -> Any:
    """A held-out loss per token, for `evaluate`."""

    def evaluate(update: int) -> dict[str, float]:
        objective = NextToken()
        total = sum(float(objective.loss(model, pack).total) for pack in packs)
        return {"loss": total / sum(objective.weight(pack) for pack in packs)}

    return evaluate


def make_engine(folder: Path, updates: int = 12, **changes: Any) -> Engine:
    """An engine on a small run: dropout, AdamW with decay, uneven updates, evaluation."""
    torch.manual_seed(int(time.time_ns()) % 2**31)  # nothing may depend on it
    model = changes.pop("model", None) or Small()
    objective = changes.pop("objective", None) or NextToken()
    batches = changes.pop("batches", None) or Cycle(rows(13), 5)
    evaluate = changes.pop("evaluate", "default")
    if evaluate == "default":
        evaluate = evaluate_on(model, rows(4))
    observers = changes.pop("observers", ())
    key = changes.pop("key", "")
    values = {
        "updates": updates,
        "learning_rate": 0.05,
        "schedule": Schedule(kind="cosine", warmup=0.25),
        "micro_batch": 2,
        "evaluate_every": 4 if evaluate else None,
        "checkpoint_every": 1,
        "stage": "01-small",
    }
    return Engine(
        model,
        objective,
        batches,
        EngineSettings(**(values | changes)),
        folder,
        (0, "01-small"),
        observers,
        evaluate,
        merge=merge_packs,
        key=key,
    )


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().numpy().tobytes())
    return digest.hexdigest()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the timings."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=no_constant) for line in lines]
    for row in found:
        del row["seconds"]
    return found


def run_in_process(
    folder: Path, updates: int, stop_after: int | None, pause: float, die_at: int | None
) -> None:
    """Target of a fresh process: run, write the final hash; perhaps TERM or KILL itself.

    stop_after  send TERM after this update
    pause       seconds to sleep in each update, so that a kill from outside finds it at work
    die_at      kill -9 itself at the n-th fsync or rename
    """
    torch.set_num_threads(1)
    if die_at is not None:
        _die_at_disk_operation(die_at)

    def watch(event: Any) -> None:
        row = getattr(event, "row", None)
        if row is not None:
            time.sleep(pause)
            if row["update"] == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)

    engine = make_engine(folder, updates, observers=[watch], promote="best")
    engine.run()
    (folder / "hash").write_text(weights_hash(engine.model))


def _die_at_disk_operation(number: int) -> None:
    count = 0

    def wrap(call: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return wrapped

    os.fsync = wrap(os.fsync)
    Path.rename = wrap(Path.rename)
