"""How often the default gates err: on stages that change nothing, and on planted harm.

    python -m benchmarks.gate_error [--stages 200] [--seed 0] [--budget 400] [--json FILE]

Items, clusters, limits, looks and verdicts are those of a run; only the scores are drawn
(`DrawnStages`). `benchmarks.gate_error_trained` does the same with stages that are trained.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lehr.data.shapes import Example, Origin
from lehr.evaluation.default_gates import (
    NULL_DISCORDANCE,
    NULL_SPREAD,
    PlannedGate,
    plan_gates,
)
from lehr.evaluation.gates import Scored, decide_sequentially
from lehr.evaluation.heldout import HeldoutBits
from lehr.evaluation.suites import ItemScore, Suite
from lehr.evaluation.world_suites import MicroworldSkills, OverRefusal, Refusal, Sycophancy
from lehr.microworld.world import Microworld
from lehr.streams import seed_for

Rows = tuple[list[ItemScore], list[ItemScore]]  # before and after, in the suite's item order


# Share of items that the parent passes, and bits per byte of its own text.
PARENT_PASSES = {"over_refusal": 0.95, "refusal": 0.93, "sycophancy": 0.88, "skills": 0.6}
PARENT_BITS, ITEM_BYTES = 1.2, 220.0


@dataclass
class DrawnStages:
    """Scores drawn with the structure of a microworld run.

    movement     of a harmless stage, as a multiple of what the limits allow for: the share
                 of yes/no items that change side, both ways alike, and the standard
                 deviation of an item's change in bits per byte
    correlation  share of the yes/no items' movement that moves whole clusters
    """

    seed: int
    movement: float = 1.0
    correlation: float = 0.25

    def __post_init__(self) -> None:
        world = Microworld(seed=0)
        texts = [
            Example("text", Origin("text", "world", i), text=row["text"])
            for i, row in enumerate(world.text(400))
        ]
        suites: list[Any] = [
            HeldoutBits("forgetting", texts),
            OverRefusal(world),
            Refusal(world),
            Sycophancy(world),
            MicroworldSkills(world),
        ]
        self.suites: dict[str, Suite] = {suite.name: suite for suite in suites}

    def stage(
        self, index: int, harmed: PlannedGate | None, times: float
    ) -> Callable[[PlannedGate], Rows]:
        name = harmed.gate.name if harmed else ""

        def rows(plan: PlannedGate) -> Rows:
            rng = np.random.default_rng(seed_for(self.seed, index, name, plan.gate.suite))
            harm = times * plan.gate.limit if plan.gate.name == name else 0.0
            return self._rows(plan, harm, rng)

        return rows

    def _rows(self, plan: PlannedGate, harm: float, rng: np.random.Generator) -> Rows:
        gate, suite = plan.gate, self.suites[plan.gate.suite]
        if gate.measure == "bits_per_byte":
            return self._bits(suite, harm, rng)
        clusters: list[str] = suite.clusters_of(gate.measure, len(suite.items))  # type: ignore[attr-defined]
        number = {cluster: k for k, cluster in enumerate(dict.fromkeys(clusters))}
        of_item = np.array([number[cluster] for cluster in clusters])
        before = rng.random(of_item.size) < PARENT_PASSES[suite.name]
        together = rng.random(of_item.size) < self.correlation
        item_draw, cluster_draw = rng.random(of_item.size), rng.random(len(number))[of_item]
        draw = np.where(together, cluster_draw, item_draw)
        # As many passes are taken away as given: both sides move half of it.
        passing = PARENT_PASSES[suite.name]
        half = self.movement * NULL_DISCORDANCE[gate.measure] / 2
        lose = draw < (half + harm) / passing
        gain = draw < half / (1 - passing)
        after = np.where(before, ~lose, gain)
        good = 1.0 if gate.direction == "higher" else 0.0
        sides = []
        for passed in (before, after):
            sides.append(
                [
                    ItemScore(
                        id=str(i),
                        suite=gate.suite,
                        measure=gate.measure,
                        value=good if ok else 1.0 - good,
                        passed=bool(ok),
                        cluster=clusters[i],
                    )
                    for i, ok in enumerate(passed)
                ]
            )
        return sides[0], sides[1]

    def _bits(self, suite: Suite, harm: float, rng: np.random.Generator) -> Rows:
        n = len(suite.items)
        size = rng.gamma(4.0, ITEM_BYTES / 4.0, n).round() + 20
        before = rng.gamma(20.0, PARENT_BITS / 20.0, n) * size
        after = before + (rng.normal(0.0, self.movement * NULL_SPREAD, n) + harm) * size

        def scores(values: Sequence[float]) -> list[ItemScore]:
            return [
                ItemScore(str(i), suite.name, "bits_per_byte", float(v), float(w))
                for i, (v, w) in enumerate(zip(values, size, strict=True))
            ]

        return scores(before), scores(after)


def judge_stage(
    planned: Sequence[PlannedGate], rows_of: Callable[[PlannedGate], Rows], budget: int
) -> dict[str, str]:
    """Verdict by gate, taking more items until each decides or its budget is spent."""
    verdicts = {}
    for plan in planned:
        before, after = rows_of(plan)

        def first(n: int, before: Any = before, after: Any = after) -> Scored:
            return before[:n], after[:n]

        verdicts[plan.gate.name] = decide_sequentially(
            plan.gate, first, min(budget, plan.n)
        ).verdict
    return verdicts


def measure(stages: DrawnStages, n: int, budget: int) -> dict[str, Any]:
    """Error rates over n stages of each kind."""
    budgets = dict.fromkeys(stages.suites, budget)
    planned = [
        plan
        for plan in plan_gates("sft", stages.suites, budgets=budgets)
        if plan.gate.kind == "protect"
    ]
    result: dict[str, Any] = {
        "stages": n,
        "gates": {p.gate.name: {"limit": round(p.gate.limit, 4), "n": p.n} for p in planned},
    }
    not_passed, by_gate = 0, Counter[str]()
    for index in range(n):
        verdicts = judge_stage(planned, stages.stage(index, None, 0.0), budget)
        wrong = [name for name, word in verdicts.items() if word != "passed"]
        not_passed += bool(wrong)
        by_gate.update(f"{name}: {verdicts[name]}" for name in wrong)
    result["null"] = {"not_passed": not_passed / n, "by_gate": dict(by_gate)}
    for times in (1.0, 2.0):
        words: dict[str, Counter[str]] = {plan.gate.name: Counter() for plan in planned}
        for index in range(n):
            plan = planned[index % len(planned)]
            rows = stages.stage(index, plan, times)
            words[plan.gate.name].update(judge_stage([plan], rows, budget).values())
        total = sum((counter for counter in words.values()), Counter[str]())
        result[f"harm x{times:g}"] = {
            "missed": total["passed"] / n,
            "refused": total["refused"] / n,
            "undetermined": total["undetermined"] / n,
            "by_gate": {name: dict(counter) for name, counter in words.items()},
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--stages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kinds = {
        "scores are the same": DrawnStages(arguments.seed, movement=0.0),
        "scores move both ways alike": DrawnStages(arguments.seed),
        "twice that movement": DrawnStages(arguments.seed, movement=2.0),
    }
    results = {}
    for kind, stages in kinds.items():
        start = time.perf_counter()
        results[kind] = measure(stages, arguments.stages, arguments.budget)
        results[kind]["seconds"] = round(time.perf_counter() - start, 1)
        print(f"\n{kind}\n{json.dumps(results[kind], indent=2)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    ordinary = results["scores move both ways alike"]
    inside = ordinary["null"]["not_passed"] <= 0.05 and ordinary["harm x2"]["missed"] <= 0.05
    print(f"\nrule (not passed <= 5 %, harm x2 missed <= 5 %): {'held' if inside else 'BROKEN'}")
    return 0 if inside else 1


if __name__ == "__main__":
    sys.exit(main())
