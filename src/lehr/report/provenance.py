"""Where a model came from and on what it was made: hashes, keys, machine, versions."""

from __future__ import annotations

from collections.abc import Mapping

from lehr.report.reading import RunFiles, items, mapping, number, objects, text
from lehr.report.wording import plain, size


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
        kind, path = text(export.get("kind")), text(export.get("path"))
        steps.append((f"export {kind}", path, export_words(export)))
    return steps


def export_words(export: Mapping[str, object]) -> str:
    """What the parity check of an export found, as a sentence; empty where it was not made."""
    parity = mapping(export.get("parity"))
    if not parity:
        return ""
    if text(parity.get("problem")):
        worse = "worse than" if export.get("kind") == "fp8" else "NOT"
        return f"{worse} what was trained: {text(parity['problem'])}"
    if export.get("kind") == "fp8":
        return _float8_words(parity)
    gap = number(parity.get("gap"))
    if parity.get("cast"):
        kl = number(parity.get("kl")) or 0.0
        near = f"KL {kl:.0e} nats a token, rounded to the base's dtype,"
    else:
        near = f"at most {gap:.0e} nats apart" if gap else "bit for bit"
    said = f"the same as trained, {near} on {plain(parity.get('positions'), 0)} tokens"
    refused = text(mapping(export.get("cast_refused")).get("problem"))
    if refused:
        said += f"; it is in fp32, because in the base's dtype it would be off ({refused})"
    return said


def _float8_words(parity: Mapping[str, object]) -> str:
    low, high = (plain(one, 4) for one in (*items(parity.get("loss_interval")), None, None)[:2])
    positions = number(parity.get("positions")) or 0.0
    share = (number(parity.get("flips")) or 0.0) / max(1.0, positions)
    said = f"E4M3 weights in {plain(parity.get('layers'), 0)} layers"
    said += f": loss {plain(parity.get('loss'), 4)} nats a token [{low}, {high}]"
    said += f", KL {plain(parity.get('kl'), 4)}, {share:.1%} of clear first choices changed"
    return said + f" on {plain(positions, 0)} tokens"


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
    model = mapping(run.plan.get("model"))
    if model.get("four_bits"):
        held = f"{size(number(model.get('weight_bytes')) or 0.0)} of weights"
        rows.append(("base", f"in four bits (NF4, scales in 8 bits), {held}; an adapter beside it"))
    versions = mapping(run.ledger.get("versions"))
    rows += [(text(name), text(version)) for name, version in versions.items()]
    return rows
