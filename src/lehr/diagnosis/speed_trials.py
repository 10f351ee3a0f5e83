"""The counterfactual run that belongs to a bottleneck: it is taken away, and timed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lehr.diagnosis.speed import Speed, Trial, doubled, narrowed
from lehr.diagnosis.speed_operations import Table
from lehr.diagnosis.speed_ranks import exchanged
from lehr.errors import OutOfResources

if TYPE_CHECKING:
    from lehr.diagnosis.speed_probe import Probe, Timing

Found = tuple[Trial | None, Sequence[str]]  # with notes on why there is none
Shapes = Callable[["Probe", nn.Module], Table]  # operations and bytes of an update of a model


class Fixed:
    """The same packs for every update, `times` over."""

    epoch = 0.0

    def __init__(self, packs: Sequence[Any], times: int = 1) -> None:
        self._packs = [pack for pack in packs for _ in range(times)]

    def next(self) -> list[Any]:
        return list(self._packs)

    def state(self) -> int:
        return 0

    def load(self, state: Any) -> None:
        pass


def prove(probe: Probe, plain: Timing, answer: Speed, table: Table, shapes: Shapes) -> Found:
    """Take away what `answer` names; plain and table: the timing and the profile it rests on."""
    name, seconds, work = answer.bottleneck, answer.seconds, probe.work
    before = plain.total  # checkpoints and evaluations stand aside in every run of the probe
    position = work.batches.state()
    packs = work.batches.next()
    work.batches.load(position)
    if name in ("checkpoint", "evaluation"):
        whole = answer.total
        return Trial(f"no {name}s", whole - seconds[name], before, whole), ()
    if name == "data":
        found = probe.run(batches=Fixed(packs))
        return Trial("one cached batch", before - seconds[name], found.total, before), ()
    if name == "log":
        found = probe.run(observers=())
        return Trial("no observers", before - seconds[name], found.total, before), ()
    if name == "communication":
        with exchanged(by_itself=True):
            found = probe.run()
        return Trial("no exchange", before - seconds[name], found.total, before), ()
    if name == "recompute" and work.keeps_all is not None and work.computes_again is not None:
        work.keeps_all()
        try:
            found = probe.run()
        finally:
            work.computes_again()
        return Trial("everything kept", before - seconds[name], found.total, before), ()
    if name == "compute" and work.halved is not None:
        trial = half_the_width(probe, plain, answer, table, shapes)
        if trial is not None:
            return trial, ()
    return twice_the_batch(probe, answer, packs)


def half_the_width(
    probe: Probe, plain: Timing, answer: Speed, table: Table, shapes: Shapes
) -> Trial | None:
    """Products shrink with their operations, work on memory with its bytes, the rest stays."""
    narrow = None if probe.work.halved is None else probe.work.halved()
    if narrow is None or not table.operations or not table.bytes:
        return None
    position = probe.work.batches.state()
    there = shapes(probe, narrow)
    probe.work.batches.load(position)
    found = probe.run(model=narrow)
    # As `before`, without what stands aside in every run of the probe.
    aside = answer.seconds["checkpoint"] + answer.seconds["evaluation"]
    predicted = narrowed(
        answer.seconds, there.operations / table.operations, there.bytes / table.bytes
    )
    return Trial("half the width", predicted - aside, found.total, plain.total)


def twice_the_batch(probe: Probe, answer: Speed, packs: Sequence[Any]) -> Found:
    """Work that grows with the batch doubles, overhead stays."""
    work = probe.work
    if work.merge is None:
        return None, ("no counterfactual run: packs of this workload cannot be merged",)
    several = replace(work.settings, micro_batch=2 * work.settings.micro_batch)
    try:
        found = probe.run(batches=Fixed(packs, 2), settings=several, observers=())
    except (MemoryError, torch.OutOfMemoryError, OutOfResources):
        return None, ("no counterfactual run: memory does not hold twice the batch",)
    single = probe.run(batches=Fixed(packs), observers=())
    return Trial("twice the batch", doubled(answer.seconds, answer.groups), found.total,
                 single.total, batches=2), ()  # fmt: skip
