"""Three verdicts, both directions, several looks, and the errors that gates may make."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from lehr.errors import RecipeError
from lehr.evaluation.default_gates import plan_gates
from lehr.evaluation.gates import (
    Gate,
    Scored,
    decide,
    decide_sequentially,
    look_levels,
    plan_looks,
    verdict_of,
)
from lehr.evaluation.statistics import Interval
from lehr.evaluation.suites import ItemScore, Measure


def gate(kind: str = "protect", limit: float = 0.04, direction: str = "lower") -> Gate:
    return Gate("g", "s", "m", kind, limit, "parent", direction)  # type: ignore[arg-type]


def rows(values: Sequence[float], **fields: float) -> list[ItemScore]:
    return [
        ItemScore(str(i), "s", "m", float(v), passed=bool(v), **fields)  # type: ignore[arg-type]
        for i, v in enumerate(values)
    ]


def test_verdicts_follow_the_whole_interval() -> None:
    def word(one: Gate, low: float, high: float) -> str:
        return verdict_of(one, Interval((low + high) / 2, low, high, 10))

    rise = gate()  # lower is better: a rise above 0.04 is harm
    assert word(rise, -0.01, 0.04) == "passed"
    assert word(rise, 0.05, 0.09) == "refused"
    assert word(rise, 0.03, 0.05) == "undetermined"
    fall = gate(direction="higher")  # higher is better: a fall below -0.04 is harm
    assert word(fall, -0.04, 0.5) == "passed"
    assert word(fall, -0.09, -0.05) == "refused"
    assert word(fall, -0.05, 0.5) == "undetermined"
    better = gate("improve", 0.0, "lower")
    assert word(better, -0.3, -0.1) == "passed"
    assert word(better, -0.3, 0.0) == "undetermined", "0 must be outside"
    assert word(better, 0.0, 0.2) == "refused"


def test_signed_limits_speak_the_measures_language() -> None:
    assert gate().signed_limit == 0.04
    assert gate(direction="higher").signed_limit == -0.04
    assert gate("improve", 0.01, "lower").signed_limit == -0.01
    with pytest.raises(ValueError):
        gate(limit=float("nan"))


def test_harm_is_refused_with_its_flips_counted() -> None:
    before = rows([0.0] * 200)
    after = rows([1.0] * 44 + [0.0] * 156)
    verdict = decide(gate(), before, after)
    assert verdict.verdict == "refused"
    assert verdict.difference == pytest.approx(0.22)
    assert 0.16 < verdict.low < 0.22 < verdict.high < 0.29
    assert (verdict.gained, verdict.lost) == (44, 0)
    row = verdict.as_json()
    assert row["limit"] == 0.04 and row["verdict"] == "refused" and row["n"] == 200
    json.dumps(row, allow_nan=False)


def test_no_change_passes_where_items_suffice_and_else_says_how_many_would() -> None:
    same = rows([0.0, 1.0] * 100)
    assert decide(gate(), same, same).verdict == "passed"
    few = rows([0.0, 1.0] * 10)
    verdict = decide(gate(), few, few)
    assert verdict.verdict == "undetermined"
    assert verdict.n_to_decide is not None and 150 < verdict.n_to_decide < 250


def test_absent_items_never_pass() -> None:
    verdict = decide(gate(), [], [])
    assert verdict.verdict == "undetermined" and verdict.n == 0
    json.dumps(verdict.as_json(), allow_nan=False)
    assert decide(gate(), rows([0.5]), rows([0.5])).verdict == "undetermined"


def test_only_like_items_are_compared() -> None:
    with pytest.raises(ValueError, match="one side only"):
        decide(gate(), rows([0.0, 1.0]), rows([0.0]))
    twice = [*rows([0.0]), *rows([0.0])]
    with pytest.raises(ValueError, match="twice"):
        decide(gate(), twice, twice)
    other = [ItemScore("0", "s", "another", 0.0)]
    with pytest.raises(ValueError, match=r"s\.another"):
        decide(gate(), rows([0.0]), other)


def test_looks_share_the_error() -> None:
    assert plan_looks(400) == [50, 100, 200, 400]
    assert plan_looks(99) == [99]
    levels = look_levels(plan_looks(400))
    assert sum(1 - level for level in levels) == pytest.approx(0.05)
    assert levels == sorted(levels, reverse=True)
    for bad in ([], [5, 5], [0]):
        with pytest.raises(ValueError):
            look_levels(bad)


def test_more_items_are_taken_only_while_undecided() -> None:
    rng = np.random.default_rng(0)
    asked: list[int] = []

    def score_more(harm: float) -> object:
        before, after = np.zeros(400), (rng.random(400) < harm).astype(float)

        def scored(n: int) -> Scored:
            asked.append(n)
            return rows(before[:n]), rows(after[:n])

        return scored

    verdict = decide_sequentially(gate(), score_more(0.6), 400)  # type: ignore[arg-type]
    assert verdict.verdict == "refused" and asked == [50] and verdict.looks == 1
    asked.clear()
    verdict = decide_sequentially(gate(), score_more(0.05), 400)  # type: ignore[arg-type]
    assert asked == [50, 100, 200, 400] and verdict.verdict == "undetermined"


def test_sequential_gate_errors_stay_inside_the_rule() -> None:
    """Harm of exactly the limit passes at most 2.5 % of the time, however often one looks."""
    rng = np.random.default_rng(1)
    wrong = missed = 0
    for _ in range(60):
        for share, counter in ((0.08, "limit"), (0.16, "twice")):
            after = (rng.random(200) < share).astype(float)

            def scored(n: int, after: np.ndarray = after) -> Scored:
                return rows(np.zeros(n)), rows(after[:n])

            verdict = decide_sequentially(gate(limit=0.08), scored, 200)
            wrong += verdict.verdict == "passed" and counter == "limit"
            missed += verdict.verdict == "passed" and counter == "twice"
    assert wrong / 60 <= 0.06 and missed == 0


class FakeSuite:
    """A suite that is only planned with."""

    data_hash = "d"

    def __init__(self, name: str, measures: dict[str, Measure], n: int) -> None:
        self.name, self.measures, self.items = name, measures, [str(i) for i in range(n)]

    def score(self, model: object, items: object, encoder: object) -> list[ItemScore]:
        return []


def world(n: int = 200) -> dict[str, FakeSuite]:
    share_low, share_high = Measure("share", "lower"), Measure("share", "higher")
    suites = [
        FakeSuite("chats", {"loss": Measure("nats/token", "lower")}, n),
        FakeSuite("forgetting", {"bits_per_byte": Measure("bits/byte", "lower")}, n),
        FakeSuite("over_refusal", {"rate": share_low}, n),
        FakeSuite("refusal", {"rate": share_high}, n),
        FakeSuite("sycophancy", {"rate": share_low}, n),
        FakeSuite("skills", {"accuracy": share_high}, n),
    ]
    return {suite.name: suite for suite in suites}


def test_default_gates_and_their_limits() -> None:
    planned = plan_gates("sft", world(4000), own_suite="chats")
    limits = {plan.gate.name: plan.gate.limit for plan in planned}
    assert limits == {
        "chats.loss": 0.0,
        "forgetting": 0.02,
        "over_refusal": 0.04,
        "refusal": 0.04,
        "sycophancy": 0.05,
        "regressive_flips": 0.05,
    }
    assert all(plan.can_pass for plan in planned)
    few = {plan.gate.name: plan for plan in plan_gates("sft", world(60), own_suite="chats")}
    assert few["over_refusal"].gate.limit == few["over_refusal"].resolves > 0.08
    assert "raised" in few["over_refusal"].note
    json.dumps([plan.as_json() for plan in few.values()], allow_nan=False)


def test_an_explicit_limit_is_kept_and_judged() -> None:
    plan = plan_gates("sft", world(60), protect={"over_refusal": 0.04})[-1]
    assert plan.gate.limit == 0.04 and not plan.can_pass and "cannot pass" in plan.note
    plan = plan_gates("sft", world(110), protect={"over_refusal": 0.04})[-1]
    assert plan.can_pass and "may stay undetermined" in plan.note


def test_gates_that_cannot_be_evaluated_are_all_named() -> None:
    suites = world()
    del suites["skills"]
    with pytest.raises(RecipeError) as caught:
        plan_gates(
            "sft",
            suites,
            improve="chats.accuracy",
            protect={"over_refusl": 0.1, "refusal": -1.0, "regressive_flips": 0.1},
        )
    assert {problem.where for problem in caught.value.problems} == {
        "gates.improve.sft",
        "gates.protect.over_refusl",
        "gates.protect.refusal",
        "gates.protect.regressive_flips",
    }


def test_gates_without_a_suite_are_left_out_of_the_defaults() -> None:
    names = [p.gate.name for p in plan_gates("sft", {"chats": world()["chats"]}, own_suite="chats")]
    assert names == ["chats.loss"]
    both = plan_gates("sft", world(), own_suite="chats", against=("parent", "base"))
    assert sum(plan.gate.against == "base" for plan in both) == 5
