"""Judging a stage: the same items before and after, gates, the answers that changed sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lehr.evaluation.default_gates import PlannedGate
from lehr.evaluation.divergence import KlFromParent
from lehr.evaluation.flips import flips
from lehr.evaluation.gates import Against, Gate, Verdict
from lehr.evaluation.judging import judge
from lehr.evaluation.scoring import Scores, ScoreStore
from lehr.evaluation.suites import ItemScore, Suite, summary
from lehr.pipeline.events import Events
from lehr.pipeline.states import State
from lehr.pipeline.workbench import Workbench

KL_PROMPTS = 40


@dataclass(frozen=True)
class Judgement:
    """What the gates of a stage found."""

    verdicts: tuple[Verdict, ...]
    flips: tuple[dict[str, Any], ...]

    @property
    def refused(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.verdict == "refused"]

    @property
    def undetermined(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.verdict == "undetermined"]


class Judge:
    """Scores states on the run's suites, each item of each state once."""

    def __init__(
        self,
        bench: Workbench,
        suites: Mapping[str, Suite],
        wanted: Sequence[str],
        store: ScoreStore,
        budget: int,
        seed: int,
        events: Events,
    ) -> None:
        self.bench, self.suites, self.store = bench, suites, store
        self.budget, self.seed, self.events = budget, seed, events
        self.wanted = [name for name in suites if name in set(wanted)]

    def score(self, state: State, suite: str, items: int | None = None) -> Scores:
        """Scores of `state` on the first `items` of a suite; the model becomes it if need be."""
        found = self.suites[suite]
        chosen = list(found.items)[: self.budget if items is None else items]
        known = self.store.known(found, self.bench.encoder, state.key, chosen)
        prepare = getattr(found, "prepare", None)
        if not known and prepare is not None:
            prepare()  # before the model becomes `state`: it may have to be another one for it
        model = self.bench.model if known else self.bench.become(state)
        return self.store.score(model, found, self.bench.encoder, state.key, chosen)

    def score_all(self, state: State, text: str = "") -> dict[str, Scores]:
        """Scores of `state` on every suite that this run looks at."""
        if text:
            self.events.emit("scoring", text, durable=False)
        return {name: self.score(state, name) for name in self.wanted}

    def judge(
        self, planned: Sequence[PlannedGate], tuned: State, against: Mapping[Against, State]
    ) -> Judgement:
        """Decide every gate; items are added until it decides or the budget is spent."""
        before = {side: partial(self._items, state) for side, state in against.items()}
        verdicts = judge(
            planned,
            self.suites,
            partial(self._items, tuned),
            before,
            budget=self.budget,
            seed=self.seed,
        )
        gates = [one.gate for one in planned]
        return Judgement(tuple(verdicts), tuple(self._flips(gates, tuned, against)))

    def _items(self, state: State, suite: Suite, items: Sequence[str]) -> Scores:
        return self.score(state, suite.name, len(items))

    def _flips(
        self, gates: Sequence[Gate], tuned: State, against: Mapping[Against, State]
    ) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        seen: set[tuple[str, str, str]] = set()
        for gate in gates:
            if (gate.suite, gate.measure, gate.against) in seen:
                continue
            seen.add((gate.suite, gate.measure, gate.against))
            before = self.score(against[gate.against], gate.suite).of(gate.measure)
            after = self.score(tuned, gate.suite).of(gate.measure)
            rows += flips(*common(before, after), gate.against)
        return rows

    def kl(
        self, parent: Mapping[str, Tensor] | None, prompts: Sequence[Any]
    ) -> dict[str, Any] | None:
        """Exact KL(model as it is || parent) on its own answers to `prompts`, nats a token."""
        if not prompts:
            return None
        suite = KlFromParent(list(prompts)[:KL_PROMPTS], parent, seed=self.seed)
        rows = suite.score(self.bench.model, suite.items, self.bench.encoder)
        rows = [row for row in rows if row.weight > 0]
        if not rows:
            return None
        return interval_json(rows, self.seed)


def common(
    before: Sequence[ItemScore], after: Sequence[ItemScore]
) -> tuple[list[ItemScore], list[ItemScore]]:
    """The items that both sides have a score for (a suite may leave an item undefined)."""
    shared = {row.id for row in before} & {row.id for row in after}
    first = [row for row in before if row.id in shared]
    order = {row.id: place for place, row in enumerate(first)}
    second = sorted((row for row in after if row.id in shared), key=lambda row: order[row.id])
    return first, second


def interval_json(rows: Sequence[ItemScore], seed: int) -> dict[str, Any]:
    """Value and interval of one measure, as evaluation.json stores it."""
    found = summary(rows, seed=seed)
    bounds = {
        name: bound if bound == bound and abs(bound) != float("inf") else None
        for name, bound in (("low", found.low), ("high", found.high))
    }
    return {"value": found.value, **bounds, "n": len(rows)}


def suites_json(
    judge: Judge, states: Mapping[str, State], seed: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """suites of evaluation.json: every measure of every suite, for base, parent and tuned."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in judge.wanted:
        suite = judge.suites[name]
        scores = {which: judge.score(state, name) for which, state in states.items()}
        for measure, described in suite.measures.items():
            entry: dict[str, Any] = {"unit": described.unit, "direction": described.direction}
            for which, scored in scores.items():
                rows = [row for row in scored.of(measure) if row.weight > 0]
                entry[which] = interval_json(rows, seed) if rows else None
            found.setdefault(name, {})[measure] = entry
    return found
