"""Where a model came from and on what it was made: hashes, keys, machine, versions."""

from __future__ import annotations

from collections.abc import Mapping

from lehr.report.reading import RunFiles, mapping, number, objects, text
from lehr.report.wording import plain


def lineage_steps(run: RunFiles) -> list[tuple[str, str, str]]:
    """From data to export: (what, hash or place, note)."""
    steps = [("base", text(run.ledger.get("model")), "the model the run began from")]
    for stage in run.stages:
        for file in objects(stage.entry.get("data")):
            kept, rows = plain(file.get("kept"), 0), plain(file.get("rows"), 0)
            note = f"{kept} of {rows} rows into {stage.name}"
            steps.append((f"data {text(file.get('path'))}", text(file.get("sha256")), note))
        if stage.finished:
            parent = text(stage.entry.get("parent")) or "base"
            outcome = "promoted" if stage.promoted else "parent kept"
            steps.append(
                (
                    f"stage {stage.name}",
                    text(stage.entry.get("key")),
                    f"from {parent[:16]}: {outcome}",
                )
            )
    for export in objects(run.ledger.get("exports")):
        found = parity_words(mapping(export.get("parity")))
        steps.append((f"export {text(export.get('kind'))}", text(export.get("path")), found))
    return steps


def parity_words(parity: Mapping[str, object]) -> str:
    """An export's parity as a sentence; empty where it was not checked."""
    if not parity:
        return ""
    if text(parity.get("problem")):
        return f"NOT what was trained: {text(parity['problem'])}"
    positions = plain(parity.get("positions"), 0)
    if parity.get("cast"):
        near = f"KL {plain(parity.get('kl'), 6)} nats a token, as rounded"
    elif number(parity.get("gap")):
        near = f"at most {number(parity['gap']):.0e} nats apart"
    else:
        near = "bit for bit"
    return f"the same as trained, {near}, on {positions} tokens"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return plain(value, 5) if number(value) is not None else text(value)


def environment(run: RunFiles) -> list[tuple[str, str]]:
    """Machine, precision and versions as (name, value)."""
    machine = {**mapping(run.ledger.get("machine")), **mapping(run.plan.get("machine"))}
    rows = []
    for name, value in machine.items():
        if isinstance(value, Mapping):
            shown = ", ".join(f"{text(key)} {_value(item)}" for key, item in value.items())
        else:
            shown = _value(value)
        rows.append((text(name).replace("_", " "), shown))
    precision = mapping(run.plan.get("precision"))
    if precision:
        rows.append(("precision", f"{text(precision.get('value'))}: {text(precision.get('why'))}"))
    versions = mapping(run.ledger.get("versions"))
    rows += [(text(name), text(version)) for name, version in versions.items()]
    return rows
