"""The harness that measures the gates' own error, on stages whose truth is written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gate_error_judge import Judged, append, rate, read_store, summary
from benchmarks.gate_error_planted import planted, planted_summary
from benchmarks.gate_error_trained import PLANS, held, jobs
from benchmarks.gate_error_world import NOTHING, scored_items, suites_of

from lehr.microworld.world import Microworld

WORLD = Microworld(seed=0)
SUITES = suites_of(WORLD, texts=40)
GOOD = {"over_refusal": 0.0, "refusal": 1.0, "sycophancy": 0.0, "skills": 1.0, "facts": 1.0}


def row(kind: str = "parent", bits: float = 1.0, **wrong: int) -> dict[str, Any]:
    """A stage that fails the first `wrong` items of a suite, at `bits` per byte of text."""
    values, weights = {}, {}
    for name, suite in SUITES.items():
        n = len(scored_items(suite, WORLD))
        if name == "forgetting":
            weights[name] = [100.0 + (k % 7) for k in range(n)]
            values[name] = [bits * weight for weight in weights[name]]
            continue
        bad = wrong.get(name, 0)
        values[name] = [1 - GOOD[name]] * bad + [GOOD[name]] * (n - bad)
        weights[name] = [1.0] * n
    found: dict[str, Any] = {"kind": kind, "values": values, "weights": weights}
    if kind != "parent":
        found |= {"index": 0, "dial": 0.5, "learning_rate": 1e-4}
    return found


def test_a_stage_that_is_its_parent_passes_every_gate() -> None:
    judged = Judged(SUITES, WORLD, [row(), row(NOTHING)])
    planned = judged.planned(400)
    assert {plan.gate.name for plan in planned} == {
        "forgetting",
        "over_refusal",
        "refusal",
        "sycophancy",
        "regressive_flips",
        "facts",
    }
    assert set(judged.verdicts(row(NOTHING), planned, 400).values()) == {"passed"}
    for plan in planned:
        assert judged.resolved(row(NOTHING), plan, 400) <= plan.gate.limit
        assert judged.worse_by(row(NOTHING), plan.gate.suite) == 0.0


@pytest.mark.parametrize(
    ("suite", "gate", "worse"),
    [
        ("over_refusal", "over_refusal", 96 / 384),
        ("refusal", "refusal", 96 / 192),
        ("sycophancy", "sycophancy", 96 / 288),
        ("skills", "regressive_flips", 96 / 338),
        ("facts", "facts", 96 / 288),
    ],
)
def test_gross_harm_is_seen_at_its_true_size(suite: str, gate: str, worse: float) -> None:
    harmed = row("over_refusal", **{suite: 96})
    judged = Judged(SUITES, WORLD, [row(), harmed])
    assert judged.worse_by(harmed, suite) == pytest.approx(worse)
    assert judged.movement(harmed, suite)["changed"] == pytest.approx(worse)
    words = judged.verdicts(harmed, judged.planned(400), 400)
    assert words[gate] == "refused"
    assert [name for name, word in words.items() if word != "passed"] == [gate]


def test_lost_text_is_seen_in_bits_per_byte() -> None:
    harmed = row("wrong_text", bits=1.1)
    judged = Judged(SUITES, WORLD, [row(), harmed])
    assert judged.worse_by(harmed, "forgetting") == pytest.approx(0.1)
    assert judged.movement(harmed, "forgetting")["changed"] == pytest.approx(0.0, abs=1e-9)
    assert judged.verdicts(harmed, judged.planned(400), 400)["forgetting"] == "refused"


def test_only_harm_of_twice_the_margin_can_be_missed() -> None:
    small, large = row("over_refusal", over_refusal=10), row("over_refusal", over_refusal=120)
    large["index"] = 1
    result = summary(Judged(SUITES, WORLD, [row(), small, large]), PLANS, 400)
    harm = result["harm"]["over_refusal"]
    assert harm["stages"] == 2
    assert (harm["missed"]["count"], harm["missed"]["n"]) == (0, 1)
    assert sum(sum(words.values()) for words in harm["by_margins"].values()) == 2


def test_rates_of_stages_that_change_nothing() -> None:
    rows = [row(), row(NOTHING), row(NOTHING, over_refusal=200)]
    rows[2]["index"] = 1
    result = summary(Judged(SUITES, WORLD, rows), PLANS, 400)
    nothing = result[NOTHING]["all"]
    assert nothing["not_passed"]["rate"] == 0.5
    assert nothing["refused"]["count"] == 1
    assert nothing["by_gate"]["over_refusal"]["not_passed"]["count"] == 1
    assert nothing["by_gate"]["refusal"]["not_passed"]["count"] == 0
    result["planted"] = {"missed": rate(0, 2)}
    assert not held(result)


def test_a_rate_has_wilsons_interval() -> None:
    found = rate(0, 200)
    assert (found["rate"], found["low"], found["high"]) == (0.0, 0.0, 0.0188)
    assert rate(0, 0)["rate"] is None


def test_a_measurement_cut_short_holds_all_kinds_alike() -> None:
    order = list(jobs(200))
    assert len(order) == len(set(order)) == 200 + 200 + 10
    half = [kind for kind, _ in order[: len(order) // 2]]
    for kind in PLANS:
        whole = [one for one, _ in order].count(kind)
        assert abs(half.count(kind) - whole / 2) <= 1


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_planted_harm_has_the_size_that_was_asked_for(times: float) -> None:
    nothing = row(NOTHING)
    judged = Judged(SUITES, WORLD, [row(), nothing])
    for plan in judged.planned(400):
        suite = plan.gate.suite
        harmed = planted(judged, nothing, plan, times, seed=1)
        size = judged.worse_by(harmed, suite)
        assert size == pytest.approx(times * plan.gate.limit, abs=0.5 / 192)
        others = {name: values for name, values in harmed["values"].items() if name != suite}
        assert others == {name: nothing["values"][name] for name in others}
    assert judged.worse_by(nothing, suite) == 0.0


def test_planted_harm_hits_whole_clusters_of_right_items() -> None:
    nothing = row(NOTHING)
    judged = Judged(SUITES, WORLD, [row(), nothing])
    plan = next(one for one in judged.planned(400) if one.gate.name == "over_refusal")
    scores = judged.scores(planted(judged, nothing, plan, 2.0, seed=3), "over_refusal")
    clusters: dict[str, set[float]] = {}
    for one in scores:
        clusters.setdefault(one.cluster, set()).add(one.value)
    assert sum(len(values) > 1 for values in clusters.values()) <= 1
    assert (
        sum({1.0} == values for values in clusters.values())
        == round(384 * 2 * plan.gate.limit) // 8
    )


def test_planted_harm_is_not_missed_where_nothing_else_moves() -> None:
    judged = Judged(SUITES, WORLD, [row(), row(NOTHING)])
    found = planted_summary(judged, judged.planned(400), judged.stages, 400, 2.0)
    assert found["missed"]["count"] == 0
    assert found["missed"]["n"] == 6


def test_a_cut_line_is_dropped_and_written_again(tmp_path: Path) -> None:
    store = tmp_path / "stages.jsonl"
    append(store, {"settings": 1})
    append(store, {"index": 0})
    whole = store.read_bytes()
    store.write_bytes(whole + b'{"index": 1, "val')
    assert read_store(store) == [{"settings": 1}, {"index": 0}]
    append(store, {"index": 1})
    assert [json.loads(line) for line in store.read_text().splitlines()] == [
        {"settings": 1},
        {"index": 0},
        {"index": 1},
    ]
    with pytest.raises(SystemExit, match="other settings"):
        read_store(store, {"settings": 2})
