"""Defaults that depend on other keys, filled once, so that the saved recipe says everything."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

from lehr.recipe.positions import Document
from lehr.recipe.schema import (
    IMPROVE_MEASURES,
    Adapter,
    Float8,
    Gates,
    LossScale,
    Recipe,
    Schedule,
    Source,
    Stage,
)
from lehr.recipe.validate import Parts

MICROWORLD_ROWS = 1000
INFINITE_WARMUP = 100.0  # updates
TINY_RATE = 1e-3  # thousands of parameters learn at ten times the rate of billions
RATE_ALL_WEIGHTS = {"pretrain": 1e-3, "sft": 2e-5, "preference": 5e-6}


def resolve(document: Document, parts: Parts, today: datetime.date | None) -> Recipe | None:
    """The whole recipe with nothing left open but what needs the data or the machine.

    None where a part is not right; problems that only show here go to the document.
    """
    header, top, gates = parts.recipe, parts.adapter, parts.gates
    stages = [stage for stage in parts.stages if stage is not None]
    sources = {name: source for name, source in parts.sources.items() if source is not None}
    whole = len(stages) == len(parts.stages) and len(sources) == len(parts.sources)
    if header is None or top is None or gates is None or not whole or document.problems:
        return None
    top = _with_alpha(top)
    tiny = header.model.startswith("tiny:")
    resolved: list[Stage] = []
    for index, stage in enumerate(stages):
        adapter = _adapter(document, index, stage, top, tiny)
        _check_lineage(document, index, stage, adapter, resolved[-1] if resolved else None)
        _check_dropout(document, index, stage, adapter)
        resolved.append(_stage(stage, adapter, tiny))
    export = header.export
    lora = any(stage.adapter is not None and stage.adapter.kind != "none" for stage in resolved)
    _check_four_bits(document, header, resolved)
    if "export" not in header.model_fields_set:
        export = ["adapter" if lora else "merged"]
    elif "adapter" in export and not lora:
        document.problem(("export",), "merged: no stage trains an adapter", list(export))
    changes: dict[str, Any] = {
        "adapter": top,
        "data": {name: _source(source) for name, source in sources.items()},
        "stages": resolved,
        "gates": _gates(document, gates, resolved, sources),
        "export": export,
        "date": _date(document, header, today),
    }
    return header.model_copy(update=changes)


def improve_gate(recipe: Recipe, index: int) -> tuple[str, str] | None:
    """(source, measure) that must improve in this stage, or None.

    The number of a stage goes before its name, and its name before its kind.
    """
    stage = recipe.stages[index]
    for key in (str(index), stage.name, stage.kind):
        if key is not None and (text := recipe.gates.improve.get(key)):
            source, _, measure = text.rpartition(".")
            return source, measure
    return None


def resumed(recipe: Recipe, run: Path) -> Recipe:
    """The recipe as an earlier run in folder `run` resolved it: a date that was auto stays.

    Without this, a run that goes on tomorrow would not be the one that began today.
    """
    found = _date_in(run / "recipe.yaml") if recipe.date_was_auto else None
    return recipe if found is None else recipe.model_copy(update={"date": found})


def _source(source: Source) -> Source:
    if source.microworld is None or source.rows is not None:
        return source
    return source.model_copy(update={"rows": MICROWORLD_ROWS})


def _with_alpha(adapter: Adapter) -> Adapter:
    if adapter.alpha is not None or adapter.kind == "none":
        return adapter
    return adapter.model_copy(update={"alpha": 2.0 * adapter.rank})


def _adapter(document: Document, index: int, stage: Stage, top: Adapter, tiny: bool) -> Adapter:
    """The stage's own keys over the recipe's; all weights of a tiny model that is untrained."""
    untrained = tiny and index == 0
    if stage.adapter is None:
        return Adapter(kind="none") if untrained else top
    given = {key: getattr(stage.adapter, key) for key in stage.adapter.model_fields_set}
    if "rank" in given and "alpha" not in given:
        given["alpha"] = None
    merged = _with_alpha(top.model_copy(update=given))
    if untrained and merged.kind != "none":
        text = "none: a tiny: model has no trained weights that an adapter could stand beside"
        document.problem(("stages", 0, "adapter"), text, merged.kind)
    return Adapter(kind="none") if merged.kind == "none" else merged


def _check_lineage(
    document: Document, index: int, stage: Stage, adapter: Adapter, parent: Stage | None
) -> None:
    """One adapter runs through the stages; another one needs the parent's folded in."""
    old = None if parent is None else parent.adapter
    if old is None or old.kind == "none":
        if stage.fold_parent:
            document.problem(
                ("stages", index, "fold_parent"), "false: there is no parent adapter to fold", True
            )
        return
    if stage.fold_parent:
        return
    changed = [
        key
        for key in ("kind", "rank", "targets", "alpha")
        if getattr(old, key) != getattr(adapter, key)
    ]
    if changed:
        key = changed[0]
        text = (
            f"the parent's adapter ({key} {getattr(old, key)}), "
            "or fold_parent: true to add it to the base and start a new one"
        )
        document.problem(("stages", index, "adapter", key), text, getattr(adapter, key))


def _check_four_bits(document: Document, header: Recipe, stages: list[Stage]) -> None:
    """One base in four bits for the whole run, and what its rounding rules out."""
    kinds = [stage.adapter.kind if stage.adapter else "none" for stage in stages]
    if "qlora" not in kinds:
        return
    for index, (stage, kind) in enumerate(zip(stages, kinds, strict=True)):
        keys = ("stages", index)
        if kind != "qlora":
            text = "qlora, as in the other stages: a run's base is held in four bits or is not"
            document.problem((*keys, "adapter", "kind"), text, kind)
        if stage.fold_parent:
            text = "false with qlora: the sum would be rounded to four bits again"
            document.problem((*keys, "fold_parent"), text, True)
        if stage.precision == "fp8":
            text = "bf16 or fp32 with qlora: its weights are dequantised for each product"
            document.problem((*keys, "precision"), text, stage.precision)
    if "fp8" in header.export:
        text = "adapter or merged after qlora: the base has been rounded once already"
        document.problem(("export",), text, list(header.export))


def _check_dropout(document: Document, index: int, stage: Stage, adapter: Adapter) -> None:
    """Against a fixed reference, dropout would be read as a change of the policy."""
    if stage.kind == "preference" and adapter.dropout > 0:
        text = "0 in a preference stage; say adapter: {dropout: 0} in this stage"
        document.problem(("stages", index, "adapter", "dropout"), text, adapter.dropout)


def _stage(stage: Stage, adapter: Adapter, tiny: bool) -> Stage:
    changes: dict[str, Any] = {"adapter": adapter}
    if stage.epochs is None and stage.max_updates is None:
        changes["epochs"] = 1.0
    if stage.schedule.kind == "infinite":
        changes["schedule"] = _infinite(stage.schedule)
    if stage.pack_length is None:
        changes["pack_length"] = stage.max_length
    changes |= _precision(stage)
    if "learning_rate" not in stage.model_fields_set:
        if adapter.kind == "none":
            changes["learning_rate"] = RATE_ALL_WEIGHTS[stage.kind]
        if tiny and stage.kind != "preference":
            changes["learning_rate"] = TINY_RATE
    return stage.model_copy(update=changes)


def _precision(stage: Stage) -> dict[str, Any]:
    """The settings that belong to the stage's precision, said in full."""
    if stage.precision == "fp16" and stage.loss_scale is None:
        return {"loss_scale": LossScale()}
    scale = stage.loss_scale
    if scale is not None and scale.init > scale.ceiling:  # only where no ceiling was given
        return {"loss_scale": scale.model_copy(update={"ceiling": scale.init})}
    if stage.precision == "fp8" and stage.fp8 is None:
        return {"fp8": Float8()}
    if stage.precision == "pure_bf16" and stage.stochastic_rounding is None:
        return {"stochastic_rounding": True}
    return {}


def _infinite(schedule: Schedule) -> Schedule:
    """Without an end: its warmup is counted in updates, and it decays only where one is asked."""
    changes = {"warmup": INFINITE_WARMUP, "decay": 0.0}
    return schedule.model_copy(
        update={
            key: value for key, value in changes.items() if key not in schedule.model_fields_set
        }
    )


def _gates(
    document: Document, gates: Gates, stages: list[Stage], sources: dict[str, Source]
) -> Gates:
    changes: dict[str, Any] = {}
    if "improve" not in gates.model_fields_set:
        changes["improve"] = _default_improve(document, stages, sources)
    return gates.model_copy(update=changes)


def _default_improve(
    document: Document, stages: list[Stage], sources: dict[str, Source]
) -> dict[str, str]:
    """Each stage's own held-out measure: of its largest source that holds rows out."""
    improve: dict[str, str] = {}
    kinds = [stage.kind for stage in stages]
    for index, stage in enumerate(stages):
        own = [name for name in stage.data if sources[name].holdout != 0]
        if not own:
            text = (
                "held-out rows in one of its sources, for the improve gate "
                "(all say holdout: 0; say gates: none to train without)"
            )
            document.problem(("stages", index, "data"), text, list(stage.data))
            continue
        largest = max(own, key=lambda name: stage.data[name])
        key = stage.kind if kinds.count(stage.kind) == 1 else str(index)
        improve[key] = f"{largest}.{IMPROVE_MEASURES[stage.kind][0]}"
    return improve


def _date(document: Document, recipe: Recipe, today: datetime.date | None) -> str:
    """The frozen date: the recipe's, else that of the run to be resumed, else today."""
    if recipe.date != "auto":
        return recipe.date
    if recipe.output is not None:
        earlier = recipe.path_of(recipe.output) / "recipe.yaml"
        if found := _date_in(earlier):
            document.notices.append(f"date: {found}, as in {earlier}")
            return found
    return (today or datetime.date.today()).isoformat()


def _date_in(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"^date: *['\"]?(\d{4}-\d{2}-\d{2})['\"]? *$", text, re.MULTILINE)
    return found.group(1) if found else None
