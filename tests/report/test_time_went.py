"""Where a stage's time went: rows by hand, and nothing where nothing was kept."""

from __future__ import annotations

from dataclasses import replace

from lehr.report.reading import StageFiles
from lehr.report.time_went import limit_words, time_went

STAGE = StageFiles(
    folder="01-sft",
    entry={"seconds": 100.0},
    planned={"limit_tokens_per_second": 500.0},
    audit={},
    evaluation={},
    flips=[],
    metrics=[{"tokens": 8000}, {"tokens": 8000}],
    time={"attempts": 80.0, "data": 20.0, "evaluation": 10.0, "log": 0.1, "checkpoint": "x"},
)


def test_seconds_of_a_stage_add_up():
    assert time_went(STAGE) == [
        ("computing updates", "60 s", "60%"),
        ("waiting for data", "20 s", "20%"),
        ("evaluations during training", "10 s", "10%"),
        ("everything around: gates, samples, saving", "9.9 s", "10%"),
    ]
    assert "40% of this machine's limit" in limit_words(STAGE)


def test_a_stage_without_a_record():
    assert time_went(replace(STAGE, time={})) == [] and limit_words(replace(STAGE, time={})) == ""
    assert limit_words(replace(STAGE, planned={})) == ""
