"""From a profile's events to a table: which operations, whose, how long, how much work.

An event is a time range on a thread; ranges nest. A module of the model is a range of its own
(`speed_probe` names it), so an operation belongs to the innermost module around it; a backward
node belongs to the module whose forward made it (both carry the same sequence number).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median
from typing import Any

from lehr.diagnosis.speed import Group

MODULE, UPDATE = "lehr module ", "lehr update"
FAR = 2.0  # times the median of equal events: what is beyond is another program's
BACKWARD = "autograd::engine::evaluate_function"
OPTIMIZER, OUTSIDE = "the optimizer", "outside the model"
_PRODUCTS = re.compile(
    r"::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|_scaled_mm|_grouped_mm|.*conv\w*|"
    r"mkldnn_linear\w*|.*(attention|flash|gemm)\w*)(_backward)?$"
)
_VIEWS = re.compile(
    r"::(t|transpose|permute|view|_unsafe_view|reshape|as_strided|expand|slice|select|narrow|split|"
    r"chunk|unbind|unsqueeze|squeeze|detach|alias|empty\w*|resize_|resolve_\w+|result_type|"
    r"is_nonzero|item|_local_scalar_dense|to|numpy_T|unflatten|flatten|contiguous|lift_fresh)$"
)
_COLLECTIVE = re.compile(r"^(c10d::|gloo:|nccl|record_param_comms|mpi:)")


@dataclass(frozen=True)
class Event:
    """One range of a profile.

    began, ended  seconds        sequence  of autograd, -1 for none
    shapes        of the inputs  kernels   seconds on an accelerator, of this range alone
    """

    name: str
    began: float
    ended: float
    thread: int = 0
    sequence: int = -1
    shapes: Sequence[Sequence[int]] = ()
    kernels: float = 0.0


@dataclass(frozen=True)
class Overheads:
    """Seconds that a profile adds.

    call    of an operation that does nothing, as a profile shows it
    module  that the range of a module adds
    """

    call: float = 0.0
    module: float = 0.0


NO_OVERHEADS = Overheads()


@dataclass
class Table:
    """What one update did.

    work        seconds by class of speed.WORK (no synchronisation)
    operations  done, recomputed ones among them; bytes moved by the memory class, at least
    wall        seconds of the update as it was profiled
    """

    work: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    groups: list[Group] = field(default_factory=list)
    calls: int = 0
    operations: float = 0.0
    recomputed: float = 0.0
    bytes: float = 0.0
    wall: float = 0.0


def kind_of(name: str) -> str:
    """compute, memory, communication, view, or "" for a range that is no operation.

    >>> [kind_of(name) for name in ("aten::addmm", "aten::mul", "aten::t", "autograd::engine")]
    ['compute', 'memory', 'view', '']
    """
    if _COLLECTIVE.match(name):
        return "communication"
    if "::" not in name or name.startswith(("autograd::", "torch::", "lehr ")):
        return ""
    if _VIEWS.search(name):
        return "view"
    return "compute" if _PRODUCTS.search(name) else "memory"


def operations_of(name: str, shapes: Sequence[Sequence[int]]) -> float:
    """Floating-point operations of a product; 0 for what is none.

    >>> operations_of("aten::mm", [[2, 3], [3, 4]])
    48.0
    >>> operations_of("aten::addmm", [[4], [2, 3], [3, 4], [], []])
    48.0
    >>> operations_of("aten::_scaled_dot_product_flash_attention_for_cpu", [[1, 2, 5, 8]] * 3)
    1600.0
    """
    if kind_of(name) != "compute":
        return 0.0
    sizes = [one for one in shapes if one]
    short = name.rpartition("::")[2]
    if "attention" in short and len(sizes) >= 2 and len(sizes[0]) == len(sizes[1]) == 4:
        # Backward functions have the gradient first; its shape is that of the query.
        batch, heads, tokens, width = sizes[0]
        keys = sizes[2][2] if "backward" in short and len(sizes) > 2 else sizes[1][2]
        times = 10.0 if "backward" in short else 4.0
        return times * batch * heads * tokens * keys * width
    matrices = [one for one in sizes if len(one) >= 2]
    if short.startswith(("add", "baddbmm")) and len(matrices) >= 3:
        matrices = matrices[1:]
    if len(matrices) < 2:
        return 0.0
    left, right = matrices[:2]
    return 2.0 * prod(left) * right[-1]


def bytes_of(shapes: Sequence[Sequence[int]], element: int = 4) -> float:
    """Bytes that an element-wise operation moves: its inputs once, an output as the largest.

    >>> bytes_of([[2, 3], [3]])
    60.0
    """
    sizes = [prod(one) for one in shapes if one]
    return float(element * (sum(sizes) + max(sizes, default=0)))


def table(
    events: Sequence[Event], clean: float, aside: float, overheads: Overheads = NO_OVERHEADS
) -> Table:
    """The table of an update: the mean of several that were profiled.

    events  of the updates; each lies in a range named UPDATE, which is among them
    clean   seconds of an update without a profile and without its spans; aside: of the spans,
            which lie in the profiled updates too

    Seconds of equal operations (name, shapes, owner) are their median, those of other ranges
    count up to twice it: what is beyond is another program's, or the first call's. A profile
    multiplies the cost of small operations, so only its proportions are used for what is no
    operation's own work.
    """
    nested = _nested(events)
    owners = _owners(events, nested)
    updates = sum(event.name.startswith(UPDATE) for event in events)
    on_device = any(event.kernels for event in events)
    alike: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    around = 0.0
    for at, event in enumerate(events):
        own, gaps, engine = _own_seconds(at, events, nested)
        around += engine
        for child, gap in gaps:  # the engine between two backward nodes works for the next
            alike["between nodes", (), owners[child], False].append(gap)
        again = _recomputed(at, events, nested)
        shapes = tuple(tuple(one) for one in event.shapes)
        if on_device and kind_of(event.name):
            own = event.kernels
        name = UPDATE if event.name.startswith(UPDATE) else event.name
        alike[name, shapes, owners[at], again].append(own)
    return _summed(alike, updates, around / updates, clean, aside, overheads, on_device)


def _summed(
    alike: Mapping[tuple[Any, ...], Sequence[float]],
    updates: int,
    around: float,
    clean: float,
    aside: float,
    overheads: Overheads,
    on_device: bool,
) -> Table:
    """around: seconds of the engine before the first backward node and after the last."""
    found = Table()
    groups: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (name, shapes, owner, again), values in alike.items():
        limit = FAR * median(values)
        spent = sum(min(one, limit) for one in values) / updates
        calls, part, kind = len(values) / updates, groups[owner], kind_of(name)
        found.wall += spent
        part["seconds"] += spent
        part["nodes"] += calls if name.startswith(BACKWARD) else 0
        part["added"] += overheads.module * calls if name.startswith(MODULE) else 0.0
        if not kind:
            continue
        found.calls += round(calls)
        part["calls"] += calls
        if kind not in ("compute", "memory"):
            continue
        usual = calls * median(values)  # other programs only ever add to it
        net = spent if on_device else max(0.0, usual - overheads.call * calls)
        done = operations_of(name, shapes) * calls
        found.operations += done
        found.recomputed += done if again else 0.0
        found.bytes += bytes_of(shapes) * calls if kind == "memory" and net > 0 else 0.0
        found.work["recompute" if again else kind] += net
        part[kind] += net
    nodes = sum(one["nodes"] for one in groups.values())
    for one in groups.values():
        one["seconds"] += around * one["nodes"] / nodes if nodes else 0.0
    groups[OUTSIDE]["added"] += aside
    found.groups = _groups(groups, clean)
    return found


def _groups(found: Mapping[str, Mapping[str, float]], clean: float) -> list[Group]:
    """Groups whose seconds add up to `clean`: operations as profiled, the rest in proportion."""
    known = sum(one.get("compute", 0.0) + one.get("memory", 0.0) for one in found.values())
    scale = min(1.0, clean / known) if known > 0 else 1.0
    rest = {
        owner: max(
            0.0, one["seconds"] - one["added"] - one.get("compute", 0.0) - one.get("memory", 0.0)
        )
        for owner, one in found.items()
    }
    host = max(0.0, clean - known) / max(sum(rest.values()), 1e-12)
    groups = []
    for owner, one in found.items():
        compute, memory = scale * one.get("compute", 0.0), scale * one.get("memory", 0.0)
        seconds = compute + memory + host * rest[owner]
        fixed = owner in (OPTIMIZER, OUTSIDE)
        groups.append(Group(owner, round(one.get("calls", 0)), seconds, compute, memory, fixed))
    return sorted(groups, key=lambda one: -one.seconds)


@dataclass
class _Nested:
    parent: list[int]
    children: list[list[int]]


def _nested(events: Sequence[Event]) -> _Nested:
    """Who lies in whom, thread by thread; -1 for what lies in nothing."""
    nested = _Nested([-1] * len(events), [[] for _ in events])
    order = sorted(
        range(len(events)), key=lambda at: (events[at].thread, events[at].began, -events[at].ended)
    )
    stack: list[int] = []
    for at in order:
        event = events[at]
        while stack and (
            events[stack[-1]].thread != event.thread or events[stack[-1]].ended < event.ended
        ):
            stack.pop()
        if stack:
            nested.parent[at] = stack[-1]
            nested.children[stack[-1]].append(at)
        stack.append(at)
    return nested


def _own_seconds(
    at: int, events: Sequence[Event], nested: _Nested
) -> tuple[float, list[tuple[int, float]], float]:
    """Seconds of a range outside its children; gaps that belong to a backward node; what the
    engine takes before the first node (it counts them) and after the last (it lets them go)."""
    event = events[at]
    own = event.ended - event.began
    gaps, around = [], 0.0
    last, was_node = event.began, False
    for child in nested.children[at]:
        inside = events[child]
        own -= inside.ended - inside.began
        is_node = inside.name.startswith(BACKWARD)
        gap = max(0.0, inside.began - last)
        if is_node and was_node:
            gaps.append((child, gap))
        elif is_node or was_node:
            around += gap
        last, was_node = inside.ended, is_node
    own -= around + sum(gap for _, gap in gaps)
    return max(0.0, own), gaps, around


def _owners(events: Sequence[Event], nested: _Nested) -> list[str]:
    """Whose each event is."""
    owners = [""] * len(events)
    made_by: dict[int, tuple[float, str]] = {}
    order = sorted(range(len(events)), key=lambda at: (events[at].began, -events[at].ended))
    for at in order:
        event, parent = events[at], nested.parent[at]
        above = owners[parent] if parent >= 0 else OUTSIDE
        if event.name.startswith(MODULE):
            owners[at] = event.name.removeprefix(MODULE)
        elif event.name.startswith("Optimizer.step"):
            owners[at] = OPTIMIZER
        elif event.name.startswith(BACKWARD):
            owners[at] = made_by.get(event.sequence, (0.0, above))[1]
        else:
            owners[at] = above
            if event.sequence >= 0 and not _within(at, events, nested, BACKWARD):
                # Of several that saw the number the last one made the node.
                made_by[event.sequence] = (event.began, above)
    return owners


def _within(at: int, events: Sequence[Event], nested: _Nested, prefix: str) -> bool:
    while at >= 0:
        if events[at].name.startswith(prefix):
            return True
        at = nested.parent[at]
    return False


def _recomputed(at: int, events: Sequence[Event], nested: _Nested) -> bool:
    """Whether a module runs around it inside a backward node."""
    inside = False
    while at >= 0:
        name = events[at].name
        inside = inside or name.startswith(MODULE)
        if inside and name.startswith(BACKWARD):
            return True
        at = nested.parent[at]
    return False


def idle_after_waits(
    kernels: Sequence[tuple[float, float]], waits: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """(idle that follows a wait of the host, other idle) between an accelerator's kernels.

    kernels  (began, ended) on the device; waits: of the host for it. A gap in which a wait ends
    is the wait's: the host could not work ahead.

    >>> idle_after_waits([(0.0, 1.0), (3.0, 4.0), (5.0, 6.0)], [(0.5, 1.5)])
    (2.0, 1.0)
    """
    after = other = 0.0
    end = None
    for began, ended in sorted(kernels):
        if end is not None and began > end:
            waited = any(end <= stop <= began for _, stop in waits)
            after, other = after + (began - end) * waited, other + (began - end) * (not waited)
        end = ended if end is None else max(end, ended)
    return after, other
