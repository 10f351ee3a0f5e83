"""A spike's cause from its record, its replays and their bits."""

from __future__ import annotations

import json
import math

import pytest

from lehr.diagnosis.spike import (
    Bits,
    Record,
    Replay,
    Spike,
    Values,
    bad_state,
    limit_of,
    recorded,
    verdict,
    worst,
)

CALM = (2.0,) * 8


def replay(state, update, batch, before=CALM, met=False):
    return Replay(state, update, Values(batch, before, (2.0,) * 4), met=met)


BEGIN, OLDER = replay("begin", 0, 2.1), replay("older", 10, 2.1)
ODD_BEGIN, ODD_OLDER = replay("begin", 0, 9.0), replay("older", 10, 9.0)
MET, ODD_MET = replay("met", 19, 2.1, met=True), replay("met", 19, 9.0, met=True)
BAD_MET = replay("met", 19, 4.0, before=(4.0,) * 8, met=True)
NAN_MET = replay("met", 19, math.nan, before=(math.nan,) * 8, met=True)
SPIKE = Record(20, 9.0, "loss", 9.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("record", "replays", "bits", "untrained", "expected"),
    [
        (SPIKE, (ODD_BEGIN, ODD_OLDER, ODD_MET), Bits(10), False, "data"),
        (SPIKE, (BEGIN, OLDER, BAD_MET), Bits(10), False, "state"),
        (SPIKE, (BEGIN, OLDER, NAN_MET), Bits(10), False, "state"),
        (SPIKE, (BEGIN, OLDER, ODD_MET), Bits(10), False, "data and state"),
        (SPIKE, (BEGIN, ODD_OLDER, ODD_MET), Bits(10), False, "data and state"),
        (SPIKE, (ODD_BEGIN, ODD_OLDER, BAD_MET), Bits(10), False, "data and state"),
        (SPIKE, (ODD_BEGIN, ODD_OLDER, ODD_MET), Bits(10, departure=12), False, "not reproducible"),
        (Record(20, 2.0), (BEGIN, OLDER, MET), Bits(10), False, "nothing unusual"),
        (SPIKE, (BEGIN, OLDER, MET), Bits(10), False, "cannot tell"),
        # Untrained weights find everything equally unlikely: that says nothing.
        (SPIKE, (BEGIN, ODD_MET), Bits(0), True, "cannot tell"),
        (SPIKE, (ODD_BEGIN, ODD_MET), Bits(0), True, "data"),
        (SPIKE, (BEGIN, BAD_MET), Bits(0), True, "state"),
    ],
)
def test_verdicts(record, replays, bits, untrained, expected):
    assert verdict(record, replays, bits, untrained) == expected
    found = Spike("01-sft", 20, record, replays, bits, untrained=untrained).as_json()
    assert json.loads(json.dumps(found, allow_nan=False))["verdict"] == expected


def test_of_an_untrained_model_only_states_that_learnt_can_tell():
    begin = replay("begin", 0, 6.0, before=(6.0,) * 8)
    hardly = replay("update 1", 1, 5.9, before=(5.9,) * 8)
    learnt = replay("update 10", 10, 9.0)
    odd = replay("met", 19, 9.0, met=True)
    assert verdict(SPIKE, (begin, hardly, learnt, odd), Bits(10), untrained=True) == "data"
    assert verdict(SPIKE, (begin, hardly, learnt, odd), Bits(10)) == "data and state"


def test_the_limit_of_neighbours_by_hand():
    # median 4.5, distances 3.5 2.5 1.5 0.5 twice: MAD 2; 4 (1 + 8/8) spreads
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    usual, limit = limit_of(values)
    assert usual == 4.5 and limit == pytest.approx(4.5 + 8 * 1.4826 * 2.0)
    assert all(math.isnan(one) for one in limit_of([1.0, 2.0]))
    with_one_spike = [1.0] * 8 + [9.0]
    assert limit_of(with_one_spike)[1] == 17.0
    assert limit_of(with_one_spike, tail=False)[1] == pytest.approx(1 + 4 * (1 + 8 / 9) * 0.03)


def test_a_bad_state_is_worse_for_most_neighbours():
    assert bad_state(replay("met", 9, 2.0, before=(2.2,) * 8), [OLDER])
    assert not bad_state(replay("met", 9, 2.0, before=(2.04,) * 8), [OLDER])
    half = (*(1.9,) * 4, *(4.0,) * 4)
    assert not bad_state(replay("met", 9, 2.0, before=half), [OLDER]), "half of them is no most"


def row(update, loss=2.0, **more):
    line = {"attempt": update, "update": update, "skipped": False, "loss": loss}
    return line | {"grad_norm": 1.0, "update_norm": 0.1, "learning_rate": 0.01} | more


def test_what_the_record_says():
    past = [row(n, 2.0 + 0.01 * (n % 3)) for n in range(1, 20)]
    assert recorded(past, row(20)).signal == ""
    loud = recorded(past, row(20, 5.0))
    assert loud.signal == "loss" and loud.value == 5.0 and 2.0 < loud.limit < 3.0
    assert recorded(past, row(20, grad_norm=50.0)).signal == "gradient norm"
    assert recorded(past, row(20, None, nonfinite=["loss"])).signal == "not finite"
    guard = {"guard.signal": "log Z", "guard.value": 9, "guard.usual": 1, "guard.limit": 2}
    assert recorded(past, row(19, skipped=True, **guard)).signal == "log Z"
    past[17]["update_norm"] = 4.0
    assert recorded(past, row(20, 5.0)).long_step == 18


def test_rows_that_are_not_finite_come_first():
    found = worst({"a": 1.0, "b": math.nan, "c": 5.0, "d": 2.0})
    assert [one.origin for one in found] == ["b", "c", "d"]
    assert found[1].others == 1.5, "the middle of 1 and 2"
