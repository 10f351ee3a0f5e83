"""Sentences that terminal, ledger and report share."""

from __future__ import annotations

from lehr.report.wording import gate_sentence, time_words

GATE = {
    **{"name": "g", "unit": "share", "kind": "protect", "against": "base", "limit": 0.04},
    **{"verdict": "undetermined", "difference": None, "low": None, "high": None},
}


def test_a_gate_that_measured_nothing_has_a_sentence():
    assert gate_sentence(GATE) == "g: not measured"
    half = GATE | {"difference": 0.1}
    few = "+10 points (too few items for an interval), limit +4"
    assert gate_sentence(half, against=True) == f"g vs base: {few}"
    assert gate_sentence(half) == f"g {few}"


def test_what_an_undetermined_gate_would_need_is_said_where_it_is_asked_for():
    gate = GATE | {"difference": -0.031, "low": -0.105, "high": 0.04, "n_to_decide": 1234, "n": 60}
    said = "g -3.1 points [-10.5, +4], limit +4"
    assert gate_sentence(gate, minus="-") == said
    assert gate_sentence(gate, needs=True, minus="-") == (
        said + ", 1,234 items would decide (60 are there)"
    )
    passed = gate | {"verdict": "passed"}
    assert gate_sentence(passed, needs=True, minus="-") == said


def test_the_time_of_this_run_and_of_its_stages_are_told_apart():
    stages = [{"reused": False, "seconds": 30.0}, {"reused": False, "seconds": 60.0}]
    assert time_words({"seconds": 100.0, "stages": stages}) == "1.7 min"
    again = [one | {"reused": True} for one in stages]
    words = time_words({"seconds": 3.0, "stages": again})
    assert words == "3.0 s; 2 of 2 stages reused, made earlier in 1.5 min"
    assert time_words({"seconds": None, "stages": []}) == "–"
