import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lehr.errors import RecipeError
from lehr.training.schedules import Schedule, as_updates, learning_rate, schedule_problems


def curve(kind, updates, **values):
    return Schedule(kind, **({"warmup": 0, "decay": 0.2, "final": 0.0} | values)).curve(
        1.0, updates
    )


def test_linear_values_in_closed_form():
    expected = [0.25, 0.5, 0.75, 1.0] + [step / 9 for step in range(8, 0, -1)]
    assert curve("linear", 12, warmup=4) == pytest.approx(expected, abs=1e-15)


def test_cosine_values_in_closed_form():
    rates = curve("cosine", 9, warmup=2, final=0.1)
    assert rates[:2] == [0.5, 1.0]
    assert rates[5] == pytest.approx(0.55)  # half way from peak (1) to the end (9): the middle
    assert rates[8] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 7 / 8)))


def test_wsd_is_flat_then_linear():
    rates = curve("wsd", 10, warmup=2, decay=4, final=0.5)
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6])


def test_constant_holds_the_peak_after_warmup():
    assert curve("constant", 5, warmup=2) == [0.5, 1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_corners(kind):
    assert curve(kind, 12, warmup=0)[0] == 1.0
    assert curve(kind, 12, warmup=12, decay=0)[-1] == 1.0  # all of the run is warmup
    assert curve(kind, 1, warmup=1, decay=0) == [1.0]


def test_shares_and_updates():
    assert [as_updates(length, 200) for length in (0, 0.03, 0.5, 1, 1.0, 20)] == [
        0,
        6,
        100,
        1,
        1,
        20,
    ]


@given(
    kind=st.sampled_from(["cosine", "linear", "wsd"]),
    updates=st.integers(1, 300),
    warmup=st.floats(0, 0.6),
    decay=st.floats(0, 0.39),
    final=st.floats(0, 1),
)
def test_rises_once_falls_once_and_never_jumps_back(kind, updates, warmup, decay, final):
    shape = Schedule(kind, warmup, decay, final)
    if schedule_problems(shape, updates):
        return
    rates = [shape.rate(index, 2.0, updates) for index in range(updates + 3)]
    top = rates.index(max(rates))
    assert all(a <= b for a, b in itertools.pairwise(rates[: top + 1]))
    tail = rates[top:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(tail))
    assert rates[-1] == pytest.approx(2.0 * final)  # past the run: the end, not the peak
    assert max(rates) == 2.0


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"kind": "exponential"}, "schedule.kind"),
        ({"warmup": 20}, "schedule.warmup"),
        ({"warmup": 1.5}, "schedule.warmup"),
        ({"warmup": -0.1}, "schedule.warmup"),
        ({"warmup": math.nan}, "schedule.warmup"),
        ({"warmup": True}, "schedule.warmup"),
        ({"final": 1.5}, "schedule.final"),
        ({"final": math.inf}, "schedule.final"),
        ({"kind": "wsd", "warmup": 6, "decay": 7}, "schedule.decay"),
    ],
)
def test_refused(changes, where):
    with pytest.raises(RecipeError) as caught:
        Schedule(**changes).curve(1.0, 12)
    assert [problem.where for problem in caught.value.problems] == [where]


def test_the_function_is_the_schedule():
    values = {"kind": "wsd", "warmup": 0.1, "decay": 0.3, "final": 0.2}
    for index in range(50):
        expected = learning_rate(index, peak=3e-4, updates=40, **values)
        assert Schedule(**values).rate(index, 3e-4, 40) == expected
