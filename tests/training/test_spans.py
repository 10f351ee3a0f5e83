"""Spans of a run: exclusive, told with each update, and in no line of metrics.jsonl."""

from __future__ import annotations

import pytest
from tests.training.small_runs import lines_of, make_engine

from lehr.training import events
from lehr.training.spans import Spans


def test_a_span_inside_another_counts_for_itself():
    now = [0.0]
    spans = Spans()
    spans.clock = lambda: now[0]
    with spans("evaluation"):
        now[0] += 2.0
        with spans("log"):
            now[0] += 5.0
            with spans("data"):
                now[0] += 1.0
        now[0] += 3.0
    with spans("log"):
        now[0] += 0.5
    assert spans.take() == {"data": 1.0, "log": 5.5, "evaluation": 5.0}
    assert spans.take() == {}


def test_a_span_ends_with_an_error():
    spans = Spans()
    with pytest.raises(ValueError, match="x"), spans("data"):
        raise ValueError("x")
    assert list(spans.take()) == ["data"]


def test_a_run_tells_its_spans_and_keeps_them_out_of_the_metrics(tmp_path):
    heard: list[events.Event] = []
    made = make_engine(tmp_path, 4, observers=(heard.append,), evaluate_every=2)
    made.run()
    told = [event.spans for event in heard if isinstance(event, events.UpdateDone)]
    assert len(told) == 4 and all(set(one) >= {"data", "log"} for one in told)
    assert "evaluation" not in told[0] and told[2]["evaluation"] > 0
    (last,) = [event for event in heard if isinstance(event, events.RunDone)]
    assert heard[-1] is last and last.spans["evaluation"] > 0 and last.spans["checkpoint"] > 0
    assert not any("data" in row for row in lines_of(tmp_path))
