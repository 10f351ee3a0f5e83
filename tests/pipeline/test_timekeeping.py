"""time.json: seconds of all starts of a stage, none of a run that began anew."""

from __future__ import annotations

from pathlib import Path

from lehr.pipeline.timekeeping import TimeKeeper
from lehr.training import events as engine


def test_starts_add_up_and_a_new_run_begins_at_zero(tmp_path):
    written = engine.CheckpointWritten(2, Path("x"), ())
    done = engine.UpdateDone({"seconds": 2.0}, {"data": 0.5, "log": 0.25})
    first = TimeKeeper(tmp_path)
    for event in (engine.RunStarted(0, 0, 9), done, done, written, done):  # and killed
        first(event)
    again = TimeKeeper(tmp_path)
    for event in (engine.RunStarted(2, 2, 9), done, engine.RunDone({"evaluation": 3.0})):
        again(event)
    kept = TimeKeeper(tmp_path)
    kept(engine.RunStarted(3, 3, 9))
    assert kept.seconds == {"attempts": 6.0, "data": 1.5, "log": 0.75, "evaluation": 3.0}
    kept(engine.RunStarted(0, 0, 9))
    assert kept.seconds == {}
