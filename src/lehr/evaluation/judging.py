"""All gates of a stage, judged with as few items as decide them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lehr.evaluation.default_gates import PlannedGate
from lehr.evaluation.divergence import at_parent
from lehr.evaluation.gates import Against, Scored, Verdict, decide_sequentially
from lehr.evaluation.scoring import Scores, comparable
from lehr.evaluation.suites import Suite

ScoreItems = Callable[[Suite, Sequence[str]], Scores]


def judge(
    planned: Sequence[PlannedGate],
    suites: Mapping[str, Suite],
    after: ScoreItems,
    before: Mapping[Against, ScoreItems],
    *,
    budget: int = 400,
    seed: int = 0,
) -> list[Verdict]:
    """A verdict for each planned gate.

    after, before  score some items of a suite under the tuned state, and under the parent
                   or base; both should keep what they scored (`ScoreStore` does)
    budget         items of a suite that a gate may use
    Raises LehrError where scores of unlike versions would be compared.
    """
    return [
        _judge_one(plan, suites[plan.gate.suite], after, before[plan.gate.against], budget, seed)
        for plan in planned
    ]


def _judge_one(
    plan: PlannedGate,
    suite: Suite,
    after: ScoreItems,
    before: ScoreItems,
    budget: int,
    seed: int,
) -> Verdict:
    gate = plan.gate

    def score_more(n: int) -> Scored:
        items = list(suite.items)[:n]
        tuned = after(suite, items)
        if gate.measure == "nats_per_token":
            rows = tuned.of(gate.measure)
            return at_parent(rows), rows
        origin = before(suite, items)
        comparable(origin, tuned)
        return origin.of(gate.measure), tuned.of(gate.measure)

    verdict = decide_sequentially(gate, score_more, min(budget, len(suite.items)), seed=seed)
    return replace(verdict, note=verdict.note or plan.note)


def overall(verdicts: Sequence[Verdict]) -> str:
    """passed only where every gate passed; one refusal refuses; else undetermined."""
    words = {verdict.verdict for verdict in verdicts}
    if "refused" in words:
        return "refused"
    return "undetermined" if "undetermined" in words else "passed"
