"""What each process of the tests with several ranks does."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_runs import Cycle, NextToken, Small, make_engine, make_pack, rows, weights_hash
from torch import nn

from lehr import ranks
from lehr.objectives.base import Loss
from lehr.training.optimizers import OptimizerSettings
from lehr.training.schedules import Schedule


class Share(Cycle):
    """This rank's part of every update: each `world_size`-th pack."""

    def next(self) -> list[Any]:
        return super().next()[ranks.rank() :: ranks.world_size()]


class Draws(NextToken):
    """Reports what dropout would draw first, and a source that only this rank has."""

    def loss(self, model: Any, pack: Any) -> Loss:
        loss = super().loss(model, pack)
        first = torch.rand(())
        own = {
            f"draw_{ranks.rank()}": (first, 1.0),
            f"source.rank{ranks.rank()}.loss": (loss.total.detach(), self.weight(pack)),
        }
        return Loss(loss.total, {**loss.metrics, **own})


def run_ranks(folder: Path, size: int, target: Callable[..., None], *arguments: Any) -> list[Any]:
    """`target(rank, size, folder, *arguments)` in `size` fresh processes; what each wrote."""
    context = multiprocessing.get_context("forkserver")
    # torch imports its compiler with the first optimizer: once here, not in every process
    context.set_forkserver_preload(["torch._dynamo", "lehr.training.engine"])
    processes = [
        context.Process(target=target, args=(rank, size, folder, *arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * size
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(size)]


@contextmanager
def joined(rank: int, size: int, folder: Path) -> Iterator[None]:
    """This process as one of `size` ranks, with gloo; alone without a group."""
    torch.set_num_threads(1)
    if size > 1:
        store = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    yield
    if size > 1:
        dist.destroy_process_group()


class Oracle:
    """Each pack's tokens all have one known loss: its item number. Gradient 1 a token."""

    def weight(self, pack: Any) -> float:
        return float(pack.targets.numel())

    def loss(self, model: Any, pack: Any) -> Loss:
        per_token = torch.cat([torch.full((n,), float(item)) for n, item in self._parts(pack)])
        total = per_token.sum() + model.weight.sum() * pack.targets.numel()
        return Loss(total, {"token_loss": (per_token.sum(), float(pack.targets.numel()))})

    def _parts(self, pack: Any) -> list[tuple[int, int]]:
        counts = torch.bincount(pack.sequence, minlength=len(pack.items)).tolist()
        return list(zip(counts, pack.items, strict=True))


class Weight(nn.Module):
    """One number, 0 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def oracle_work(rank: int, size: int, folder: Path, tokens: list[int], losses: list[int]) -> None:
    """One update in which rank r has one pack of `tokens[r]` tokens at `losses[r]`."""
    with joined(rank, size, folder):
        packs = [make_pack([1] * (n + 1), loss) for n, loss in zip(tokens, losses, strict=True)]
        engine = make_engine(
            folder, 1, model=Weight(), objective=Oracle(), batches=Share(packs, len(packs)),
            evaluate=None, optimizer=OptimizerSettings("sgd"), learning_rate=1.0, clip=None,
            schedule=Schedule("constant", warmup=0),
        )  # fmt: skip
        engine.run()
        result = {"loss": engine.progress.loss, "weight": engine.model.weight.item()}
        (folder / f"result-{rank}.json").write_text(json.dumps(result))


def work(rank: int, size: int, folder: Path, micro_batch: int, unequal: bool) -> None:
    """Train 12 updates on `size` ranks; rank r writes result-r.json."""
    with joined(rank, size, folder):
        model = Small(dropout=0.0)
        if unequal and rank:
            torch.nn.init.zeros_(model.up.bias)
        engine = make_engine(
            folder,
            12,
            model=model,
            objective=Draws(),
            batches=Share(rows(12), 12),
            micro_batch=micro_batch,
            evaluate=None,
            checkpoint_every=6,
            schedule=Schedule("linear", warmup=4, final=0.0),
            learning_rate=1e-3,
        )
        error = ""
        try:
            engine.run()
        except Exception as caught:
            error = str(caught)
        result = {"hash": weights_hash(model), "error": error}
        (folder / f"result-{rank}.json").write_text(json.dumps(result))


def precision_work(rank: int, size: int, folder: Path, keys: dict[str, Any]) -> None:
    """Six updates of one or two packs in the precision of `keys`: a rank may have none."""
    with joined(rank, size, folder):
        engine = make_engine(
            folder, 6, model=Small(dropout=0.0), batches=Share(rows(3), 2), evaluate=None, **keys
        )
        engine.run()
        result = {"hash": weights_hash(engine.model), "attempts": engine.progress.attempt}
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
