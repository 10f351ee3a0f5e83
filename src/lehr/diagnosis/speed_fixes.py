"""What to do about a bottleneck, and how much faster an update is then."""

from __future__ import annotations

from lehr.diagnosis.speed import Group, Speed, gain_without, largest
from lehr.training.settings import EngineSettings

FIXES = {
    "data": "a faster source: encode and cache rows beforehand, read from a local disk, or "
    "more rows at once",
    "synchronisation": "read numbers from the accelerator less often: every `.item()`, `.cpu()` "
    "and print of a tensor waits for it",
    "communication": "fewer or smaller exchanges: more examples an update (`batch_size`), an "
    "adapter instead of all weights, a faster network",
    "recompute": "`recompute: none` or a larger budget, where memory allows it",
    "checkpoint": "fewer checkpoints: `checkpoint_every`",
    "log": "log every tenth update, and wait for no disk or screen in between",
    "evaluation": "fewer evaluations: `evaluate_every`",
    "compute": "nothing waits: only fewer operations or faster products make it faster (an "
    "adapter, shorter sequences, bf16 where it pays, more threads, a faster machine)",
    "host": "larger operations: more packs at once (`micro_batch`), a longer `pack_length`, or a "
    "larger model",
    "memory": "fewer or narrower passes over the data: fused operations, bf16, fewer trained "
    "weights; a larger batch where the optimizer is the part that moves most",
}


def fix_of(found: Speed, settings: EngineSettings) -> tuple[str, float]:
    """(what to do, times as fast after it): the whole wait gone, or the one part that has it."""
    name = found.bottleneck
    if name == "compute":
        return FIXES[name], 1.0
    part = largest(found.groups, name)
    if part is not None:
        return part_words(part, name), gain_without(found.total, part.seconds)
    if name in ("host", "memory"):
        gain = 1.0 if found.trial is None else found.trial.predicted_gain
        return FIXES[name], gain
    return FIXES[name], gain_without(found.total, found.seconds[name])


def part_words(part: Group, name: str) -> str:
    """Of the one part that has most of a class."""
    what = f"{part.calls:,} operations" if name == "host" else "passes over memory"
    return (
        f"most of it is in one part, {part.owner} ({what} an update): fuse them or leave them out"
    )
