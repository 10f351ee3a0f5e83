"""The guard's arithmetic and decisions, without a run."""

import math

import pytest

from lehr.errors import RecipeError
from lehr.training.guard import Guard as RealGuard
from lehr.training.guard import GuardSettings, signals_of
from lehr.training.robust import FEWEST, Kind, Window, median, spread
from lehr.training.schedules import raise_problems

NORM = "gradient norm"
PLAIN = Kind(logarithm=False, absolute=0.1)
WAVE = [3.0 + 0.01 * (-1) ** n for n in range(200)]  # a loss with noise 0.01


def guard(**settings):
    return RealGuard(GuardSettings(**settings))


def feed(one, losses, norm=1.0):
    """'go' or 'skip' for each loss; accepted ones enter the windows."""
    said = []
    for attempt, loss in enumerate(losses, 1):
        signals = signals_of(loss, norm, {})
        alarm = one.judge(signals) if math.isfinite(loss) else "not finite"
        if alarm is None:
            one.accept(attempt, signals)
        said.append("skip" if alarm else "go")
    return said


def test_median_and_spread_by_hand():
    assert median([5.0, 1.0, 3.0]) == 3.0
    values = [1.0, 2.0, 4.0, 7.0, 9.0]  # distances from 4: 3 2 0 3 5, their median 3
    assert spread(values, 4.0) == pytest.approx(3 * 1.4826)


def test_the_limit_by_hand():
    """Eight values, so that limit 8 counts as 8 (1 + 8/8) = 16 spreads."""
    window = Window(PLAIN, 64, [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4])
    # median 1.7, distances 0.7 0.5 0.3 0.1 0.1 0.3 0.5 0.7: MAD 0.4
    limit = 1.7 + 16 * 1.4826 * 0.4
    assert window.judge(limit + 1e-9, 8.0).limit == pytest.approx(limit)
    assert window.judge(limit - 1e-9, 8.0) is None
    # a heavy tail: twice the largest excess is usual, whatever the spread
    tail = Window(PLAIN, 64, [1.0] * 60 + [11.0])
    assert tail.judge(20.9, 8.0) is None and tail.judge(21.1, 8.0).limit == pytest.approx(21.0)


def test_logarithms_compare_factors():
    window = Window(Kind(logarithm=True, absolute=0.1), 64, [math.log(2.0)] * 64)
    found = window.judge(10.0, 8.0)  # 8 x 1.125 x 0.1 = 0.9
    assert found.usual == pytest.approx(2.0) and found.limit == pytest.approx(2.0 * math.exp(0.9))
    assert window.judge(4.9, 8.0) is None and window.judge(0.0, 8.0) is None


def test_few_values_judge_nothing_and_a_fall_is_no_alarm():
    assert feed(guard(), [3.0] * (FEWEST - 1) + [50.0])[-1] == "go"
    assert set(feed(guard(), [10.0 / (n + 1) for n in range(200)])) == {"go"}
    assert set(feed(guard(), [3.0] * 40 + [0.1])) == {"go"}


def test_one_nan_does_not_freeze_training():
    said = feed(guard(), [*WAVE[:40], math.nan, *WAVE[40:170]])
    assert said[40] == "skip" and set(said[41:]) == {"go"}


def test_a_second_spike_right_after_the_first_is_still_caught():
    one = guard()
    feed(one, WAVE[:128])
    before = one.judge(signals_of(4.0, 1.0, {})).limit
    assert feed(one, [4.0, 4.0, 3.9, 3.0, 3.8]) == ["skip", "skip", "skip", "go", "skip"]
    assert one.judge(signals_of(4.0, 1.0, {})).limit == pytest.approx(before, abs=0.02)


def test_every_signal_is_watched():
    one = guard()
    usual = {"log_z": 5.0, "attention_logit": 8.0}
    for attempt in range(64):
        one.accept(attempt, signals_of(3.0, 1.0, usual))
        assert one.moved(attempt, 2.0) is None
    assert one.judge(signals_of(4.0, 1.0, usual)).signal == "loss"
    assert one.judge(signals_of(3.0, 9.0, usual)).signal == "gradient norm"
    assert one.judge(signals_of(3.0, 1.0, usual | {"log_z": -9.0})).signal == "log Z"
    high = usual | {"attention_logit": 80.0}
    assert one.judge(signals_of(3.0, 1.0, high)).signal == "attention logit"
    assert one.judge(signals_of(4.0, 900.0, usual)).signal == "gradient norm", "the worst one"
    assert one.moved(64, 20.0).signal == "update norm"
    assert one.moved(65, 20.0).signal == "update norm", "the first did not enter its window"


def test_sources_stand_for_themselves():
    """A mixture whose shares change is no spike; a source that jumps is one."""
    one = guard()
    for attempt in range(40):
        a_only = {"source.a.loss": 1.0, "source.b.loss": 5.0}
        one.accept(attempt, signals_of(1.5, 1.0, a_only))
    mostly_b = {"source.a.loss": 1.0, "source.b.loss": 5.0}
    assert one.judge(signals_of(4.9, 1.0, mostly_b)) is None
    assert one.judge(signals_of(5.0, 1.0, {"source.b.loss": 5.0})) is None, "b alone"
    alarm = one.judge(signals_of(1.6, 1.0, {"source.a.loss": 1.0, "source.b.loss": 9.0}))
    assert alarm.signal == "loss of b" and "usual 5" in str(alarm)


def test_three_of_eight_unusual_attempts_blame_the_state():
    one = guard()
    assert [one.unusual(attempt) for attempt in (10, 14, 18)] == [False, False, False]
    assert one.unusual(20), "14, 18 and 20 are among the newest eight"


def test_who_is_to_blame():
    one = guard()
    for attempt in range(1, 21):
        one.accept(attempt, signals_of(3.0, 1.0, {}))
    for attempt in (21, 22, 23):
        one.unusual(attempt)
    assert one.to_blame(earlier=0) == [20], "the last one before the trouble"
    assert one.to_blame(earlier=1) == [19, 20, 21, 22, 23], "twice as far, and the trouble itself"
    assert one.to_blame(earlier=2)[:4] == [17, 18, 19, 20]
    for attempt in range(1, 9):
        one.moved(attempt, 1.0)
    one.moved(18, 50.0)
    assert one.to_blame(earlier=0) == [18], "its step was the unusual one"


def test_its_state_comes_back():
    one, other = guard(), guard()
    feed(one, [*WAVE[:60], 9.0])
    one.unusual(61)
    one.moved(60, 0.5)
    other.load(one.state())
    assert other.state() == one.state()
    assert other.judge(signals_of(3.6, 1.0, {})) == one.judge(signals_of(3.6, 1.0, {}))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"policy": "pause"}, {"limit": 0.5}, {"window": 8}, {"rewinds": -1}),
        {"attention_queries": -1},
    ],
)
def test_settings_are_checked(wrong):
    (name,) = wrong
    with pytest.raises(RecipeError, match=f"guard.{name}"):
        raise_problems(GuardSettings(**wrong).problems())


def test_gradients_of_what_is_learnt_by_heart_are_never_unusual() -> None:
    found = RealGuard(GuardSettings())
    for attempt in range(200):
        found.accept(attempt, {NORM: 1e-6 * (1 + 0.01 * (attempt % 3))})
    assert found.judge({NORM: 9e-5}) is None
    assert found.judge({NORM: 2e-4}) is not None
