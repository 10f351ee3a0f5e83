"""Cutting an update into micro-batches; choosing their size from a memory estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lehr.data.shapes import Pack
from lehr.errors import OutOfResources, Problem

Merge = Callable[[Sequence[Pack]], Pack]


@dataclass(frozen=True)
class MicroBatch:
    """How many packs go through the model at once, and why."""

    packs: int
    estimated_bytes: int
    limit_bytes: int
    why: str


def choose_micro_batch(
    packs_per_update: int, estimate: Callable[[int], int], limit_bytes: int
) -> MicroBatch:
    """The largest micro-batch of at most `packs_per_update` packs that fits the limit.

    estimate  packs -> peak bytes; arithmetic, never a timing or a trial, so that the same
              recipe gives the same choice on every run (dropout depends on the cut)

    Sizes that make the same number of backwards are reduced to the smallest of them, which
    evens the cut out: 6 packs at most 5 at a time are cut 3 + 3, not 5 + 1.

    Raises OutOfResources where even one pack does not fit.
    """
    if packs_per_update < 1:
        raise ValueError(f"an update has at least one pack, not {packs_per_update}")
    smallest = estimate(1)
    if smallest > limit_bytes:
        expected = (
            f"{_gib(smallest)} GiB for one pack, {_gib(limit_bytes)} GiB allowed; the smallest "
            f"memory_limit that would do is {math.ceil(smallest / 2**30 * 100) / 100:.2f}; or "
            "lower max_length or pack_length, or turn recompute on"
        )
        raise OutOfResources(Problem("memory", expected))
    packs = 1
    while packs < packs_per_update and estimate(packs + 1) <= limit_bytes:
        packs += 1
    backwards = -(-packs_per_update // packs)
    even = -(-packs_per_update // backwards)
    reason = f"{backwards} backward(s) of up to {even} pack(s)"
    why = f"{reason}: {_gib(estimate(even))} of {_gib(limit_bytes)} GiB"
    return MicroBatch(even, estimate(even), limit_bytes, why)


def cut(packs: Sequence[Pack], micro_batch: int, merge: Merge | None) -> list[Pack]:
    """The packs of an update as micro-batches of `micro_batch` packs; the last may be smaller.

    Raises ValueError for a micro-batch below 1, or of several packs without `merge`.
    """
    if micro_batch < 1:
        raise ValueError(f"micro_batch is at least 1, not {micro_batch}")
    groups = [packs[start : start + micro_batch] for start in range(0, len(packs), micro_batch)]
    if all(len(group) == 1 for group in groups):
        return [group[0] for group in groups]
    if merge is None:
        raise ValueError("micro-batches of several packs need a function that merges packs")
    return [merge(group) for group in groups]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
