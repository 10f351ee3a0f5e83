"""Error rates of the default gates from stored scores of trained stages: nothing is trained here.

A store is a file of JSON lines: the settings, the parent's scores, then one line a stage.
Limits can so be fitted again without training again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gate_error_world import MEASURES, NOTHING, Plan, scored_items
from lehr.evaluation.default_gates import PlannedGate, plan_gates
from lehr.evaluation.gates import decide
from lehr.evaluation.judging import judge
from lehr.evaluation.scoring import Scores
from lehr.evaluation.statistics import effective_items, wilson
from lehr.evaluation.suites import ItemScore, Stamp, Suite

Row = Mapping[str, Any]
HARMED_BY = 2.0  # margins of true harm that must not be missed
BINS = (0.5, 1.0, 1.5, 2.0, 3.0, math.inf)


def read_store(path: Path, settings: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The whole lines of a store; a last line that a kill has cut is left out.

    Raises SystemExit where the store was made with other settings.
    """
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        rows.append(json.loads(line))
    if rows and settings is not None and rows[0].get("settings") != settings:
        raise SystemExit(f"{path} was measured with other settings; choose another folder")
    return rows


def append(path: Path, row: Row) -> None:
    """Add one line, after cutting what a kill left of an unfinished one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        stream.seek(0)
        whole = stream.read().rfind(b"\n") + 1
        stream.truncate(whole)
        stream.write(json.dumps(row).encode() + b"\n")


class Judged:
    """The parent's and the stages' stored scores, as a run's judge wants them."""

    def __init__(self, suites: Mapping[str, Suite], world: Any, rows: Sequence[Row]) -> None:
        self.suites = dict(suites)
        self.parent = next(row for row in rows if row.get("kind") == "parent")
        self.stages = [row for row in rows if "index" in row]
        self._ids = {name: scored_items(suite, world) for name, suite in suites.items()}
        self._cluster = {
            name: dict(zip(self._ids[name], self._clusters(suite), strict=True))
            for name, suite in suites.items()
        }

    def _clusters(self, suite: Suite) -> list[str]:
        clusters_of = getattr(suite, "clusters_of", None)
        if clusters_of is None:
            return [""] * len(suite.items)
        found: list[str] = clusters_of(MEASURES[suite.name], len(suite.items))
        return found

    def scores(self, row: Row, suite: str) -> list[ItemScore]:
        """A row's scores of a suite as item scores, in the suite's order."""
        measure = self.suites[suite].measures[MEASURES[suite]]
        share = measure.unit == "share"
        good = 1.0 if measure.direction == "higher" else 0.0
        return [
            ItemScore(
                id=name,
                suite=suite,
                measure=MEASURES[suite],
                value=value,
                weight=weight,
                passed=value == good if share else None,
                cluster=self._cluster[suite][name],
            )
            for name, value, weight in zip(
                self._ids[suite],
                row["values"][suite],
                row["weights"][suite],
                strict=True,
            )
        ]

    def planned(self, budget: int, **settings: Any) -> list[PlannedGate]:
        """The default protect gates that a run with these suites has, limits and all."""
        budgets = {name: min(budget, len(one.items)) for name, one in self.suites.items()}
        return plan_gates("sft", self.suites, budgets=budgets, **settings)

    def verdicts(self, row: Row, planned: Sequence[PlannedGate], budget: int) -> dict[str, str]:
        """Verdict by gate, of the gates whose suite this stage was scored on."""
        asked = [plan for plan in planned if plan.gate.suite in row["values"]]
        found = judge(
            asked,
            self.suites,
            self._scorer(row),
            {"parent": self._scorer(self.parent)},
            budget=budget,
        )
        return {verdict.gate.name: verdict.verdict for verdict in found}

    def _scorer(self, row: Row) -> Callable[[Suite, Sequence[str]], Scores]:
        known: dict[str, list[ItemScore]] = {}

        def score(suite: Suite, items: Sequence[str]) -> Scores:
            if suite.name not in known:
                known[suite.name] = self.scores(row, suite.name)
            wanted = set(items)
            chosen = tuple(one for one in known[suite.name] if one.id in wanted)
            return Scores("", Stamp(suite.name, "", (), ""), chosen)

        return score

    def worse_by(self, row: Row, suite: str) -> float:
        """How much worse than the parent on all items; the measure's unit, below 0 for better."""
        direction = self.suites[suite].measures[MEASURES[suite]].direction
        rise = self.level(row, suite) - self.level(self.parent, suite)
        return -rise if direction == "higher" else rise

    def level(self, row: Row, suite: str) -> float:
        """The measure's value over all items of a suite."""
        return float(sum(row["values"][suite]) / sum(row["weights"][suite]))

    def resolved(self, row: Row, plan: PlannedGate, budget: int) -> float:
        """The smallest limit that this stage passes with all items of the budget."""
        items = set(list(self.suites[plan.gate.suite].items)[:budget])
        before, after = (
            [one for one in self.scores(side, plan.gate.suite) if one.id in items]
            for side in (self.parent, row)
        )
        verdict = decide(plan.gate, before, after, count_needed=False)
        return max(0.0, -verdict.low if plan.gate.direction == "higher" else verdict.high)

    def movement(self, row: Row, suite: str) -> dict[str, float]:
        """What a stage moved in a suite.

        changed   share of items that changed side, or standard deviation of an item's change
                  in bits per byte; net: how much worse on all items
        effective independent items that the change is worth, as a share of all
        """
        before, after = self.scores(self.parent, suite), self.scores(row, suite)
        change = np.array([b.value - a.value for a, b in zip(before, after, strict=True)])
        net = self.worse_by(row, suite)
        if self.suites[suite].measures[MEASURES[suite]].unit == "share":
            clusters = [one.cluster for one in before]
            effective = effective_items(change - change.mean(), clusters) / change.size
            return {"changed": float((change != 0).mean()), "net": net, "effective": effective}
        weight = np.array([one.weight for one in before])
        rest = (change - change.sum() / weight.sum() * weight) / weight.mean()
        return {"changed": float(rest.std(ddof=1)), "net": net, "effective": 1.0}


def rate(count: int, n: int) -> dict[str, Any]:
    """A share with Wilson's 95 % interval; null where nothing was counted."""
    if n == 0:
        return {"count": 0, "n": 0, "rate": None, "low": None, "high": None}
    found = wilson(count, n)
    return {
        "count": count,
        "n": n,
        "rate": round(found.value, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
    }


def summary(
    judged: Judged, plans: Mapping[str, Plan], budget: int, **settings: Any
) -> dict[str, Any]:
    """Error rates: stages that change nothing by gate and jointly, planted harm by kind."""
    planned = judged.planned(budget, **settings)
    limits = {plan.gate.name: plan for plan in planned}
    by_kind: dict[str, list[Row]] = {}
    for row in judged.stages:
        by_kind.setdefault(row["kind"], []).append(row)
    result: dict[str, Any] = {
        "budget": budget,
        "gates": {
            name: {"limit": round(plan.gate.limit, 4), "items": plan.n}
            for name, plan in limits.items()
        },
        "parent": {name: _rounded(judged.level(judged.parent, name)) for name in judged.suites},
    }
    result[NOTHING] = {
        str(learning_rate): _nothing(judged, planned, rows, budget)
        for learning_rate, rows in _groups(by_kind.pop(NOTHING, []))
    }
    result["harm"] = {
        kind: _harm(judged, planned, plans[kind], rows, budget) for kind, rows in by_kind.items()
    }
    return result


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    rates = sorted({row["learning_rate"] for row in rows})
    groups = [(f"{one:g}", [r for r in rows if r["learning_rate"] == one]) for one in rates]
    return [*groups, ("all", list(rows))]


def _nothing(
    judged: Judged, planned: Sequence[PlannedGate], rows: Sequence[Row], budget: int
) -> dict[str, Any]:
    words: dict[str, Counter[str]] = {plan.gate.name: Counter() for plan in planned}
    failed = refused = 0
    for row in rows:
        verdicts = judged.verdicts(row, planned, budget)
        failed += any(word != "passed" for word in verdicts.values())
        refused += "refused" in verdicts.values()
        for name, word in verdicts.items():
            words[name][word] += 1
    n = len(rows)
    gates = {}
    for plan in planned:
        name = plan.gate.name
        moved = [judged.movement(row, plan.gate.suite) for row in rows]
        needed = sorted(judged.resolved(row, plan, budget) for row in rows)
        changed, net = (np.array([one[key] for one in moved]) for key in ("changed", "net"))
        gates[name] = {
            **dict(words[name]),
            "not_passed": rate(n - words[name]["passed"], n),
            "changed_mean": _rounded(changed.mean()) if n else None,
            "changed_95": _rounded(np.quantile(changed, 0.95)) if n else None,
            "net_mean": _rounded(net.mean()) if n else None,
            "net_sd": _rounded(net.std(ddof=1)) if n > 1 else None,
            "net_worst": _rounded(net.max()) if n else None,
            "effective": _rounded(np.mean([one["effective"] for one in moved])) if n else None,
            "limit_needed_95": _rounded(np.quantile(needed, 0.95)) if n else None,
            "limit_needed_99": _rounded(np.quantile(needed, 0.99)) if n else None,
        }
    return {"not_passed": rate(failed, n), "refused": rate(refused, n), "by_gate": gates}


def _harm(
    judged: Judged, planned: Sequence[PlannedGate], plan: Plan, rows: Sequence[Row], budget: int
) -> dict[str, Any]:
    """Misses of the gate that must see this harm, by its true size in margins.

    A kind without a gate of its own is counted by whether any gate stopped it.
    """
    own = next((one for one in planned if one.gate.name == plan.gate), None)
    bins: dict[str, Counter[str]] = {}
    harmed = missed = 0
    caught: Counter[str] = Counter()
    sizes = []
    for row in rows:
        verdicts = judged.verdicts(row, planned, budget)
        caught.update(name for name, word in verdicts.items() if word != "passed")
        caught["any"] += any(word != "passed" for word in verdicts.values())
        if own is None:
            continue
        margins = judged.worse_by(row, own.gate.suite) / own.gate.limit
        sizes.append(margins)
        word = verdicts[own.gate.name]
        bins.setdefault(_bin(margins), Counter())[word] += 1
        if margins >= HARMED_BY:
            harmed += 1
            missed += word == "passed"
    result: dict[str, Any] = {"gate": plan.gate, "stages": len(rows), "stopped_by": dict(caught)}
    if own is not None:
        result["missed"] = rate(missed, harmed)
        result["median_margins"] = _rounded(np.median(sizes)) if sizes else None
        result["by_margins"] = {name: dict(bins[name]) for name in sorted(bins)}
    moved = {
        suite: _rounded(np.mean([judged.worse_by(row, suite) for row in rows]))
        for suite in plan.suites
    }
    result["worse_by"] = moved
    return result


def _bin(margins: float) -> str:
    below = 0.0
    for edge in BINS:
        if margins < edge:
            return f"{below:g} to {edge:g}" if math.isfinite(edge) else f"{below:g} or more"
        below = edge
    return "not a number"


def _rounded(value: Any) -> float:
    return round(float(value), 4)
