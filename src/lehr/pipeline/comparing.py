"""`lehr evaluate`: one model, or one against another: scores, paired differences, flips."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lehr.data.encoding import Encoder
from lehr.data.templates import Template
from lehr.errors import Problem, RecipeError
from lehr.evaluation.claims import FactClaims
from lehr.evaluation.default_gates import plan_gates
from lehr.evaluation.flips import flips
from lehr.evaluation.forgetting import own_texts
from lehr.evaluation.gates import decide
from lehr.evaluation.heldout import HeldoutBits
from lehr.evaluation.judging import overall
from lehr.evaluation.refusals import BenignRequests
from lehr.evaluation.scoring import Scores
from lehr.evaluation.suites import Suite, stamp_of
from lehr.generation.decode import context_length
from lehr.models.loading import load_model
from lehr.models.tokenizer import require_rows, stop_ids_of
from lehr.pipeline.admission import admit
from lehr.pipeline.data_suites import MAX_LENGTH, data_suites
from lehr.pipeline.judging import common, interval_json
from lehr.pipeline.reopening import model_of
from lehr.pipeline.stage_run import strict

OWN_SUITES = ("over_refusal", "sycophancy", "forgetting")
NEUTRAL_DATE = "2000-01-01"  # for templates that print one: the same on every day


@dataclass
class Evaluation:
    """Measures by suite; with a base also gates and flips. verdict: measured without a base.

    notes  what was left out or measured in part, with its place
    """

    suites: dict[str, dict[str, dict[str, Any]]]
    gates: list[dict[str, Any]] = field(default_factory=list)
    flips: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = "measured"
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The object of `lehr evaluate --json`."""
        found: dict[str, Any] = strict(
            {
                "suites": self.suites,
                "flips": self.flips,
                "gates": self.gates,
                "verdict": self.verdict,
                "notes": self.notes,
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
    Raises RecipeError for models that cannot be loaded, suites that do not exist or do not
    fit the model's context, and files of which nothing can be measured.
    """
    names = [model] if against is None else [against, model]
    scores: list[dict[str, Scores]] = []
    chosen: dict[str, Suite] = {}
    notes: list[str] = []
    for place, name in enumerate(names):
        loaded = load_model(model_of(name), template=template)
        admit(loaded)
        loaded.eval()
        encoder = encoder_of(loaded)
        if place == 0:
            chosen, notes = _suites(loaded, encoder, data, suites, items)
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
    result = Evaluation(_measures(chosen, scores[-1]), notes=notes)
    silent = [name for name in chosen if name not in result.suites]
    result.notes += [f"{name}: no item has a score" for name in silent]
    if not result.suites:
        expected = f"at least one suite that can be measured ({'; '.join(result.notes)})"
        raise RecipeError(Problem(f"lehr evaluate {model}", expected))
    if against is not None:
        _require_alike(chosen, scores[0], scores[1], against)
        _compare(result, chosen, scores[0], scores[1])
    return result


def encoder_of(model: Any) -> Encoder:
    """The encoder of a loaded model, with its own template.

    Raises RecipeError where the tokenizer has ids that the model has no row for.
    """
    rows = int(model.network.get_input_embeddings().weight.shape[0])
    require_rows(model.tokenizer, rows, model.name)
    template = Template.from_tokenizer(model.tokenizer) if model.tokenizer.chat_template else None
    return Encoder(
        model.tokenizer, template, date=NEUTRAL_DATE, stop_ids=stop_ids_of(model.network)
    )


def _suites(
    model: Any,
    encoder: Encoder,
    data: Sequence[Path | str],
    names: Sequence[str] | None,
    items: int,
) -> tuple[dict[str, Suite], list[str]]:
    """(suites to score, what a person should know). Raises RecipeError, all problems at once."""
    context = context_length(model.network.config) or MAX_LENGTH
    length = min(MAX_LENGTH, context)
    found, notes = data_suites(data, encoder, taken=OWN_SUITES, max_length=length, items=items)
    if encoder.template is not None:
        found |= {"over_refusal": BenignRequests(), "sycophancy": FactClaims()}
    if names is None or "forgetting" in names:
        texts = own_texts(model, encoder)
        found["forgetting"] = HeldoutBits("forgetting", texts, max_length=length)
    unknown = [name for name in names or () if name not in found]
    if unknown:
        known = ", ".join(found)
        raise RecipeError([Problem("--suites", f"one of {known}", name) for name in unknown])
    chosen = found if names is None else {name: found[name] for name in names}
    needed = too_long(chosen, encoder, items, context)
    if names is not None and needed:
        raise RecipeError(
            [
                Problem(
                    f"--suites {name}",
                    f"a model whose context holds its {tokens:,} tokens: {model.name} has "
                    f"{context:,}; leave this suite out",
                )
                for name, tokens in needed.items()
            ]
        )
    notes += [
        f"{name} was not measured: it needs {tokens:,} tokens, and the context of {model.name} "
        f"is {context:,}"
        for name, tokens in needed.items()
    ]
    return {name: suite for name, suite in chosen.items() if name not in needed}, notes


def too_long(
    suites: dict[str, Suite], encoder: Encoder, items: int, context: int
) -> dict[str, int]:
    """Suites with an item that does not fit into `context` tokens, and what it needs."""
    found: dict[str, int] = {}
    for name, suite in suites.items():
        longest = getattr(suite, "longest", None)
        if longest is None or context >= MAX_LENGTH:
            continue
        tokens = longest(list(suite.items)[:items], encoder)
        if tokens > context:
            found[name] = tokens
    return found


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
