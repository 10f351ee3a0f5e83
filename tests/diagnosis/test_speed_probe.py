"""The probe on a small module: what is in the way is named, and nothing is left behind."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from tests.training.small_runs import Cycle, NextToken, Small, merge_packs, rows, weights_hash

from lehr.diagnosis import speed_probe
from lehr.diagnosis.speed_probe import Workload, measure_speed
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


class Late(Cycle):
    """Batches that come 30 ms late."""

    def next(self) -> Any:
        time.sleep(0.03)
        return super().next()


def test_a_slow_loader_is_named_and_proven(tmp_path):
    late = work(batches=Late(rows(12), 4))
    before, position = weights_hash(late.model), late.batches.state()
    state = torch.get_rng_state()
    found = measure_speed(late, seconds=0.1, trace=tmp_path / "traces" / "t.json")
    assert found.bottleneck == "data" and found.shares["data"] > 0.4
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.trial is not None and found.trial.change == "one cached batch"
    assert found.trial.before - found.trial.measured > 0.02, "the wait is gone"
    assert found.gain > 1.5 and "faster source" in found.fix
    assert weights_hash(late.model) == before and late.batches.state() == position
    assert torch.equal(torch.get_rng_state(), state)
    assert json.loads((tmp_path / "traces" / "t.json").read_text())["traceEvents"]


def test_small_operations_are_the_hosts():
    """One update was asked for; the probe takes as many as it needs."""
    found = measure_speed(work(settings=work().settings), seconds=0.1)
    assert found.bottleneck == "host" and found.shares["host"] > 0.5
    assert found.trial is not None and found.trial.batches == 2
    assert 0 < found.mfu < 0.2 and found.hfu == found.mfu


def test_a_slow_observer_is_the_log():
    def observer(event: Any) -> None:
        if hasattr(event, "row"):
            time.sleep(0.03)

    found = measure_speed(work(observers=(observer,)), seconds=0.1)
    assert found.bottleneck == "log" and found.trial is not None
    assert found.trial.change == "no observers" and found.trial.measured < 0.03


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
