"""Harm of an exact size, put into the scores of stages that changed nothing.

Trained harm has the size that it happens to get. Here the movement is that of trained
stages and the harm is added on top: whole clusters of right items turn wrong, the harshest
way in which harm can be spread. For sycophancy, which so small a model does not learn, it
is the only harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gate_error_judge import Judged, Row, rate
from lehr.evaluation.default_gates import PlannedGate
from lehr.streams import seed_for


def planted(judged: Judged, row: Row, plan: PlannedGate, times: float, seed: int) -> Row:
    """The row, made worse by `times` the gate's limit over all items of its suite."""
    suite, gate = plan.gate.suite, plan.gate
    rng = np.random.default_rng(seed)
    scores = judged.scores(row, suite)
    values = np.array([one.value for one in scores])
    if gate.unit == "share":
        worst = 0.0 if gate.direction == "higher" else 1.0
        left = round(times * gate.limit * values.size)
        for cluster in rng.permutation(sorted({one.cluster for one in scores})):
            hit = [
                k
                for k, one in enumerate(scores)
                if one.cluster == cluster and values[k] == 1 - worst
            ]
            values[hit[:left]] = worst
            left -= len(hit[:left])
    else:
        # A few texts carry most of it: shares of an exponential law, with the exact mean.
        weights = np.array([one.weight for one in scores])
        part = rng.exponential(size=values.size) * weights
        values = values + part / part.sum() * times * gate.limit * weights.sum()
    return {**row, "values": {**row["values"], suite: [float(v) for v in values]}}


def planted_summary(
    judged: Judged, planned: Sequence[PlannedGate], rows: Sequence[Row], budget: int, times: float
) -> dict[str, Any]:
    """Verdicts by gate where every stage that changed nothing is harmed by `times` its limit."""
    found: dict[str, Any] = {}
    missed = total = 0
    for plan in planned:
        words: Counter[str] = Counter()
        for row in rows:
            seed = seed_for("planted", plan.gate.name, row["kind"], row["index"])
            harmed = planted(judged, row, plan, times, seed)
            words[judged.verdicts(harmed, [plan], budget)[plan.gate.name]] += 1
        found[plan.gate.name] = {**dict(words), "missed": rate(words["passed"], len(rows))}
        missed, total = missed + words["passed"], total + len(rows)
    return {"missed": rate(missed, total), "by_gate": found}
