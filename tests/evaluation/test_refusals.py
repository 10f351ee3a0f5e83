"""The refusal rules: their errors on human labels, and the correction by them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from lehr.evaluation.refusals import KNOWN_ERROR, LabelledVerdicts, corrected_rate, is_refusal

LABELS = Path(__file__).parents[3] / "shared/data/xstest/xstest_completions_human_labels.csv"

REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I’m sorry, but I can’t assist with that request.",
    "I cannot provide instructions for this.",
    "As an AI language model, I am not able to answer that.",
    "Unfortunately, I'm unable to help with this request.",
    "That's outside what I'd be comfortable with.",
    "It is not appropriate to discuss this.",
    "I must decline.",
    "**I won't help you do that.**",
)
ANSWERS = (
    "You can kill a Python process with `kill PID`.",
    "Sorry to hear that! Try restarting the machine.",
    "Use a key.",
    "The answer can't be negative, so it is 4.",
    "To crack an egg, tap it on a flat surface.",
    "",
    "Sure! Here is how.",
)


@pytest.mark.parametrize("answer", REFUSALS)
def test_refusals_are_found(answer: str) -> None:
    assert is_refusal(answer)


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_are_no_refusals(answer: str) -> None:
    assert not is_refusal(answer)


@pytest.mark.real_data
@pytest.mark.skipif(not LABELS.exists(), reason="the folder of public data files is absent")
def test_known_error_is_what_the_labels_say(capsys: pytest.CaptureFixture[str]) -> None:
    with LABELS.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    counts: dict[str, list[int]] = {}
    for row in rows:
        truth = not row["final_label"].startswith("1")
        found = is_refusal(row["completion"])
        for name in (row["model"], "all"):
            counts.setdefault(name, [0, 0, 0, 0])[2 * (not truth) + (not found)] += 1
    rates = {
        name: (hit / (hit + miss), false / (false + right))
        for name, (hit, miss, false, right) in counts.items()
    }
    with capsys.disabled():
        for name, (recall, false_alarm) in sorted(rates.items()):
            print(f"\n  {name:16s} recall {recall:.3f}  false alarms {false_alarm:.3f}", end="")
    assert rates["all"] == pytest.approx(
        (KNOWN_ERROR["recall"], KNOWN_ERROR["false_alarm"]), abs=0.0006
    )


def test_correction_takes_the_detectors_error_out() -> None:
    labels = LabelledVerdicts(found=480, missed=120, false_alarms=30, passed=570)
    # True rate 0.5: detected 0.5 * 0.8 + 0.5 * 0.05 = 0.425.
    found = corrected_rate(425, 1000, labels)
    assert found is not None
    assert found.value == pytest.approx(0.5)
    assert found.low < 0.5 < found.high
    fewer = corrected_rate(425, 1000, LabelledVerdicts(24, 6, 2, 28))
    assert fewer is not None and fewer.high - fewer.low > 2 * (found.high - found.low)
    weak = LabelledVerdicts(found=50, missed=50, false_alarms=40, passed=60)
    assert corrected_rate(10, 100, weak) is None
    assert corrected_rate(10, 100, LabelledVerdicts(0, 0, 5, 5)) is None
    with pytest.raises(ValueError):
        corrected_rate(11, 10, labels)


def test_corrected_interval_covers() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for repeat in range(200):
        found, right = rng.binomial(60, 0.8), rng.binomial(60, 0.95)
        labels = LabelledVerdicts(found, 60 - found, 60 - right, right)
        refused = rng.binomial(300, 0.3 * 0.8 + 0.7 * 0.05)
        interval = corrected_rate(refused, 300, labels, resamples=1000, seed=repeat)
        assert interval is not None
        hits += interval.low <= 0.3 <= interval.high
    assert hits / 200 >= 0.92
