"""Bytes of tensors that live at once, as torch's allocator books them: what forecasts answer to.

torch's profiler notes every allocation and release, those inside kernels included; what was
there before is counted by walking the process's objects. Resident memory is more than this:
interpreter, libraries, and what malloc keeps.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "lehr live "  # before the names of marks, so that no operation is taken for one


@dataclass(frozen=True)
class Timeline:
    """Live bytes over time.

    times   nanoseconds of each allocation or release, ascending
    bytes   live from that time on
    before  live when it began
    marks   (began, ended) of every mark, by name
    """

    times: Sequence[int]
    bytes: Sequence[int]
    before: int
    marks: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max((self.before, *self.bytes))

    def at(self, time: int) -> int:
        """Live bytes at a time."""
        place = bisect_right(self.times, time)
        return self.bytes[place - 1] if place else self.before

    def peak_between(self, began: int, ended: int) -> int:
        first, last = bisect_right(self.times, began), bisect_right(self.times, ended)
        return max((self.at(began), *self.bytes[first:last]))

    def left_by(self, name: str) -> list[int]:
        """For each mark of that name, the bytes that its end has beyond its beginning."""
        found = self.marks.get(name, ())
        return [self.at(ended) - self.at(began) for began, ended in found]

    def raised_by(self, name: str) -> list[int]:
        """For each mark of that name, how far its peak lies above its beginning."""
        found = self.marks.get(name, ())
        return [self.peak_between(began, ended) - self.at(began) for began, ended in found]


def timeline_of(
    sizes: Iterable[tuple[int, int]],
    before: int,
    marks: Mapping[str, Iterable[tuple[int, int]]] | None = None,
) -> Timeline:
    """From (time, bytes allocated or, where negative, released) in any order.

    >>> timeline_of([(3, -50), (1, 70), (2, 30)], 100).bytes
    [170, 200, 150]
    """
    ordered = sorted(sizes, key=lambda one: one[0])
    running = list(accumulate((size for _, size in ordered), initial=before))[1:]
    named = {name: sorted(spans) for name, spans in (marks or {}).items()}
    return Timeline([time for time, _ in ordered], running, before, named)


def live_tensors() -> list[Tensor]:
    """Tensors on the CPU that this process holds, gradients included."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    # isinstance would wake what loads lazily; a gradient is no object of its own here
    found += [one.grad for one in found if one.is_leaf and one.grad is not None]
    return [one for one in found if one.device.type == "cpu"]


def live_tensor_bytes(without: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages of `live_tensors`, each counted once.

    without  tensors that stay on disk (mapped files), or are not of what is measured
    """
    left_out = {tensor.untyped_storage().data_ptr() for tensor in without}
    storages = [tensor.untyped_storage() for tensor in live_tensors()]
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for at, size in found.items() if at not in left_out)


class Recording:
    """What `recording()` gives; `timeline` is there once its block is over."""

    def __init__(self, before: int) -> None:
        self.before = before
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RuntimeError("the recording has not ended")
        return self._timeline

    def read(self, profiler: Any) -> None:
        """Take over a profiler's raw results."""
        sizes: list[tuple[int, int]] = []
        marks: dict[str, list[tuple[int, int]]] = {}
        for event in profiler.profiler.kineto_results.events():
            name, began = event.name(), event.start_ns()
            if name == "[memory]" and event.device_type().name == "CPU":
                sizes.append((began, event.nbytes()))
            elif name.startswith(MARK):
                span = (began, began + event.duration_ns())
                marks.setdefault(name.removeprefix(MARK), []).append(span)
        self._timeline = timeline_of(sizes, self.before, marks)


@contextmanager
def recording(before: int = 0) -> Iterator[Recording]:
    """Record what the CPU's allocator does inside; `before`: bytes that live already."""
    found = Recording(before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    found.read(profiler)


def mark(name: str) -> Any:
    """A context whose time the timeline keeps under `name`."""
    return record_function(MARK + name)
