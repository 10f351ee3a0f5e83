"""From torch's profiler to plain events, with a range for every module of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from lehr.diagnosis.speed_operations import MODULE, UPDATE, Event

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def events_of(
    profiler: Any,
) -> tuple[list[Event], list[tuple[float, float]], list[tuple[float, float]]]:
    """(ranges of the processor, kernels of an accelerator, waits for it), in seconds.

    Read from the profiler's raw results: its own list of events takes milliseconds for each.
    """
    raw = profiler.profiler.kineto_results.events()
    kernels, waits = [], []
    launched: dict[int, float] = {}
    for one in raw:
        if one.device_type().name != "CPU":
            began = one.start_ns() / 1e9
            kernels.append((began, began + one.duration_ns() / 1e9))
            by = one.linked_correlation_id()
            launched[by] = launched.get(by, 0.0) + one.duration_ns() / 1e9
    ranges = []
    for one in raw:
        if one.device_type().name != "CPU":
            continue
        began = one.start_ns() / 1e9
        ended = began + one.duration_ns() / 1e9
        name = one.name()
        if name in _WAITS:
            waits.append((began, ended))
        seconds = launched.get(one.correlation_id(), 0.0)
        thread, sequence = one.start_thread_id(), one.sequence_nr()
        ranges.append(Event(name, began, ended, thread, sequence, one.shapes(), seconds))
    return ranges, kernels, waits


def with_shapes(timed: Sequence[Event], shaped: Sequence[Event]) -> list[Event]:
    """`timed`, each operation with the shapes of the same one in another profile.

    Both profiles are of the same updates. To be told shapes, a profiler keeps what held the
    tensors; these bits lie between large blocks, which malloc then takes from fresh pages: with
    shapes one pass over 16 MiB was seen to take 10 ms, without them 1.6. So times are of a
    profile without shapes. Equal are the operations of one name in their order in an update.
    """
    known = _by_update(shaped)
    found = list(timed)
    for key, places in _by_update(timed).items():
        for at, of in zip(places, known.get(key, ()), strict=False):
            found[at] = replace(timed[at], shapes=shaped[of].shapes)
    return found


def _by_update(events: Sequence[Event]) -> dict[tuple[str, str], list[int]]:
    """Places of events by the update they are in and their name, in order of time."""
    updates = sorted(
        (one.began, one.ended, one.name) for one in events if one.name.startswith(UPDATE)
    )
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    current = 0
    for at in sorted(range(len(events)), key=lambda at: events[at].began):
        event = events[at]
        while current < len(updates) and event.began >= updates[current][1]:
            current += 1
        if current == len(updates):
            break
        if event.began >= updates[current][0] and not event.name.startswith(UPDATE):
            found[updates[current][2], event.name].append(at)
    return found


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Name every module's forward in the profile: its class and place, layers as a star."""
    names = {
        id(module): f"{MODULE}{type(module).__name__} {_starred(name)}".rstrip()
        for name, module in model.named_modules()
    }
    open_ranges: list[Any] = []

    def enter(module: nn.Module, _inputs: Any) -> None:
        if id(module) in names:
            mark = torch.profiler.record_function(names[id(module)])
            mark.__enter__()
            open_ranges.append(mark)

    def leave(module: nn.Module, _inputs: Any, _output: Any) -> None:
        if id(module) in names and open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
