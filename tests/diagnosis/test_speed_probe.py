"""The probe on a small module: what is in the way is named, and nothing is left behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training.small_runs import Cycle, NextToken, Small, merge_packs, rows, weights_hash

from lehr.diagnosis import speed_probe
from lehr.diagnosis.speed_probe import Speed, Workload, measure_speed
from lehr.diagnosis.speed_ranks import exchanged, timed_exchange
from lehr.training.settings import EngineSettings

LIMITS = {"gflops": 50.0, "gbytes": 10.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(speed_probe, "measure_limits", lambda *_: LIMITS)
    monkeypatch.setattr(speed_probe, "MOST", 6)


def work(**changes: Any) -> Workload:
    settings = EngineSettings(updates=1, learning_rate=0.1, checkpoint_every=10**6)
    given = {"batches": Cycle(rows(12), 4), "settings": settings, "merge": merge_packs}
    return Workload(Small(), NextToken(), seed_names=(0, "speed"), **{**given, **changes})


WAIT = 0.15  # seconds: far above an update of the small module, also on a busy machine
ATTEMPTS = 4  # other programs can fall on one measurement; a wrong rule falls on all


class Late(Cycle):
    """Batches that come late."""

    def next(self) -> Any:
        time.sleep(WAIT)
        return super().next()


def named(bottleneck: str, measure: Callable[[], Speed]) -> Speed:
    """The first measurement that names it and whose trial is faster, of a few."""
    found = []
    for _ in range(ATTEMPTS):
        one = measure()
        found.append((one.bottleneck, one.trial))
        trial = one.trial
        if one.bottleneck != bottleneck or trial is None:
            continue
        if trial.batches > 1 or trial.measured < 0.7 * trial.before:
            return one
    raise AssertionError(found)


def test_a_slow_loader_is_named_and_proven(tmp_path):
    late = work(batches=Late(rows(12), 4))
    before, position = weights_hash(late.model), late.batches.state()
    state = torch.get_rng_state()
    trace = tmp_path / "traces" / "t.json"
    found = named("data", lambda: measure_speed(late, seconds=0.1, trace=trace))
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.trial is not None and found.trial.change == "one cached batch"
    assert found.gain > 1.2 and "faster source" in found.fix
    assert weights_hash(late.model) == before and late.batches.state() == position
    assert torch.equal(torch.get_rng_state(), state)
    assert json.loads((tmp_path / "traces" / "t.json").read_text())["traceEvents"]


def test_small_operations_are_the_hosts():
    """One update was asked for; the probe takes as many as it needs."""
    found = named("host", lambda: measure_speed(work(settings=work().settings), seconds=0.1))
    assert found.trial is not None and found.trial.batches == 2
    assert 0 < found.mfu < 0.2 and found.hfu == found.mfu


def test_a_slow_observer_is_the_log():
    def observer(event: Any) -> None:
        if hasattr(event, "row"):
            time.sleep(WAIT)

    found = named("log", lambda: measure_speed(work(observers=(observer,)), seconds=0.1))
    assert found.trial is not None and found.trial.change == "no observers"


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
