"""`lehr evaluate`: one model, or one against another: scores, paired differences, flips."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lehr.data.encoding import Encoder
from lehr.data.sources import read_source
from lehr.data.templates import Template
from lehr.errors import Problem, RecipeError
from lehr.evaluation.claims import FactClaims
from lehr.evaluation.default_gates import plan_gates
from lehr.evaluation.flips import flips
from lehr.evaluation.forgetting import own_texts
from lehr.evaluation.gates import decide
from lehr.evaluation.heldout import HeldoutBits, HeldoutLoss, PairAccuracy
from lehr.evaluation.judging import overall
from lehr.evaluation.refusals import BenignRequests
from lehr.evaluation.scoring import Scores
from lehr.evaluation.suites import Suite, stamp_of
from lehr.models.loading import load_model
from lehr.models.tokenizer import stop_ids_of
from lehr.pipeline.admission import admit
from lehr.pipeline.auditing import named
from lehr.pipeline.judging import common, interval_json
from lehr.pipeline.reopening import model_of
from lehr.pipeline.stage_run import strict

OWN_SUITES = ("over_refusal", "sycophancy", "forgetting")
NEUTRAL_DATE = "2000-01-01"  # for templates that print one: the same on every day


@dataclass
class Evaluation:
    """Measures by suite; with a base also gates and flips. verdict: measured without a base."""

    suites: dict[str, dict[str, dict[str, Any]]]
    gates: list[dict[str, Any]] = field(default_factory=list)
    flips: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = "measured"

    def as_json(self) -> dict[str, Any]:
        """The object of `lehr evaluate --json`."""
        found: dict[str, Any] = strict(
            {
                "suites": self.suites,
                "flips": self.flips,
                "gates": self.gates,
                "verdict": self.verdict,
            }
        )
        return found

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(suite)}.{html.escape(measure)}</td>"
            f"<td>{entry['value']:.4g} {html.escape(entry['unit'])}</td></tr>"
            for suite, measures in self.suites.items()
            for measure, entry in measures.items()
        )
        return f"<p>{html.escape(self.verdict)}</p><table>{rows}</table>"


def evaluate(
    model: str,
    suites: Sequence[str] | None = None,
    against: str | None = None,
    *,
    data: Sequence[Path | str] = (),
    template: str = "auto",
    items: int = 200,
) -> Evaluation:
    """Score `model` (and `against`) on the same items.

    suites  names; None: all that apply. data: files whose loss is measured too.
    Raises RecipeError for models that cannot be loaded and suites that do not exist.
    """
    names = [model] if against is None else [against, model]
    scores: list[dict[str, Scores]] = []
    chosen: dict[str, Suite] = {}
    for place, name in enumerate(names):
        loaded = load_model(model_of(name), template=template)
        admit(loaded)
        loaded.eval()
        encoder = encoder_of(loaded)
        if place == 0:
            chosen = _suites(loaded, encoder, data, suites)
        scores.append(
            {
                suite.name: Scores(
                    name,
                    stamp_of(suite, encoder),
                    tuple(suite.score(loaded, list(suite.items)[:items], encoder)),
                )
                for suite in chosen.values()
            }
        )
        del loaded
    result = Evaluation(_measures(chosen, scores[-1]))
    if against is not None:
        _require_alike(chosen, scores[0], scores[1], against)
        _compare(result, chosen, scores[0], scores[1])
    return result


def encoder_of(model: Any) -> Encoder:
    """The encoder of a loaded model, with its own template."""
    template = Template.from_tokenizer(model.tokenizer) if model.tokenizer.chat_template else None
    return Encoder(
        model.tokenizer, template, date=NEUTRAL_DATE, stop_ids=stop_ids_of(model.network)
    )


def _suites(
    model: Any, encoder: Encoder, data: Sequence[Path | str], names: Sequence[str] | None
) -> dict[str, Suite]:
    found: dict[str, Suite] = {}
    problems: list[Problem] = []
    for stem, path in named(data).items():
        name = f"data-{stem}" if stem in OWN_SUITES else stem
        try:
            rows = read_source(name, [path])
        except RecipeError as error:
            problems += error.problems
            continue
        kind = rows.examples[0].kind
        if kind == "text":
            found[name] = HeldoutBits(name, rows.examples)
        elif encoder.template is None:
            expected = "plain text: this model has no chat template (say --template chatml)"
            problems.append(Problem(str(path), expected, kind))
        elif kind == "pair":
            found[name] = PairAccuracy(name, rows.examples)
        else:
            found[name] = HeldoutLoss(name, rows.examples)
    if problems:
        raise RecipeError(problems)
    if encoder.template is not None:
        found |= {"over_refusal": BenignRequests(), "sycophancy": FactClaims()}
    if names is None or "forgetting" in names:
        found["forgetting"] = HeldoutBits("forgetting", own_texts(model, encoder))
    if names is None:
        return found
    unknown = [name for name in names if name not in found]
    if unknown:
        known = ", ".join(found)
        raise RecipeError([Problem("--suites", f"one of {known}", name) for name in unknown])
    return {name: found[name] for name in names}


def _require_alike(
    suites: dict[str, Suite], before: dict[str, Scores], after: dict[str, Scores], against: str
) -> None:
    """Only bits per byte compare over unlike tokenizers and templates."""
    unlike = [
        name
        for name, suite in suites.items()
        if before[name].stamp.differences(after[name].stamp)
        and any(measure.unit != "bits/byte" for measure in suite.measures.values())
    ]
    if unlike:
        expected = (
            f"a model with the same tokenizer and chat template: {', '.join(unlike)} cannot be "
            "compared; say --template, or --suites forgetting"
        )
        raise RecipeError(Problem("--against", expected, against))


def _measures(
    suites: dict[str, Suite], scores: dict[str, Scores]
) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, suite in suites.items():
        for measure, described in suite.measures.items():
            rows = [row for row in scores[name].of(measure) if row.weight > 0]
            if rows:
                entry = {"unit": described.unit, **interval_json(rows, 0)}
                found.setdefault(name, {})[measure] = entry
    return found


def _compare(
    result: Evaluation,
    suites: dict[str, Suite],
    before: dict[str, Scores],
    after: dict[str, Scores],
) -> None:
    verdicts = []
    for planned in plan_gates("", suites, against=["base"]):
        gate = planned.gate
        first, second = before[gate.suite], after[gate.suite]
        verdicts.append(decide(gate, *common(first.of(gate.measure), second.of(gate.measure))))
    result.gates = [one.as_json() for one in verdicts]
    result.verdict = overall(verdicts) if verdicts else "measured"
    for name, suite in suites.items():
        for measure in suite.measures:
            rows = common(before[name].of(measure), after[name].of(measure))
            result.flips += flips(*rows, "base")
