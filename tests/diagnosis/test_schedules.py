"""The lint of a curve of learning rates (fault B17: schedules that do something else)."""

from __future__ import annotations

import math

import pytest

from lehr.diagnosis.schedules import schedule_findings


def cosine(updates: int, warmup: int, final: float = 0.1) -> list[float]:
    rates = []
    for index in range(updates):
        if index < warmup:
            rates.append((index + 1) / warmup)
        else:
            done = (index - warmup) / max(1, updates - warmup)
            rates.append(final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)
    return rates


@pytest.mark.parametrize("updates", [1, 2, 10, 300])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_healthy_curves_are_silent(updates: int, warmup: int) -> None:
    if warmup < updates:
        assert schedule_findings(cosine(updates, warmup), peak=1.0, warmup_updates=warmup) == []
    assert schedule_findings([1.0] * updates, peak=1.0) == []


def test_peak_never_reached_and_warmup_longer_than_the_run() -> None:
    found = schedule_findings([index / 20 for index in range(1, 13)], 1.0, warmup_updates=20)
    assert len(found) == 2
    assert "never reached" in found[0] and "longer than the run" in found[1]


def test_whole_run_is_warmup() -> None:
    found = schedule_findings([0.25, 0.5, 0.75, 1.0], peak=1.0)
    assert found == ["the rate rises to the last update: the whole run is warm-up"]


def test_above_the_peak() -> None:
    assert "above the peak" in schedule_findings([1.0, 2.0, 1.0], peak=1.0)[0]


def test_tail_at_zero() -> None:
    found = schedule_findings(cosine(90, 3, final=0.0) + [0.0] * 10)
    assert len(found) == 1 and "teach nothing" in found[0]


def test_jump_back_to_the_peak_past_the_end() -> None:
    found = schedule_findings([*cosine(100, 3), 1.0])
    assert len(found) == 1 and "jumps" in found[0] and "update 101" in found[0]


def test_scheduler_stepped_once_per_process() -> None:
    """B17 at four processes: 0, 1, .5, 0 and then nothing."""
    found = schedule_findings([0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], peak=1.0)
    assert any("teach nothing" in line for line in found)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
def test_what_is_no_rate(bad: float) -> None:
    assert schedule_findings([0.1, bad]) == [f"the rate of update 2 is {bad}: not a rate"]


def test_nothing_and_zero() -> None:
    assert schedule_findings([]) == ["the schedule has no updates"]
    assert schedule_findings([0.0, 0.0]) == ["every rate is 0: nothing would be learnt"]


def test_an_end_that_nothing_can_go_on_from() -> None:
    """The curve of linear-to-zero has no update at 0: only the rate after it tells."""
    linear = [1 - index / 10 for index in range(10)]
    (found,) = schedule_findings(linear, 1.0, 0, rate_after=0.0)
    assert "nothing can go on from its end" in found and "infinite" in found
    assert schedule_findings(linear, 1.0, 0, rate_after=1e-4) == [found]
    assert schedule_findings(cosine(100, 3), 1.0, 3, rate_after=0.1) == []
    tail = [*linear, 0.0, 0.0]  # said once: the tail at zero is the worse of the two
    assert len(schedule_findings(tail, 1.0, 0, rate_after=0.0)) == 1
