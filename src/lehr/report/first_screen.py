"""The first screen of a report: verdict, prompts, gains and costs, what is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lehr.report.plots import Panel, cost_panel, gained_panel
from lehr.report.reading import RunFiles, StageFiles, mapping, number, objects, text
from lehr.report.wording import (
    PROMPT_KINDS,
    change,
    count,
    duration,
    gate_name,
    gate_sentence,
    plain,
    plural,
    verdict_mark,
)


@dataclass(frozen=True)
class Mark:
    """A verdict as icon, word and colour class: never colour alone."""

    icon: str
    word: str
    style: str


@dataclass(frozen=True)
class StageChip:
    """A stage in the path from base to model."""

    name: str
    mark: Mark
    why: str
    anchor: str


@dataclass(frozen=True)
class PromptPair:
    """One prompt, answered by the base and by the tuned model."""

    label: str
    icon: str
    prompt: str
    base: str
    tuned: str
    same: bool


@dataclass(frozen=True)
class Fact:
    """One figure of what the run cost."""

    value: str
    label: str


@dataclass(frozen=True)
class FirstScreen:
    """Everything above the fold."""

    mark: Mark
    sentence: str
    chips: list[StageChip]
    prompts: list[PromptPair]
    tuned_label: str
    panels: list[Panel]
    unknowns: list[str]
    facts: list[Fact]


def mark(verdict: str) -> Mark:
    """The mark of a verdict."""
    return Mark(*verdict_mark(verdict))


def first_screen(run: RunFiles) -> FirstScreen:
    """The first screen of a run, however far it got."""
    shown = run.shown
    return FirstScreen(
        mark=mark(run.verdict),
        sentence=text(run.ledger.get("sentence")).strip() or sentence(run),
        chips=[_chip(stage) for stage in run.stages],
        prompts=[] if shown is None else _prompts(shown),
        tuned_label=_tuned_label(run),
        panels=_panels(run),
        unknowns=unknowns(run),
        facts=_facts(run),
    )


def sentence(run: RunFiles) -> str:
    """One sentence for a run whose ledger has none."""
    done = [stage for stage in run.stages if stage.finished]
    planned = len(objects(run.plan.get("stages"))) or len(run.stages)
    if run.verdict == "interrupted":
        return (
            f"Interrupted after {plural(len(done), 'finished stage')} of {planned}: "
            "the same command resumes it."
        )
    if run.verdict == "running":
        current = next((stage.name for stage in run.stages if not stage.finished), "")
        where = f", now in {current}" if current else ""
        return f"Running: {len(done)} of {plural(planned, 'stage')} finished{where}."
    promoted = run.promoted
    refused = [stage.name for stage in done if not stage.promoted]
    if promoted is not None:
        kept = f"; refused, parent kept: {', '.join(refused)}" if refused else ""
        return f"Promoted {promoted.name}{kept}."
    if refused:
        return f"Nothing was promoted: {', '.join(refused)} did not pass; the base stands."
    return "No stage of this run has finished."


def stage_mark(stage: StageFiles) -> Mark:
    """Promoted, parent kept (refused or undetermined), or still running."""
    if not stage.finished:
        return mark("running")
    if stage.promoted:
        return mark("promoted")
    verdicts = {text(gate.get("verdict")) for gate in stage.gates}
    return mark("refused" if "refused" in verdicts or not verdicts else "undetermined")


def chosen_gates(stage: StageFiles) -> list[Mapping[str, Any]]:
    """One gate a measure: against the base where there is one, else against the parent."""
    chosen: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for gate in stage.gates:
        key = (text(gate.get("suite")), text(gate.get("measure")), text(gate.get("kind")))
        if key not in chosen or text(gate.get("against")) == "base":
            chosen[key] = gate
    return list(chosen.values())


def unknowns(run: RunFiles) -> list[str]:
    """What this run could not tell, each with the number of items it had and would need."""
    found: list[str] = []
    named: set[str] = set()
    for stage in run.stages:
        if not _open_question(stage, run):
            continue
        for gate in stage.gates:
            if text(gate.get("verdict")) != "undetermined" or gate_name(gate) in named:
                continue
            named.add(gate_name(gate))
            needed = number(gate.get("n_to_decide"))
            would = f"about {needed:,.0f} would decide" if needed else "more items would decide"
            found.append(
                f"{stage.name}: {gate_sentence(gate)} is undetermined with "
                f"{plain(gate.get('n'), 0)} items; {would}."
            )
    for gate in objects(run.plan.get("gates")):
        if gate.get("can_pass") is False and gate_name(gate) not in named:
            named.add(gate_name(gate))
            note = text(gate.get("note")) or "the items at hand do not resolve its limit"
            found.append(f"{gate_name(gate)} could not pass: {note}.")
    if run.shown is None:
        found.append("Nothing was evaluated yet, so nothing is known about what changed.")
        return found
    if not (run.shown.evaluation.get("kl") or {}):
        found.append("How far the answers moved from the parent's (KL) was not measured.")
    protected = [gate for gate in chosen_gates(run.shown) if gate.get("kind") == "protect"]
    if protected:
        finest = "; ".join(
            f"{gate_name(gate)} below {_half_width(gate)} (n = {plain(gate.get('n'), 0)})"
            for gate in protected
            if number(gate.get("low")) is not None and number(gate.get("high")) is not None
        )
        if finest:
            found.append(f"Changes too small to be seen with these items: {finest}.")
    else:
        found.append(f"No protected measure was gated: {_why_not_gated(run)}.")
    return found


def _open_question(stage: StageFiles, run: RunFiles) -> bool:
    """The shown stage, and stages that only doubt kept out; a refused one is settled."""
    if run.shown is not None and stage.folder == run.shown.folder:
        return True
    refused = any(gate.get("verdict") == "refused" for gate in stage.gates)
    return stage.finished and not stage.promoted and not refused


def _half_width(gate: Mapping[str, Any]) -> str:
    low, high = number(gate.get("low")) or 0.0, number(gate.get("high")) or 0.0
    return change((high - low) / 2, text(gate.get("unit"))).lstrip("+")


def _chip(stage: StageFiles) -> StageChip:
    return StageChip(
        name=stage.name,
        mark=stage_mark(stage),
        why=text(stage.entry.get("why")),
        anchor=f"stage-{stage.folder}",
    )


def _prompts(stage: StageFiles) -> list[PromptPair]:
    pairs = []
    for row in objects(stage.evaluation.get("prompts")):
        kind = text(row.get("kind"))
        label, icon = PROMPT_KINDS.get(kind, (kind.replace("_", " ").capitalize() or "Prompt", "›"))
        base, tuned = text(row.get("base")), text(row.get("tuned"))
        pairs.append(PromptPair(label, icon, text(row.get("prompt")), base, tuned, base == tuned))
    return pairs


def _tuned_label(run: RunFiles) -> str:
    if run.shown is None:
        return "tuned"
    if run.shown.promoted:
        return f"tuned · {run.shown.name}"
    return f"{run.shown.name} · not promoted"


def _panels(run: RunFiles) -> list[Panel]:
    panels: list[Panel | None] = []
    if run.shown is not None:
        gates = chosen_gates(run.shown)
        panels.append(gained_panel([gate for gate in gates if gate.get("kind") == "improve"]))
        panels.append(cost_panel([gate for gate in gates if gate.get("kind") != "improve"]))
    stopped = [
        {**gate, "name": f"{stage.name}: {text(gate.get('name')) or gate_name(gate)}"}
        for stage in run.stages
        if stage.finished and not stage.promoted and stage is not run.shown
        for gate in chosen_gates(stage)
        if gate.get("verdict") != "passed" and gate.get("kind") != "improve"
    ]
    panels.append(cost_panel(stopped, "Stopped by a gate, not in the model"))
    return [panel for panel in panels if panel is not None]


def _facts(run: RunFiles) -> list[Fact]:
    entries = [stage.entry for stage in run.stages if stage.finished]
    tokens = sum(number(entry.get("tokens")) or 0.0 for entry in entries)
    seconds = number(run.ledger.get("seconds"))
    if seconds is None and entries:
        seconds = sum(number(entry.get("seconds")) or 0.0 for entry in entries)
    peak = number(run.ledger.get("peak_memory_gib"))
    model = mapping(run.plan.get("model"))
    reused = [entry for entry in entries if entry.get("reused") is True]
    facts = [Fact(duration(seconds), "wall time of this run" if reused else "wall time")]
    if reused:
        made = sum(number(entry.get("seconds")) or 0.0 for entry in reused)
        facts.append(
            Fact(duration(made), f"{len(reused)} of {plural(len(entries), 'stage')}, made earlier")
        )
    facts += [
        Fact("–" if peak is None else f"{peak:.2f} GiB", "peak memory"),
        Fact(count(tokens) if entries else "–", "tokens trained on"),
    ]
    if number(model.get("parameters")):
        facts.append(Fact(count(model["parameters"]), "parameters"))
    return facts


def _why_not_gated(run: RunFiles) -> str:
    """A first stage on random weights has no parent that could lose anything."""
    name = text(mapping(run.plan.get("model")).get("name"))
    if name.startswith("tiny:") and run.shown is run.stages[0]:
        return "this stage began from random weights, which have nothing to lose"
    return "what was lost is not known"
