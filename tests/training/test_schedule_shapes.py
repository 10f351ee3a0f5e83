"""Cooldown shapes, infinite schedules, re-warming: closed forms and what must not change."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import lines_of, make_engine

from lehr.errors import RecipeError
from lehr.training.schedules import Schedule, schedule_problems


def curve(kind, updates, **values):
    return Schedule(kind, **({"warmup": 0, "final": 0.0} | values)).curve(1.0, updates)


def test_wsd_with_a_root_falls_faster_first():
    """1 - sqrt(x) at x = 1/5 to 4/5; the end itself would be one update later."""
    rates = curve("wsd", 10, warmup=2, decay=4, shape="sqrt", final=0.2)
    assert rates[:6] == [0.5, 1, 1, 1, 1, 1]
    assert rates[6:] == pytest.approx([0.2 + 0.8 * (1 - math.sqrt(x / 5)) for x in range(1, 5)])


def test_linear_to_zero_never_spends_an_update_at_zero():
    rates = curve("linear", 10)
    assert rates == pytest.approx([1 - i / 10 for i in range(10)]) and rates[-1] > 0
    assert Schedule("linear", 0, final=0.0).rate(10, 1.0, 10) == 0.0
    assert Schedule("linear", 0, final=0.0).rate(11, 1.0, 10) == 0.0


def test_infinite_in_closed_form():
    rates = curve("infinite", 12, warmup=2, cooldown=4, hold=0.5, decay=3, final=0.1)
    cosine = [0.5 + 0.25 * (1 + math.cos(math.pi * x / 4)) for x in range(1, 4)]
    anneal = [0.1 + 0.4 * (1 - x / 4) for x in (1, 2, 3)]
    assert rates == pytest.approx([0.5, 1, *cosine, 0.5, 0.5, 0.5, 0.5, *anneal])


def test_infinite_without_a_decay_does_not_know_the_length_of_the_run():
    shape = Schedule("infinite", warmup=3, decay=0, cooldown=5, hold=0.4)
    short, long = shape.curve(1.0, 12), shape.curve(1.0, 500)
    assert long[:12] == short and set(long[8:]) == {0.4}
    assert shape.rate(900, 1.0, 12) == 0.4


def test_a_branch_goes_on_without_a_jump():
    """Held weights, the held rate as the peak, no warmup: one curve with the run it left."""
    run = Schedule("infinite", warmup=3, decay=0, cooldown=5, hold=0.4)
    branch = Schedule("linear", warmup=0, final=0.0)
    joined = run.curve(2e-3, 40) + branch.curve(0.4 * 2e-3, 10)
    whole = Schedule("infinite", 3, 10, 0.0, "linear", 0.0, 5, 0.4).curve(2e-3, 50)
    assert joined[40] == pytest.approx(joined[39])
    assert max(abs(a - b) for a, b in zip(joined, whole, strict=True)) < 0.4 * 2e-3 * 0.1


def test_re_warming_begins_at_the_old_rate():
    rates = curve("cosine", 20, warmup=5, initial=0.2)
    assert rates[:5] == pytest.approx([0.2 + 0.8 * (i + 1) / 5 for i in range(5)])
    assert rates[4] == 1.0 and rates[5] < 1.0
    assert curve("cosine", 20, warmup=5) == curve("cosine", 20, warmup=5, initial=0.0)
    # From the last rate of a run that ended at a fifth of its peak: no jump down.
    before = Schedule("cosine", 0, final=0.2).rate(100, 1.0, 100)
    assert before == pytest.approx(0.2) and rates[0] > before


@given(
    updates=st.integers(8, 200),
    warmup=st.integers(0, 3),
    cooldown=st.integers(0, 3),
    decay=st.integers(0, 2),
    hold=st.floats(0.2, 1.0),
    initial=st.floats(0, 1),
    shape=st.sampled_from(["linear", "sqrt"]),
)
def test_between_zero_and_the_peak_and_never_up_again(
    updates, warmup, cooldown, decay, hold, initial, shape
):
    schedule = Schedule("infinite", warmup, decay, 0.1, shape, initial, cooldown, hold)
    rates = schedule.curve(1.0, updates)
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    if warmup or cooldown:
        assert max(rates) == 1.0
    after = rates[max(warmup - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    beyond = [schedule.rate(updates + more, 1.0, updates) for more in range(5)]
    assert all(rate <= rates[-1] + 1e-12 for rate in beyond)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"kind": "wsd", "shape": "cubic"}, "shape"),
        ({"kind": "linear", "initial": 1.5}, "initial"),
        ({"kind": "linear", "initial": float("nan")}, "initial"),
        ({"kind": "infinite", "warmup": 0.1}, "warmup"),
        ({"kind": "infinite", "warmup": 200, "decay": 0}, "warmup"),
        ({"kind": "infinite", "warmup": 1, "cooldown": 0.5}, "cooldown"),
        ({"kind": "infinite", "warmup": 1, "cooldown": 2.5}, "cooldown"),
        ({"kind": "infinite", "warmup": 50, "cooldown": 40, "decay": 20}, "decay"),
        ({"kind": "infinite", "warmup": 1, "hold": 0.05, "decay": 10}, "final"),
        ({"kind": "infinite", "warmup": 1, "hold": 2.0}, "hold"),
    ],
)
def test_bad_values(values, name):
    problems = schedule_problems(Schedule(**values), 100)
    assert [problem.where for problem in problems] == [f"schedule.{name}"]
    with pytest.raises(RecipeError, match=name):
        Schedule(**values).curve(1.0, 100)


def test_resumed_at_k_is_the_schedule_from_scratch(tmp_path):
    shape = Schedule("infinite", 2, 0.25, 0.0, "sqrt", 0.3, 2, 0.5)
    values = {"schedule": shape, "learning_rate": 1e-2, "evaluate": None}
    make_engine(tmp_path, 12, **values).run()
    assert [line["learning_rate"] for line in lines_of(tmp_path)] == shape.curve(1e-2, 12)
