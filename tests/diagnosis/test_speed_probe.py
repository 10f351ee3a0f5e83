"""The probe on a small module: what is in the way is named, and nothing is left behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.training.small_runs import Cycle, NextToken, Small, merge_packs, rows, weights_hash

from lehr.diagnosis import speed_probe
from lehr.diagnosis.speed_probe import Workload, measure_speed
from lehr.diagnosis.speed_ranks import exchanged, timed_exchange
from lehr.training.settings import EngineSettings

LIMITS = {"gflops": 50.0, "gbytes": 10.0}


# Seconds of the clock below, far above what these modules really compute.
TICK, FORWARD, WAIT = 0.01, 0.2, 2.0


class Clock:
    """Goes on when it is read, and by what is waited for: a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(speed_probe, "measure_limits", lambda *_: LIMITS)
    monkeypatch.setattr(speed_probe, "MOST", 6)
    monkeypatch.setattr(speed_probe, "fair_clock", CLOCK)


def work(**changes: Any) -> Workload:
    settings = EngineSettings(updates=1, learning_rate=0.1, checkpoint_every=10**6)
    model = Small()
    model.register_forward_hook(lambda *_: CLOCK.wait(FORWARD))
    given = {"batches": Cycle(rows(12), 4), "settings": settings, "merge": merge_packs}
    return Workload(model, NextToken(), seed_names=(0, "speed"), **{**given, **changes})


class Late(Cycle):
    """Batches that come late."""

    def next(self) -> Any:
        CLOCK.wait(WAIT)
        return super().next()


def test_a_slow_loader_is_named_and_proven(tmp_path):
    late = work(batches=Late(rows(12), 4))
    before, position = weights_hash(late.model), late.batches.state()
    state = torch.get_rng_state()
    trace = tmp_path / "traces" / "t.json"
    found = measure_speed(late, seconds=0.1, trace=trace)
    assert found.bottleneck == "data" and sum(found.shares.values()) == pytest.approx(1.0)
    assert found.trial is not None and found.trial.change == "one cached batch"
    assert found.seconds["data"] == pytest.approx(WAIT + TICK)
    assert found.trial.before - found.trial.measured == pytest.approx(WAIT)
    assert found.trial.agrees and found.gain > 1.2 and "faster source" in found.fix
    assert weights_hash(late.model) == before and late.batches.state() == position
    assert torch.equal(torch.get_rng_state(), state)
    assert json.loads((tmp_path / "traces" / "t.json").read_text())["traceEvents"]


def test_small_operations_are_the_hosts():
    """One update was asked for; the probe takes as many as it needs."""
    found = measure_speed(work(settings=work().settings), seconds=0.1)
    assert found.bottleneck == "host"
    assert found.trial is not None and found.trial.batches == 2
    assert 0 < found.mfu < 0.2 and found.hfu == found.mfu


def test_a_slow_observer_is_the_log():
    def observer(event: Any) -> None:
        if hasattr(event, "row"):
            CLOCK.wait(WAIT)

    found = measure_speed(work(observers=(observer,)), seconds=0.1)
    assert found.bottleneck == "log"
    assert found.trial is not None and found.trial.change == "no observers"
    assert found.trial.before - found.trial.measured == pytest.approx(WAIT)


def test_times_are_of_a_profile_without_shapes_and_products_of_one_with_them(monkeypatch):
    """With shapes the profiler's own memory lies between large blocks: fresh pages each pass."""
    asked, real = [], torch.profiler.profile

    def profile(*arguments: Any, **options: Any) -> Any:
        asked.append(options.get("record_shapes", False))
        return real(*arguments, **options)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    found = measure_speed(work(), seconds=0.1, prove=False)
    assert asked == [True, False] and found.mfu > 0


def test_an_update_that_takes_too_long_is_measured_on_some_of_its_packs(monkeypatch):
    monkeypatch.setattr(speed_probe, "LONGEST", 0.0)
    huge = work(batches=Cycle(rows(12), 6))
    position, said = huge.batches.state(), []
    found = measure_speed(huge, seconds=0.1, say=said.append)
    assert "all its 6 packs" in said[0] and "measured on 1 packs" in said[0]
    assert said[0] in found.notes and huge.batches.state() == position
    whole = measure_speed(work(batches=Cycle(rows(12), 1)), seconds=0.1, prove=False)
    assert found.tokens < 2 * whole.tokens


def test_packs_that_are_left_over_come_in_the_next_update():
    some = speed_probe.Some(Cycle(rows(12), 4), 3)
    loader = Cycle(rows(12), 4)
    expected = [*loader.next(), *loader.next(), *loader.next()]
    found = [one for _ in range(4) for one in some.next()]
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in expected]


def test_products_are_proven_by_half_the_width(monkeypatch):
    monkeypatch.setattr(speed_probe, "bottleneck_of", lambda _: "compute")
    asked = []

    def halved() -> Small | None:
        asked.append(1)
        return Small()  # as wide as before: nothing gets smaller

    wide = work(halved=halved)
    position = wide.batches.state()
    found = measure_speed(wide, seconds=0.1)
    assert found.trial is not None and found.trial.change == "half the width" and asked == [1]
    assert found.trial.predicted == pytest.approx(found.total, rel=0.02)
    assert wide.batches.state() == position
    other = measure_speed(work(halved=lambda: None), seconds=0.1)  # an unknown architecture
    assert other.trial is not None and other.trial.change == "twice the batch"


def test_no_batch_to_double():
    settings = work().settings
    found = measure_speed(work(merge=None, settings=settings), seconds=0.1)
    assert found.trial is None and "cannot be merged" in found.notes[0]


def test_memory_that_does_not_hold_twice_the_batch():
    def full(packs: Any) -> Any:
        raise MemoryError

    settings = work().settings
    found = measure_speed(work(merge=full, settings=settings), seconds=0.1)
    assert found.trial is None and "twice the batch" in found.notes[0]


def test_exchange_with_itself_is_what_equal_ranks_say(monkeypatch):
    from torch import distributed as dist

    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    real = dist.all_reduce
    with timed_exchange() as spent, exchanged(by_itself=True):
        value = torch.ones(2)
        dist.all_reduce(value)
        gathered = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(gathered, value)
        dist.barrier()
    assert value.tolist() == [3.0, 3.0] and all(one.tolist() == [3.0, 3.0] for one in gathered)
    assert dist.all_reduce is real and spent == [0.0]
