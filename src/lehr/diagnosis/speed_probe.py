"""A few updates of the real engine, timed, profiled, and once more with one thing changed.

The spans of the engine say what the loader, log, checkpoints and evaluations take; a profile of
three updates divides the rest. Then the counterfactual run: the suspected wait is taken away (a
cached batch, no log, no exchange) or the batch doubled, and the seconds are held to those that
the shares predict. Weights, data position and random state are as before afterwards.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from lehr import ranks
from lehr.device import CPU
from lehr.diagnosis import speed_fixes as fixes
from lehr.diagnosis import speed_trials as trials
from lehr.diagnosis.speed import Speed, Trial, bottleneck_of, seconds_by_class
from lehr.diagnosis.speed_clock import fair_clock
from lehr.diagnosis.speed_events import events_of, module_ranges, with_shapes
from lehr.diagnosis.speed_limits import measure_limits, measure_overheads
from lehr.diagnosis.speed_operations import (
    UPDATE,
    Event,
    Table,
    idle_after_waits,
    table,
)
from lehr.diagnosis.speed_ranks import timed_exchange
from lehr.models.surroundings import random_state, set_random_state
from lehr.objectives.base import Objective
from lehr.training import events as engine
from lehr.training.batch import Merge
from lehr.training.engine import Engine, Evaluate
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings
from lehr.training.state import copied, put_back, running_buffers, trained_parameters
from lehr.training.store import Batches

WARM, PROFILED = 2, 3  # updates before one counts; updates in the profile
LEAST, MOST = 5, 60  # updates that are timed
NEVER = 10**9
LONGEST = 6.0  # seconds: an update that takes longer is measured on some of its packs
UNITS = 40  # updates in all, about: to say how long the measurement takes
SMALL_RATE = 1e-3  # of the learning rate: the updates are real, and move next to nothing


@dataclass(frozen=True)
class Workload:
    """What is trained: the arguments of an engine.

    operations_per_token  of the model, for MFU; None = those counted, without recomputed ones
    keeps_all   makes the model keep everything for the backward pass and back again, where it
                computes again what it did not keep
    halved      the same model at half its width; None where it cannot be made
    """

    model: nn.Module
    objective: Objective
    batches: Batches
    settings: EngineSettings
    seed_names: Sequence[object]
    observers: Sequence[engine.Observer] = ()
    evaluate: Evaluate | None = None
    merge: Merge | None = None
    operations_per_token: float | None = None
    keeps_all: Callable[[], Any] | None = None
    computes_again: Callable[[], Any] | None = None
    halved: Callable[[], nn.Module | None] | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of one update.

    update   outside the spans: the median over the updates, which a busy machine moves least
    spans    means: a wait may come with every tenth update only
    busy     processor seconds over wall seconds and threads
    """

    update: float
    spans: Mapping[str, float]
    tokens: float
    busy: float

    @property
    def total(self) -> float:
        return self.update + sum(self.spans.values())


class _Enough(Exception):
    """The updates that were asked for are done."""


class _Watch:
    """The last observer: times the updates from one end to the next, then ends the run."""

    def __init__(self, updates: int, profiler: Any = None) -> None:
        self.last = WARM + updates
        self.profiler: Any = profiler
        self._range: Any = None
        self.exchange: list[float] = [0.0]
        self.cycles: list[float] = []
        self.spans: list[Mapping[str, float]] = []
        self.tokens: list[int] = []
        self.began = self.processor = self.wall = self.computed = 0.0
        self._before = self._exchanged = 0.0
        self._done = 0

    def __call__(self, event: engine.Event) -> None:
        if not isinstance(event, engine.UpdateDone):
            return
        _wait_for_device()
        now, exchange = fair_clock(), self.exchange[0]
        if self._done >= WARM:
            self.cycles.append(now - self._before)
            self.spans.append({**event.spans, "communication": exchange - self._exchanged})
            self.tokens.append(int(event.row["tokens"]))
        elif self._done == WARM - 1:
            self.began, self.processor = now, time.process_time()
        self._done += 1
        if self._done >= self.last:
            self.wall = now - self.began
            self.computed = time.process_time() - self.processor
            raise _Enough
        self._mark()
        self._before, self._exchanged = fair_clock(), exchange

    def _mark(self) -> None:
        if self.profiler is None:
            return
        if self._done == WARM:
            self.profiler.start()
        if self._range is not None:
            self._range.__exit__(None, None, None)
        if self._done >= WARM:
            self._range = torch.profiler.record_function(f"{UPDATE} {self._done}")
            self._range.__enter__()

    def close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self.profiler.stop()

    def timing(self) -> Timing:
        names = dict.fromkeys(name for one in self.spans for name in one)
        means = {name: fmean(one.get(name, 0.0) for one in self.spans) for name in names}
        update = median(
            max(0.0, cycle - sum(one.values()))
            for cycle, one in zip(self.cycles, self.spans, strict=True)
        )
        busy = self.computed / max(self.wall, 1e-9) / torch.get_num_threads()
        return Timing(update, means, fmean(self.tokens), busy)


class Some:
    """The first packs of each update, the rest in the next: the loader's time stays a pack's."""

    def __init__(self, batches: Any, most: int) -> None:
        self._batches, self._most = batches, most
        self._packs: list[Any] = []

    @property
    def epoch(self) -> float:
        return float(self._batches.epoch)

    def next(self) -> list[Any]:
        while len(self._packs) < self._most:
            self._packs += self._batches.next()
        taken, self._packs = self._packs[: self._most], self._packs[self._most :]
        return taken

    def state(self) -> Any:
        return self._batches.state()

    def load(self, state: Any) -> None:
        self._packs = []
        self._batches.load(state)


class Probe:
    """Measures one workload; nothing of it is left behind."""

    def __init__(self, work: Workload, seconds: float = 4.0) -> None:
        self.work, self.seconds = work, seconds
        self.updates = LEAST
        self.slowest = 0.0  # seconds of an update, once `first` was called

    def run(self, **changes: Any) -> Timing:
        """Time `updates` updates with these changes: batches, observers, settings, profiler."""
        watch = _Watch(changes.pop("updates", self.updates), changes.pop("profiler", None))
        work = replace(self.work, **changes)
        settings = replace(
            work.settings,
            updates=max(work.settings.updates, NEVER),
            learning_rate=work.settings.learning_rate * SMALL_RATE,
            schedule=Schedule("constant", warmup=0),
            early_stop=None,
            promote="last",
            guard=None if work.settings.guard is None else replace(
                work.settings.guard, policy="skip"  # no checkpoint to go back to
            ),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder, timed_exchange() as watch.exchange:
            made = Engine(
                work.model, work.objective, work.batches, settings, Path(folder), work.seed_names,
                (*work.observers, watch), work.evaluate, merge=work.merge,
            )  # fmt: skip
            made.spans.clock = fair_clock
            try:
                with suppress(_Enough):
                    made.run()
            finally:
                watch.close()
        return watch.timing()

    def shorten(self) -> str:
        """Cut an update that takes too long to a part of its packs; what was done, in words."""
        position = self.work.batches.state()
        packs = len(self.work.batches.next())
        self.work.batches.load(position)
        micro = self.work.settings.micro_batch
        if packs < 4 * micro:
            return ""
        quiet = replace(self.work.settings, checkpoint_every=NEVER, evaluate_every=None)
        few = Some(self.work.batches, micro)
        one = self.run(batches=few, settings=quiet, evaluate=None, updates=1)
        self.work.batches.load(position)
        slowest = ranks.all_sum(one.total) / ranks.world_size()
        most = packs_in(LONGEST, slowest, micro, packs)
        if most == packs:
            return ""
        self.work = replace(self.work, batches=Some(self.work.batches, most))
        return (
            f"an update of all its {packs:,} packs would take about "
            f"{slowest * packs / micro:,.0f} s: measured on {most:,} packs an update, so that "
            "what comes once an update (optimizer, log) has a larger share here"
        )

    def first(self) -> dict[str, float]:
        """Seconds of one checkpoint and one evaluation; chooses how many updates are timed."""
        every = 1 if self.work.evaluate else None
        settings = replace(self.work.settings, checkpoint_every=1, evaluate_every=every)
        found = self.run(settings=settings, updates=2)
        plain = found.total - sum(found.spans.get(n, 0.0) for n in ("checkpoint", "evaluation"))
        self.slowest = ranks.all_sum(plain) / ranks.world_size()  # all ranks take as many
        wanted = int(min(MOST, max(LEAST, self.seconds / max(self.slowest, 1e-6))))
        self.updates = wanted - wanted % 10 if wanted >= 10 else wanted  # what comes now and then
        return {name: found.spans.get(name, 0.0) for name in ("checkpoint", "evaluation")}


def packs_in(seconds: float, of_micro_batch: float, micro: int, packs: int) -> int:
    """How many of an update's packs take about so long: whole micro-batches, at least one.

    >>> packs_in(6.0, 1.0, 2, 100), packs_in(6.0, 10.0, 2, 100), packs_in(6.0, 0.01, 2, 100)
    (12, 2, 100)
    """
    return min(packs, micro * max(1, int(seconds / max(of_micro_batch, 1e-9))))


def measure_speed(
    work: Workload,
    *,
    seconds: float = 4.0,
    trace: Path | None = None,
    prove: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Speed:
    """Shares, bottleneck, counterfactual run and predicted gain of a workload.

    seconds  for each of three runs, about; an update that takes longer than `LONGEST` is cut
    trace    a file for the profile (Chrome's format)
    say      is told what takes long, before it does
    """
    trained = trained_parameters(work.model, work.settings.precision)
    buffers = running_buffers(work.model)
    kept, kept_buffers, position = copied(trained), copied(buffers), work.batches.state()
    devices = list(dict.fromkeys([CPU, next(iter(trained.values())).device]))
    state = random_state(devices)
    try:
        return _measured(work, seconds, trace, prove, say)
    finally:
        put_back(trained, kept, "weights")
        put_back(buffers, kept_buffers, "buffers")
        work.batches.load(position)
        set_random_state(devices, state)


def _measured(
    work: Workload, seconds: float, trace: Path | None, prove: bool, say: Callable[[str], None]
) -> Speed:
    device = next(work.model.parameters()).device.type
    probe = Probe(work, seconds)
    cut_short = probe.shorten()
    if cut_short:
        say(cut_short)
        work = probe.work
    once = probe.first()
    if probe.slowest > 1.0:
        say(f"{UNITS} updates of {probe.slowest:,.1f} s, {UNITS * probe.slowest / 60:,.0f} min")
    quiet = replace(work.settings, checkpoint_every=NEVER, evaluate_every=None)
    probe.work = replace(work, settings=quiet, evaluate=None)
    plain = probe.run()
    found = _profile(probe, plain, trace)
    spans = dict(plain.spans) | {
        "checkpoint": once["checkpoint"] / work.settings.checkpoint_interval,
        "evaluation": once["evaluation"] / (work.settings.evaluate_every or NEVER),
    }
    own = seconds_by_class(plain.update, spans, found.work)
    # All ranks name the same bottleneck: its counterfactual run exchanges, or it does not.
    by_class = {name: ranks.all_sum(value) / ranks.world_size() for name, value in own.items()}
    name = bottleneck_of(by_class)
    limits = measure_limits(work.settings.precision, device)
    total = sum(by_class.values())
    allowed = limits["gflops"] * 1e9 * total
    model_operations = found.operations - found.recomputed
    if work.operations_per_token is not None:
        model_operations = work.operations_per_token * plain.tokens
    moved = found.bytes / by_class["memory"] / 1e9 if by_class["memory"] > 0 else 0.0
    answer = Speed(
        seconds=by_class,
        bottleneck=name,
        mfu=model_operations / allowed if allowed > 0 else 0.0,
        hfu=found.operations / allowed if allowed > 0 else 0.0,
        bandwidth=moved / limits["gbytes"] if limits["gbytes"] > 0 else None,
        busy=plain.busy,
        groups=found.groups,
        tokens=plain.tokens,
        limits=limits,
    )
    trial: Trial | None = None
    notes: Sequence[str] = ()
    if prove:
        trial, notes = trials.prove(probe, plain, answer, found, _shapes_of)
    notes = (*((cut_short,) if cut_short else ()), *notes)
    answer = replace(answer, trial=trial, notes=notes)
    fix, gain = fixes.fix_of(answer, work.settings)
    return replace(answer, fix=fix, gain=gain)


def _profile(probe: Probe, plain: Timing, trace: Path | None) -> Table:
    """The table of a few profiled updates."""
    position = probe.work.batches.state()
    shaped, _, _ = events_of(_profiled(probe, shapes=True))
    probe.work.batches.load(position)
    profiler = _profiled(probe)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    timed, kernels, waits = events_of(profiler)
    events = with_shapes(timed, shaped)
    inside = _of_updates(events)
    marks = [one for one in inside if one.name.startswith(UPDATE)]
    began, ended = marks[0].began, marks[-1].ended
    found = table(inside, plain.update, sum(plain.spans.values()), measure_overheads())
    if kernels:
        within = [one for one in kernels if began <= one[0] and one[1] <= ended]
        idle, _ = idle_after_waits(within, waits)
        found.work["synchronisation"] = idle / len(marks)
    return found


def _shapes_of(probe: Probe, model: nn.Module) -> Table:
    """Operations and bytes of an update of another model; its times say nothing."""
    kept, probe.work = probe.work, replace(probe.work, model=model)
    try:
        events, _, _ = events_of(_profiled(probe, shapes=True))
    finally:
        probe.work = kept
    return table(_of_updates(events), 0.0, 0.0, measure_overheads())


def _of_updates(events: Sequence[Event]) -> list[Event]:
    """Events of the profiled updates but the first, which warms up."""
    marks = [one for one in events if one.name.startswith(UPDATE)][1:]
    began, ended = min(one.began for one in marks), max(one.ended for one in marks)
    return [one for one in events if began <= one.began and one.ended <= ended]


def _profiled(probe: Probe, *, shapes: bool = False) -> Any:
    """The profiler of a few updates; with shapes its times are not those of a training."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if next(probe.work.model.parameters()).device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=shapes)
    with module_ranges(probe.work.model):
        probe.run(profiler=profiler, updates=PROFILED + 1)
    return profiler


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
