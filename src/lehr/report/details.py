"""What a report says below its first screen: a stage's gates, flips, curves and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lehr.report.curves import Chart, Series, chart
from lehr.report.first_screen import Mark, mark, stage_mark
from lehr.report.left_out import left_out
from lehr.report.reading import StageFiles, items, mapping, number, objects, text
from lehr.report.time_went import limit_words, time_went
from lehr.report.wording import (
    change,
    count,
    duration,
    gate_name,
    interval,
    level,
    plain,
    plural,
    signed_limit,
    unit_word,
)

BATCHES_SHOWN = 20  # of those that were not trained on; all are in the ledger
FLIPS_SHOWN = 30  # of each group; the rest is counted and stays in flips.jsonl


@dataclass(frozen=True)
class FlipGroup:
    """The items of one suite that changed side in one direction."""

    suite: str
    direction: str
    against: str
    shown: list[Mapping[str, str]]
    hidden: int

    @property
    def total(self) -> int:
        return len(self.shown) + self.hidden


@dataclass(frozen=True)
class GateRow:
    """A gate as a line of the table."""

    name: str
    against: str
    base: str
    tuned: str
    difference: str
    bounds: str
    limit: str
    n: str
    mark: Mark
    note: str


@dataclass(frozen=True)
class ScoreRow:
    """One measure of one suite, gated or not."""

    suite: str
    measure: str
    unit: str
    base: str
    parent: str
    tuned: str
    n: str


@dataclass(frozen=True)
class SourceRow:
    """The data accounting of one source."""

    name: str
    shape: str
    rows: str
    kept: str
    heldout: str
    dropped: str
    balanced: bool
    tokens: str
    supervised: str
    lost_tokens: str
    reasons: list[tuple[str, str, str]]
    notes: list[str]
    files: list[tuple[str, str]]


@dataclass(frozen=True)
class Complaint:
    """A finding of the doctor."""

    title: str
    sure: str
    seen: str
    causes: list[str]
    test: str
    fix: str


@dataclass(frozen=True)
class StageDetails:
    """One stage below the first screen."""

    anchor: str
    folder: str
    name: str
    kind: str
    mark: Mark
    reused: bool
    why: str
    figures: list[tuple[str, str]]
    gates: list[GateRow]
    scores: list[ScoreRow]
    flips: list[FlipGroup]
    loss: Chart | None
    loss_logarithmic: Chart | None
    small_charts: list[Chart]
    skipped: int
    sources: list[SourceRow]
    findings: list[tuple[str, str]]
    mask: list[tuple[str, str]]
    mask_caption: str
    doctor: list[Complaint]
    left_out: Sequence[Mapping[str, Any]]
    left_out_more: int
    time: list[tuple[str, str, str]]
    limit: str


def stage_details(stage: StageFiles) -> StageDetails:
    """Everything that the report shows about a stage."""
    loss, logarithmic, small = _charts(stage)
    batches = left_out(stage.metrics, stage.quarantine)
    return StageDetails(
        anchor=f"stage-{stage.folder}",
        folder=stage.folder,
        name=stage.name,
        kind=stage.kind,
        mark=stage_mark(stage),
        reused=stage.entry.get("reused") is True,
        why=text(stage.entry.get("why")),
        figures=_figures(stage),
        gates=[_gate_row(gate) for gate in stage.gates],
        scores=_scores(stage),
        flips=_flips(stage),
        loss=loss,
        loss_logarithmic=logarithmic,
        small_charts=small,
        skipped=sum(row.get("skipped") is True for row in stage.metrics),
        sources=[_source(entry) for entry in objects(stage.audit.get("sources"))],
        findings=[
            (
                _counted(entry),
                ", ".join(text(place) for place in items(entry.get("examples"))[:3]),
            )
            for entry in objects(stage.audit.get("findings"))
        ],
        mask=_mask(stage.audit),
        mask_caption=_mask_caption(stage.audit),
        doctor=[_complaint(one) for one in objects(stage.doctor.get("findings"))],
        left_out=batches[:BATCHES_SHOWN],
        left_out_more=max(0, len(batches) - BATCHES_SHOWN),
        time=time_went(stage),
        limit=limit_words(stage),
    )


def _counted(finding: Mapping[str, Any]) -> str:
    """A finding of the audit with its number, which its sentence says already."""
    if finding.get("sentence"):
        return text(finding["sentence"])
    return f"{plain(finding.get('count'), 0)} × {text(finding.get('text') or finding.get('kind'))}"


def _complaint(finding: Mapping[str, Any]) -> Complaint:
    sure = number(finding.get("confidence"))
    return Complaint(
        title=text(finding.get("title") or finding.get("name")),
        sure="" if sure is None else f"{sure:.0%} sure",
        seen=f"{text(finding.get('where'))}: {text(finding.get('seen'))}",
        causes=[text(cause) for cause in items(finding.get("causes"))],
        test=text(finding.get("decisive_test")),
        fix=text(mapping(finding.get("fix")).get("do")),
    )


def _figures(stage: StageFiles) -> list[tuple[str, str]]:
    entry = stage.entry
    updates = entry.get("updates")
    if number(updates) is None and stage.metrics:
        updates = stage.metrics[-1].get("update")
    figures = [("updates", count(updates)), ("tokens", count(entry.get("tokens")))]
    figures.append(("time", duration(entry.get("seconds"))))
    seconds, tokens = number(entry.get("seconds")), number(entry.get("tokens"))
    if seconds and tokens:
        figures.append(("tokens/s", count(tokens / seconds)))
    kl = mapping(stage.evaluation.get("kl"))
    if number(kl.get("value")) is not None:
        figures.append(("KL from parent", f"{plain(kl['value'])} nats/token"))
    return figures


def _gate_row(gate: Mapping[str, Any]) -> GateRow:
    unit = text(gate.get("unit"))
    limit = signed_limit(gate)
    verdict = text(gate.get("verdict"))
    improve = gate.get("kind") == "improve"
    needed = number(gate.get("n_to_decide"))
    undecided = verdict == "undetermined" and needed
    return GateRow(
        name=gate_name(gate),
        against=text(gate.get("against")) or "parent",
        base=level(gate.get("base"), unit),
        tuned=level(gate.get("tuned"), unit),
        difference=change(gate.get("difference"), unit),
        bounds=interval(gate),
        limit="better than 0" if improve and not limit else change(limit, unit, with_unit=False),
        n=plain(gate.get("n"), 0),
        mark=mark(verdict),
        note=f"about {needed:,.0f} items would decide" if undecided else "",
    )


def _scores(stage: StageFiles) -> list[ScoreRow]:
    rows = []
    for suite, measures in mapping(stage.evaluation.get("suites")).items():
        for measure, values in mapping(measures).items():
            figures = mapping(values)
            unit = text(figures.get("unit"))
            sides = {side: mapping(figures.get(side)) for side in ("base", "parent", "tuned")}
            rows.append(
                ScoreRow(
                    suite=text(suite),
                    measure=text(measure),
                    unit=unit_word(unit),
                    base=_score(sides["base"], unit),
                    parent=_score(sides["parent"], unit),
                    tuned=_score(sides["tuned"], unit),
                    n=plain(sides["tuned"].get("n"), 0),
                )
            )
    return rows


def _score(side: Mapping[str, Any], unit: str) -> str:
    shown = level(side.get("value"), unit)
    if number(side.get("low")) is None or number(side.get("high")) is None:
        return shown
    low = level(side["low"], unit).removesuffix(" %")
    high = level(side["high"], unit).removesuffix(" %")
    return f"{shown} [{low}, {high}]"


def _flips(stage: StageFiles) -> list[FlipGroup]:
    groups: dict[tuple[str, str, str], list[Mapping[str, str]]] = {}
    fields = ("id", "prompt", "reference", "before", "after", "measure")
    for flip in stage.flips:
        key = (
            text(flip.get("direction")) or "changed",
            text(flip.get("suite")),
            text(flip.get("against")) or "parent",
        )
        groups.setdefault(key, []).append({name: text(flip.get(name)) for name in fields})
    ordered = sorted(groups.items(), key=lambda group: (group[0][0] != "lost", group[0]))
    return [
        FlipGroup(
            suite=suite,
            direction=direction,
            against=against,
            shown=rows[:FLIPS_SHOWN],
            hidden=max(0, len(rows) - FLIPS_SHOWN),
        )
        for (direction, suite, against), rows in ordered
    ]


def _charts(stage: StageFiles) -> tuple[Chart | None, Chart | None, list[Chart]]:
    marks = [
        place
        for row in stage.metrics
        if row.get("skipped") is True and (place := number(row.get("update"))) is not None
    ]
    losses = {"train loss": column(stage.metrics, "loss")}
    if evaluated := _evaluated(stage.metrics):
        losses["held-out loss"] = evaluated
    small = [
        chart(title, {title: column(stage.metrics, key)}, width=320, height=90)
        for title, key in (("learning rate", "learning_rate"), ("gradient norm", "grad_norm"))
    ]
    return (
        chart("loss", losses, marks=marks),
        chart("loss", losses, marks=marks, logarithmic=True),
        [drawn for drawn in small if drawn is not None],
    )


def column(rows: Sequence[Mapping[str, Any]], key: str) -> Series:
    """The finite (update, value) points of one column of metrics.jsonl."""
    points = []
    for index, row in enumerate(rows):
        value = number(row.get(key))
        update = number(row.get("update"))
        if value is not None:
            points.append((float(index + 1) if update is None else update, value))
    return points


def _evaluated(rows: Sequence[Mapping[str, Any]]) -> Series:
    for key in ("evaluation.loss", "evaluation_loss", "eval_loss"):
        if points := column(rows, key):
            return points
    nested = [
        {**mapping(row.get("evaluation")), "update": row.get("update")}
        for row in rows
        if mapping(row.get("evaluation"))
    ]
    return column(nested, "loss")


def _source(entry: Mapping[str, Any]) -> SourceRow:
    reasons = []
    total_dropped = 0.0
    for reason, how in mapping(entry.get("dropped")).items():
        rows = number(mapping(how).get("rows")) if isinstance(how, Mapping) else number(how)
        total_dropped += rows or 0.0
        reasons.append((text(reason), plain(rows, 0), text(mapping(how).get("first"))))
    rows, kept, heldout = (number(entry.get(key)) for key in ("rows", "kept", "heldout"))
    return SourceRow(
        name=text(entry.get("name")),
        shape=text(entry.get("shape")),
        rows=count(rows),
        kept=count(kept),
        heldout=count(heldout),
        dropped=count(total_dropped),
        balanced=rows is not None and rows == (kept or 0.0) + (heldout or 0.0) + total_dropped,
        tokens=count(entry.get("tokens")),
        supervised=count(entry.get("supervised_tokens")),
        lost_tokens=count(entry.get("dropped_tokens")),
        reasons=reasons,
        notes=[text(note) for note in items(entry.get("notes"))],
        files=[
            (text(file.get("path")), text(file.get("sha256")))
            for file in objects(entry.get("files"))
        ],
    )


def _mask(audit: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(text, style) of each span: trained, control, trained control, or context."""
    spans = []
    for span in objects(audit.get("mask_sample")):
        trained, control = span.get("supervised") is True, span.get("control") is True
        style = ("trained" if trained else "context") + (" control" if control else "")
        spans.append((text(span.get("text")), style))
    return spans


def _mask_caption(audit: Mapping[str, Any]) -> str:
    parts = []
    share = number(audit.get("supervised_share"))
    if share is not None:
        parts.append(f"{share:.1%} of all tokens are trained on")
    if isinstance(audit.get("every_end_token"), bool):
        parts.append(f"every end token: {'yes' if audit['every_end_token'] else 'NO'}")
    packs, fill = number(audit.get("packs")), number(audit.get("fill"))
    if packs is not None:
        filled = "" if fill is None else f", {fill:.0%} full"
        parts.append(f"{plural(int(packs), 'pack')}{filled}")
    return " · ".join(parts)
