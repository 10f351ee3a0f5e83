"""What single keys cannot say: files that exist, shares that sum, gates that can decide.

Every check works on the parts that are right by themselves and stays silent about
the others, so that one mistake is reported once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lehr.recipe.positions import Document, Keys
from lehr.recipe.schema import (
    IMPROVE_MEASURES,
    PROTECT_MEASURES,
    SUITES,
    Float8,
    Optimizer,
    Recipe,
    Schedule,
    Source,
    Stage,
)
from lehr.recipe.suggestions import did_you_mean
from lehr.recipe.validate import Parts

SHARES_TOLERANCE = 1e-6
# Keys that only some kinds read.
SCHEDULE_KEYS = {
    "decay": ("wsd", "infinite"),
    "shape": ("wsd", "infinite"),
    "cooldown": ("infinite",),
    "hold": ("infinite",),
    "final": ("cosine", "linear", "wsd", "infinite"),
}
ADAM_KINDS = ("adamw", "adam", "adam_l2", "muon")  # muon: of what is no hidden matrix
OPTIMIZER_KEYS = {
    "betas": ADAM_KINDS,
    "eps": ADAM_KINDS,
    "beta2_half_life_tokens": ADAM_KINDS,
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd", "muon"),
    "match_rms": ("muon",),
}
PRECISION_KEYS = {"loss_scale": "fp16", "fp8": "fp8", "stochastic_rounding": "pure_bf16"}
ORIGINS = ("path", "microworld", "builtin")
HUB_ID = re.compile(r"[A-Za-z0-9._-]{1,96}(/[A-Za-z0-9._-]{1,96})?")


def check(document: Document, parts: Parts, folder: Path) -> None:
    """All checks between keys, and of keys against the disk."""
    if parts.recipe is not None:
        _check_recipe(document, parts.recipe, folder)
    for name, source in parts.sources.items():
        if source is not None:
            _check_source(document, name, source, folder)
    for index, stage in enumerate(parts.stages):
        if stage is not None:
            _check_stage(document, index, stage, folder)
    _check_gates(document, parts)
    _notice_unused(document, parts)


def is_local_model(model: str) -> bool:
    """A model that is named by a path, and not by a hub id or a known name."""
    return model.startswith((".", "/", "~")) or model.endswith(".gguf") or "\\" in model


def _check_recipe(document: Document, recipe: Recipe, folder: Path) -> None:
    model, template = recipe.model, recipe.template
    if model.startswith("tiny:"):
        if not re.fullmatch(r"tiny:(\d+|\d*\.\d+)[kmKM](\+qk_norm)?", model):
            expected = "tiny:SIZE, as in tiny:300k or tiny:1m, or tiny:1m+qk_norm"
            document.problem(("model",), expected, model)
    elif is_local_model(model) and not _exists(folder, model):
        document.problem(("model",), _no_such_file(folder, model), model)
    elif not HUB_ID.fullmatch(model) and not _exists(folder, model):
        expected = "a name known to lehr fetch, a hub id, a folder, a .gguf file or tiny:1m"
        document.problem(("model",), expected, model)
    if template not in ("auto", "chatml") and not _is_file(folder, template):
        hint = did_you_mean(template, ["auto", "chatml"])
        text = f"auto, chatml or a template file{hint} ({_no_such_file(folder, template)})"
        document.problem(("template",), text, template)
    if recipe.date != "auto" and not _is_date(recipe.date):
        document.problem(("date",), "auto, or a date written YYYY-MM-DD", recipe.date)
    for index, suite in enumerate(recipe.suites):
        if suite not in SUITES:
            text = f"one of {', '.join(SUITES)}{did_you_mean(suite, SUITES)}"
            document.problem(("suites", index), text, suite)
    for key in ("suites", "export"):
        words = list(getattr(recipe, key))
        if len(set(words)) < len(words):
            document.problem((key,), "each word once", words)


def _is_date(text: str) -> bool:
    from datetime import date

    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _exists(folder: Path, text: str) -> bool:
    try:
        return (folder / Path(text).expanduser()).exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _is_file(folder: Path, text: str) -> bool:
    try:
        return (folder / Path(text).expanduser()).is_file()
    except (OSError, ValueError, RuntimeError):
        return False


def _no_such_file(folder: Path, text: str) -> str:
    """Why a path is no file, and which one was probably meant."""
    if _exists(folder, text):
        return "a file; this is a folder"
    path = folder / text
    if _exists(Path(), text):
        return f"a file in {folder}; paths start at the recipe, and this one is found from here"
    near = ""
    try:
        if path.parent.is_dir():
            near = did_you_mean(path.name, [p.name for p in sorted(path.parent.iterdir())][:500])
    except OSError:
        pass
    hub = "; hub data sets are not in this version" if re.fullmatch(r"[\w-]+/[\w-]+", text) else ""
    return f"a file that exists (looked in {path.parent}{near}{hub})"


def _check_source(document: Document, name: str, source: Source, folder: Path) -> None:
    keys: Keys = ("data", name)
    given = [key for key in ORIGINS if getattr(source, key) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        document.problem(keys, f"one of {', '.join(ORIGINS)} ({found} given)")
    paths = [source.path] if isinstance(source.path, str) else source.path or []
    if source.path is not None and not paths:
        document.problem((*keys, "path"), "at least one file", source.path)
    for path in paths:
        if not _is_file(folder, path):
            document.problem((*keys, "path"), _no_such_file(folder, path), path)
    if source.microworld is None:
        for key in ("options", "seed"):
            if key in source.model_fields_set and getattr(source, key):
                document.problem((*keys, key), f"no {key}: it belongs to a microworld source")


def _check_stage(document: Document, index: int, stage: Stage, folder: Path) -> None:
    keys: Keys = ("stages", index)
    _check_shares(document, (*keys, "data"), stage.data)
    replay = stage.keep.replay
    if replay and sum(replay.values()) >= 1:
        text = f"shares whose sum is below 1 (they sum to {sum(replay.values()):g})"
        document.problem((*keys, "keep", "replay"), text, replay)
    for name in set(replay) & set(stage.data):
        text = f"a source that is not in the stage's data; {name} has its share there"
        document.problem((*keys, "keep", "replay", name), text, name)
    if stage.epochs is not None and stage.max_updates is not None:
        text = f"epochs or max_updates, not both (epochs is {stage.epochs:g})"
        document.problem((*keys, "max_updates"), text, stage.max_updates)
    if stage.overflow == "split" and stage.kind != "pretrain":
        text = "truncate or drop: only plain text (a pretrain stage) can be split"
        document.problem((*keys, "overflow"), text, stage.overflow)
    if stage.pack_length is not None:
        if stage.pack_length < stage.max_length:
            text = f"at least max_length ({stage.max_length}), or an example fits in no pack"
            document.problem((*keys, "pack_length"), text, stage.pack_length)
        elif not stage.packing and stage.pack_length != stage.max_length:
            document.notice((*keys, "pack_length"), "has no effect without packing")
    if stage.learning_rate == 0:
        document.notice((*keys, "learning_rate"), "0: this stage changes nothing")
    _check_schedule(document, (*keys, "schedule"), stage)
    _check_optimizer(document, (*keys, "optimizer"), stage.optimizer)
    _check_precision(document, keys, stage)
    record = stage.guard.quarantine
    if record is not None and not _is_file(folder, record):
        text = f"quarantine.jsonl of a run ({_no_such_file(folder, record)})"
        document.problem((*keys, "guard", "quarantine"), text, record)
    updates = stage.max_updates
    if stage.ema is not None and updates is not None and stage.ema.start_after >= updates:
        text = f"fewer than max_updates ({updates}), or nothing is averaged"
        document.problem((*keys, "ema", "start_after"), text, stage.ema.start_after)


def _check_shares(document: Document, keys: Keys, shares: dict[str, float]) -> None:
    total = sum(shares.values())
    if not shares or abs(total - 1) <= SHARES_TOLERANCE:
        return
    problems = [problem.where for problem in document.problems]
    if str(document.place(keys)) in problems or any(
        str(document.place((*keys, name))) in problems for name in shares
    ):
        return
    fixed = ", ".join(f"{name}: {share / total:.4g}" for name, share in shares.items())
    document.problem(keys, f"shares that sum to 1; these sum to {total:g} (say {{{fixed}}})")


def _check_schedule(document: Document, keys: Keys, stage: Stage) -> None:
    schedule, updates = stage.schedule, stage.max_updates
    for key, kinds in SCHEDULE_KEYS.items():
        unused = schedule.kind not in kinds and getattr(schedule, key) != getattr(Schedule(), key)
        if unused:
            only = " and ".join(kinds) if key != "final" else "a decay"
            document.notice((*keys, key), f"has no effect with {schedule.kind}, only with {only}")
    if schedule.initial and schedule.warmup == 0:
        document.notice((*keys, "initial"), "has no effect without a warmup")
    if schedule.kind == "infinite":
        for key in ("warmup", "cooldown"):
            if key in schedule.model_fields_set and 0 < getattr(schedule, key) < 1:
                text = "a number of updates, or 0: an infinite run has no shares"
                document.problem((*keys, key), text, getattr(schedule, key))
        return
    decay = schedule.decay if schedule.kind == "wsd" else 0.0
    if max(schedule.warmup, decay) < 1 < schedule.warmup + decay:
        text = f"warmup + decay of at most 1 (they sum to {schedule.warmup + decay:g})"
        document.problem((*keys, "decay"), text, decay)
    elif updates is not None:
        counts = {"warmup": schedule.warmup, "decay": decay}
        counts = {key: value for key, value in counts.items() if value >= 1}
        alone = [key for key, value in counts.items() if value > updates]
        for key in alone:
            text = f"at most max_updates ({updates})"
            document.problem((*keys, key), text, counts[key])
        if not alone and sum(counts.values()) > updates:
            text = f"warmup and decay together within max_updates ({updates})"
            document.problem((*keys, "decay"), text, sum(counts.values()))


def _check_precision(document: Document, keys: Keys, stage: Stage) -> None:
    precision, given = stage.precision, stage.model_fields_set
    for key, owner in PRECISION_KEYS.items():
        if getattr(stage, key) not in (None, False) and precision != owner:
            text = f"precision: {owner} with it, not {precision}"
            document.problem((*keys, key), text, _short(getattr(stage, key)))
    if stage.fp8 is not None and stage.fp8.scaling != "delayed":
        for key in ("window", "margin"):
            if getattr(stage.fp8, key) != getattr(Float8(), key):
                text = f"has no effect with {stage.fp8.scaling} scaling, only with delayed"
                document.notice((*keys, "fp8", key), text)
    scale = stage.loss_scale
    if precision == "fp16" and "loss_scale" in given and scale is None:
        text = (
            "a loss scale: without one, gradients below 2^-24 become 0 in fp16. Leave the key out "
            "for the default, or say precision: bf16 or fp32"
        )
        document.problem((*keys, "loss_scale"), text)
    elif scale is not None and not (
        scale.floor <= scale.init
        and (scale.init <= scale.ceiling or "ceiling" not in scale.model_fields_set)
    ):
        text = f"floor <= init <= ceiling ({scale.floor:g}, {scale.init:g}, {scale.ceiling:g})"
        document.problem((*keys, "loss_scale", "init"), text, scale.init)
    if precision == "fp8" and stage.kind == "preference":
        text = (
            "bf16 or fp32: a preference stage compares with its reference to a hundredth of a nat, "
            "and FP8's rounding is of that size"
        )
        document.problem((*keys, "precision"), text, precision)
    if precision == "pure_bf16" and stage.ema is not None:
        text = "none with pure_bf16: an average kept in bf16 stops moving; or precision: bf16"
        document.problem((*keys, "ema"), text, stage.ema.decay)


def _short(value: object) -> object:
    return value if isinstance(value, bool) else None


def _check_optimizer(document: Document, keys: Keys, optimizer: Optimizer) -> None:
    kind, given = optimizer.kind, optimizer.model_fields_set
    for key, kinds in OPTIMIZER_KEYS.items():
        if kind in kinds or getattr(optimizer, key) == getattr(Optimizer(), key):
            continue
        only = " or ".join(kinds)
        if key in ("betas", "eps"):
            document.notice((*keys, key), f"has no effect with {kind}")
        else:
            document.problem((*keys, key), f"{only} with it, not {kind}", getattr(optimizer, key))
    none_given = optimizer.momentum is None and kind == "sgd"
    if kind in ("sgd", "muon") and optimizer.nesterov and (none_given or optimizer.momentum == 0):
        document.problem((*keys, "nesterov"), "a momentum above 0 with it, or false", True)
    if optimizer.beta2_half_life_tokens is not None and "betas" in given:
        document.notice((*keys, "betas", 1), "has no effect: beta2_half_life_tokens decides it")
    if kind == "adam":
        decays: dict[Keys, float | None] = {("weight_decay",): optimizer.weight_decay}
        for index, group in enumerate(optimizer.groups):
            decays["groups", index, "weight_decay"] = group.weight_decay
        text = "0: adam has no decay; say adamw (decoupled) or adam_l2 (in the gradient)"
        for inner, decay in decays.items():
            if decay:
                document.problem((*keys, *inner), text, decay)


def improve_keys(parts: Parts) -> set[str]:
    """What `gates.improve` may be keyed by: kind, name or number of a stage."""
    keys = {str(index) for index in range(len(parts.stages))}
    for stage in parts.stages:
        if stage is not None:
            keys |= {stage.kind} | ({stage.name} if stage.name else set())
    return keys


def _kinds_of(key: str, parts: Parts) -> set[str]:
    if key in IMPROVE_MEASURES:
        return {key}
    if key.isdigit() and int(key) < len(parts.stages):
        stage = parts.stages[int(key)]
        return set() if stage is None else {stage.kind}
    return {stage.kind for stage in parts.stages if stage is not None and stage.name == key}


def _check_gates(document: Document, parts: Parts) -> None:
    if parts.gates is None:
        return
    for key, text in parts.gates.improve.items():
        _check_improve(document, parts, key, text)
    for measure in parts.gates.protect or {}:
        if measure not in PROTECT_MEASURES:
            near = did_you_mean(measure, PROTECT_MEASURES)
            expected = f"a harm that can be limited: {', '.join(PROTECT_MEASURES)}{near}"
            document.problem(("gates", "protect", measure), expected, measure)


def _check_improve(document: Document, parts: Parts, key: str, text: str) -> None:
    keys: Keys = ("gates", "improve", key)
    if key not in IMPROVE_MEASURES and key not in improve_keys(parts):
        if None not in parts.stages:
            names = [*IMPROVE_MEASURES, *sorted(improve_keys(parts) - set(IMPROVE_MEASURES))]
            expected = f"a stage: {', '.join(names)}{did_you_mean(key, names)}"
            document.problem(keys, expected, key)
        return
    if key in IMPROVE_MEASURES and key not in improve_keys(parts) and None not in parts.stages:
        document.notice(keys, f"has no effect: there is no {key} stage")
    source, dot, measure = text.rpartition(".")
    kinds = _kinds_of(key, parts)
    known = sorted({m for kind in kinds for m in IMPROVE_MEASURES[kind]})
    if not dot:
        document.problem(keys, f"source.measure, as in {text}.{(known or ['loss'])[0]}", text)
        return
    if source not in parts.sources:
        have = ", ".join(parts.sources) or "none are named in data"
        near = did_you_mean(source, parts.sources)
        document.problem(keys, f"a source of data ({have}){near}", text)
    elif (found := parts.sources[source]) is not None and found.holdout == 0:
        document.problem(keys, f"a source with held-out rows; {source} has holdout: 0", text)
    if known and measure not in known:
        allowed, of = " or ".join(known), " and ".join(sorted(kinds))
        near = did_you_mean(measure, known)
        expected = f"{allowed} after the dot: what can improve in {of}{near}"
        document.problem(keys, expected, text)


def _used(parts: Parts) -> Iterator[str]:
    for stage in parts.stages:
        if stage is not None:
            yield from (*stage.data, *stage.keep.replay)
    if parts.gates is not None:
        yield from (text.rpartition(".")[0] for text in parts.gates.improve.values())


def _notice_unused(document: Document, parts: Parts) -> None:
    used = set(_used(parts))
    if None in parts.stages:
        return
    for name in parts.sources:
        if name not in used:
            document.notice(("data", name), "is used by no stage and no gate")
