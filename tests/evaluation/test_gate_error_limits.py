"""Default limits let a stage through that moves what such stages were measured to move."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.gate_error import DrawnStages, measure

from lehr.evaluation.default_gates import NULL_DISCORDANCE, PlannedGate, plan_gates
from lehr.evaluation.gates import Scored, decide_sequentially
from lehr.evaluation.suites import ItemScore
from lehr.evaluation.world_suites import MicroworldSkills, OverRefusal
from lehr.microworld.world import Microworld

WORLD = Microworld(seed=0)


def planned() -> dict[str, PlannedGate]:
    suites = {"skills": MicroworldSkills(WORLD), "over_refusal": OverRefusal(WORLD)}
    return {plan.gate.name: plan for plan in plan_gates("sft", suites)}


def test_answers_may_move_more_than_refusals() -> None:
    gates = planned()
    flips, refusals = gates["regressive_flips"], gates["over_refusal"]
    assert NULL_DISCORDANCE["accuracy"] > NULL_DISCORDANCE["rate"]
    assert flips.gate.limit == flips.resolves == pytest.approx(0.068, abs=0.004)
    assert refusals.gate.limit == refusals.resolves == pytest.approx(0.066, abs=0.004)


@pytest.mark.parametrize(("moved", "at_most"), [(0.04, 0.0), (0.08, 0.05)])
def test_flips_both_ways_pass(moved: float, at_most: float) -> None:
    plan = planned()["regressive_flips"]
    rng = np.random.default_rng(0)
    failed, stages = 0, 80
    for _ in range(stages):
        before = rng.random(plan.n) < 0.6
        after = before.copy()
        flipped = rng.random(plan.n)
        after[before & (flipped < moved / 2 / 0.6)] = False
        after[~before & (flipped < moved / 2 / 0.4)] = True
        sides = [
            [ItemScore(str(k), "skills", "accuracy", float(ok)) for k, ok in enumerate(side)]
            for side in (before, after)
        ]

        def scored(n: int, sides: list[list[ItemScore]] = sides) -> Scored:
            return sides[0][:n], sides[1][:n]

        failed += decide_sequentially(plan.gate, scored, plan.n).verdict != "passed"
    assert failed / stages <= at_most


def test_drawn_stages_without_a_change_pass_and_twice_the_limit_does_not() -> None:
    found = measure(DrawnStages(seed=0, movement=0.0), n=5, budget=400)
    assert found["null"] == {"not_passed": 0.0, "by_gate": {}}
    assert found["harm x2"]["missed"] == 0.0
