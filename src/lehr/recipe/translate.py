"""One shape for every way of writing: short forms, other tools' keys, flat files.

After `normalise` the tree has the schema's shape: each stage a mapping with its kind,
each source a mapping, and no foreign key that is understood. What is left over is
unknown, and is refused by `validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lehr.recipe import aliases
from lehr.recipe.aliases import DROP, Alias, ForeignValueError
from lehr.recipe.fields import NOTHING, as_decay, as_number
from lehr.recipe.positions import Document, Keys
from lehr.recipe.schema import STAGE_CLASSES, Recipe, Stage
from lehr.recipe.suggestions import LATER_KINDS, did_you_mean, only_of_other_stages, plain

STAGE_KEYS = frozenset(name for model in STAGE_CLASSES.values() for name in model.model_fields)
TOP_KEYS = frozenset(Recipe.model_fields)
SHORT = {"adapter": "kind", "schedule": "kind", "optimizer": "kind"}
SHORT |= {"guard": "policy", "adaptive_clip": "kind"}


def normalise(document: Document) -> None:
    """Bring the tree into the schema's shape, in place."""
    expand_stages(document)
    if "stages" not in document.tree:
        _stage_from_flat(document)
    expand_short_forms(document)
    _move_stage_keys_down(document)
    translate_all(document)


def translate_all(document: Document) -> None:
    """Replace foreign keys everywhere they may stand."""
    _combine_four_bits(document, ())
    _translate(document, (), (("", aliases.TOP), ("adapter.", aliases.ADAPTER)))
    _translate(document, ("adapter",), (("", aliases.ADAPTER),))
    data = document.tree.get("data")
    for name in list(data) if isinstance(data, dict) else []:
        translate_source(document, ("data", name))
    stages = document.tree.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, dict):
            translate_stage(document, index)


def translate_source(document: Document, keys: Keys) -> None:
    """Replace foreign keys of one source."""
    _translate(document, keys, (("", aliases.SOURCE_ONLY), ("", aliases.SOURCE)))


def translate_stage(document: Document, index: int) -> None:
    """Replace foreign keys of one stage; keys of its sources wait in `wide`."""
    keys: Keys = ("stages", index)
    _combine_batch(document, keys)
    _combine_betas(document, keys)
    _combine_four_bits(document, keys)
    stage = document.get(keys)
    language = isinstance(stage, dict) and stage.get("kind") != "preference"
    if language and stage.get("loss_type") in ("nll", "chunked_nll"):
        document.notice((*keys, "loss_type"), "the loss of this stage; nothing to choose")
        document.remove((*keys, "loss_type"))
    _translate(document, keys, (("", aliases.STAGE), ("adapter.", aliases.ADAPTER)))
    _translate(document, (*keys, "adapter"), (("", aliases.ADAPTER),))


def expand_stages(document: Document) -> None:
    """`- sft: {...}` becomes {kind: sft, ...}; unknown kinds are refused here."""
    stages = document.tree.get("stages")
    if isinstance(stages, dict):  # a mapping of kinds keeps its order, and means a list
        document.tree["stages"] = [{kind: body} for kind, body in stages.items()]
        document.places |= {
            ("stages", i, *k[1:]): p
            for i, kind in enumerate(stages)
            for k, p in list(document.places.items())
            if k[:2] == ("stages", kind)
        }
    stages = document.tree.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        document.tree["stages"][index] = _one_stage(document, index, stage)


def _one_stage(document: Document, index: int, stage: Any) -> Any:
    keys: Keys = ("stages", index)
    if isinstance(stage, str):  # `- sft` alone: all defaults
        stage = {stage: None}
    if not isinstance(stage, dict):
        document.problem(keys, "a stage: its kind and its keys, as in `sft: {data: chats}`", stage)
        return None
    if "kind" not in stage and len(stage) != 1:
        bodies = [k for k, v in stage.items() if k in STAGE_CLASSES or plain(k) in LATER_KINDS]
        hint = "; indent the keys of a stage under its kind"
        if len(bodies) > 1:
            hint = f"; {' and '.join(bodies)} are two stages: begin each with a dash"
        document.problem(keys, f"one kind a stage, as in `sft: {{data: chats}}`{hint}", list(stage))
        return None
    if "kind" in stage:
        kind, body, inner = stage["kind"], stage, keys
    else:
        kind, body = next(iter(stage.items()))
        inner = (*keys, kind)
    known = _known_kind(document, inner, kind)
    if known is None:
        return None
    if body is None:
        body = {}
    if not isinstance(body, dict):
        document.problem(inner, f"the keys of a {known} stage, as in {{data: chats}}", body)
        return None
    for old, place in list(document.places.items()):
        if inner != keys and old[: len(inner)] == inner:
            document.places[keys + old[len(inner) :]] = place
    return {**body, "kind": known}


def _known_kind(document: Document, keys: Keys, kind: Any) -> str | None:
    word = plain(str(kind))
    if word in STAGE_CLASSES:
        return word
    if word in aliases.KINDS:
        document.notice(keys, f"{kind} is read as {aliases.KINDS[word]}")
        return aliases.KINDS[word]
    kinds = ", ".join(STAGE_CLASSES)
    if word in LATER_KINDS or word in ("rm", "kto", "orpo", "simpo", "ipo", "gkd"):
        document.problem(keys, f"one of {kinds}; {word} is not in this version")
    else:
        hint = did_you_mean(str(kind), [*STAGE_CLASSES, *LATER_KINDS])
        document.problem(keys, f"a kind of stage: {kinds}{hint}", kind)
    return None


def _stage_from_flat(document: Document) -> None:
    """A file of another tool has no stages: its training keys are one stage."""
    tree = document.tree
    marks = ("stage", "rl", *aliases.names_of("stage"))
    if not any(plain(key) in marks for key in tree):
        return
    word, said = "sft", None
    for key in ("stage", "rl"):
        if tree.get(key) not in (None, False):
            word, said = str(tree[key]), key
    kind = _known_kind(document, (said,), word) if said else word
    for key in ("stage", "rl"):
        tree.pop(key, None)
    if kind is None:
        tree["stages"] = []
        document.places[("stages",)] = document.place((said or "stages",))
        return
    tree["stages"] = [{"kind": kind}]
    for key in list(tree):
        if key in STAGE_KEYS - TOP_KEYS - {"kind"}:
            document.move((key,), ("stages", 0, key))
    reason = f"{said} says so" if said else "say `stages: [...]` for another kind"
    document.notice((), f"a file without stages is read as one {kind} stage ({reason})")


def _move_stage_keys_down(document: Document) -> None:
    """Another tool's training key at the top belongs to the stage, where there is only one."""
    stages = document.tree.get("stages")
    foreign = set(aliases.names_of("stage")) | set(aliases.UNNEEDED)
    foreign -= set(aliases.names_of("recipe")) | set(aliases.SOURCE)
    if not isinstance(stages, list):
        return
    for key in [key for key in document.tree if key in foreign and key not in TOP_KEYS]:
        if key in aliases.UNNEEDED:
            continue
        target = aliases.names_of("stage")[key]
        if len(stages) != 1 or not isinstance(stages[0], dict):
            where = ", ".join(
                f"stages.{i}.{s.get('kind')}" for i, s in enumerate(stages) if isinstance(s, dict)
            )
            text = f"a key of the top level; {key} ({target} here) belongs in a stage: {where}"
            document.problem((key,), text, document.remove((key,)))
        elif key in stages[0]:
            _conflict(document, (key,), ("stages", 0, key))
        else:
            document.move((key,), ("stages", 0, key))


def expand_short_forms(document: Document) -> None:
    """`law: law.txt`, `adapter: none`, `schedule: linear`, `gates: none` become mappings."""
    tree = document.tree
    if isinstance(tree.get("adapter"), str):
        tree["adapter"] = {"kind": tree["adapter"]}
    if isinstance(tree.get("gates"), str):
        tree["gates"] = _gates_word(document, tree["gates"])
    if isinstance(tree.get("gates"), dict):
        _expand_gates(tree["gates"])
    if isinstance(tree.get("data"), dict):
        for name, source in tree["data"].items():
            tree["data"][name] = short_source(source)
    for index, stage in enumerate(tree["stages"] if isinstance(tree.get("stages"), list) else []):
        if isinstance(stage, dict):
            if "ema" in stage:
                stage["ema"] = as_decay(stage["ema"])
            for section, key in SHORT.items():
                if isinstance(stage.get(section), str):
                    stage[section] = {key: _foreign_word(section, stage[section])}
                    at: Keys = ("stages", index, section)
                    document.places.setdefault((*at, key), document.place(at))


def _foreign_word(section: str, word: str) -> str:
    """`optimizer: adamw_torch` and `schedule: warmup_stable_decay`, in our words."""
    table = {"optimizer": aliases.OPTIMIZERS, "schedule": aliases.SCHEDULES}.get(section, {})
    return table.get(word, word)


def short_source(source: Any) -> Any:
    """A path or a list of paths stands for a source of these files."""
    return {"path": source} if isinstance(source, str | list) else source


def _gates_word(document: Document, word: str) -> Any:
    if word in NOTHING:
        return {"improve": {}, "protect": {}}
    if word != "default":
        hint = "default, none, or a mapping with improve and protect"
        document.problem(("gates",), hint, word)
    return {}


def _expand_gates(gates: dict[str, Any]) -> None:
    """`none` leaves gates out: all of them, or the improve gate of one kind of stage."""
    for key in ("improve", "protect"):
        if gates.get(key) in NOTHING:
            gates[key] = {}
    if gates.get("improve", {}) in (None, "default"):
        del gates["improve"]
    if isinstance(gates.get("improve"), dict):
        improve = gates["improve"]
        gates["improve"] = {k: v for k, v in improve.items() if v is not None and v not in NOTHING}


def _translate(
    document: Document, keys: Keys, tables: tuple[tuple[str, Mapping[str, Alias]], ...]
) -> None:
    section = document.get(keys)
    if not isinstance(section, dict):
        return
    for key in list(section):
        for prefix, table in tables:
            if key in table and not _is_real(document, keys, key):
                _apply(document, (*keys, key), keys, prefix, table[key])
                break
        else:
            _unneeded(document, keys, key)


def _is_real(document: Document, keys: Keys, key: str) -> bool:
    if len(keys) == 2 and keys[0] == "stages":
        kind = document.get((*keys, "kind"))
        return key in STAGE_CLASSES.get(str(kind), Stage).model_fields
    return not keys and key in TOP_KEYS


def _unneeded(document: Document, keys: Keys, key: str) -> None:
    at_home = not keys or (len(keys) == 2 and keys[0] == "stages")
    if not at_home or _is_real(document, keys, key):
        return
    if key == "report_to":
        if document.get((*keys, key)) not in (None, [], "none", "None", ["none"]):
            document.problem((*keys, key), "none; trackers are not in this version")
        document.remove((*keys, key))
    elif key in aliases.UNNEEDED:
        document.notice((*keys, key), f"not needed: {aliases.UNNEEDED[key]}")
        document.remove((*keys, key))


def _apply(document: Document, old: Keys, section: Keys, prefix: str, alias: Alias) -> None:
    key, place = str(old[-1]), document.place(old)
    value = document.get(old)
    try:
        converted = alias.convert(value)
    except ForeignValueError as refusal:
        document.problem(old, str(refusal), value)
        document.remove(old)
        return
    document.remove(old)
    target = prefix + alias.target
    if converted is DROP:
        document.notices.append(f"{place}: {key}: {value} asks for nothing here")
        return
    new: Keys = (*section, *target.split("."))
    others = only_of_other_stages(str(new[-1]), document.get((*section, "kind")))
    if len(section) == 2 and section[0] == "stages" and others:
        document.problem(
            old, f"no {target}: {target} belongs to {' and '.join(others)} stages only", value
        )
        return
    holder = document.get(new[:-1])
    if holder is not None and not isinstance(holder, dict):
        return  # the section itself is wrong, and is reported as such
    if isinstance(holder, dict) and new[-1] in holder:
        if not same_value(holder[new[-1]], converted):
            _say_conflict(document, old, place, value, new)
        return
    document.put(new, converted, place)
    document.notices.append(f"{place}: {key} is read as {target}: {converted}")


def same_value(one: Any, other: Any) -> bool:
    """Equal, where "1e-4" equals 0.0001."""
    return bool(as_number(one) == as_number(other))


def _conflict(document: Document, old: Keys, new: Keys) -> None:
    value, place = document.get(old), document.place(old)
    document.remove(old)
    if not same_value(value, document.get(new)):
        _say_conflict(document, old, place, value, new)


def _say_conflict(document: Document, old: Keys, place: Any, value: Any, new: Keys) -> None:
    real = document.place(new)
    at = f"line {real.line}" if real.line else str(real)
    name = real.key.rsplit(".", 1)[-1]
    also = "" if name == new[-1] else f" as {name}"
    text = (
        f"one value: {document.shown(new)} is already given{also} ({at}: {document.get(new)!r}), "
        "and both keys mean the same"
    )
    document.problem(old, text, value)


def _combine_batch(document: Document, keys: Keys) -> None:
    """Examples of one device step x accumulation steps = examples of an update."""
    stage = document.get(keys)
    steps = [key for key in aliases.PER_STEP if key in stage]
    accumulation = [key for key in aliases.ACCUMULATION if key in stage]
    parts = [*steps, *accumulation]
    if not parts:
        return
    at = (*keys, parts[0])
    values = {key: stage[key] for key in parts}
    place = document.place(at)
    numbers = [as_number(value) for value in values.values()]
    before = len(document.problems)
    for key, number in zip(parts, numbers, strict=True):
        whole = isinstance(number, int) or (isinstance(number, float) and number.is_integer())
        if not whole or number < 1:
            document.problem((*keys, key), "a whole number, at least 1", values[key])
    if len(steps) > 1 or len(accumulation) > 1:
        document.problem(at, f"one of {', '.join(parts)}", list(values.values()))
    elif not steps and "batch_size" not in stage:
        text = "batch_size (examples of an update): accumulation alone does not say it"
        document.problem(at, text, stage[parts[0]])
    for key in parts:
        document.remove((*keys, key))
    if len(document.problems) > before or not steps:
        if not steps and "batch_size" in stage:
            said = f"batch_size {stage['batch_size']} counts the whole update"
            document.notices.append(f"{place}: not needed: {said}; micro_batch is found by itself")
        return
    product = int(numbers[0]) * (int(numbers[1]) if accumulation else 1)
    if "batch_size" in stage and not same_value(stage["batch_size"], product):
        _say_conflict(document, at, place, product, (*keys, "batch_size"))
    elif "batch_size" not in stage:
        document.put((*keys, "batch_size"), product, place)
        shown = " x ".join(f"{key} {value}" for key, value in values.items())
        document.notices.append(f"{place}: {shown} is read as batch_size: {product}")


def _combine_betas(document: Document, keys: Keys) -> None:
    stage = document.get(keys)
    given = {key: stage[key] for key in aliases.BETAS if key in stage}
    if not given:
        return
    at = (*keys, next(iter(given)))
    place, old = document.place(at), document.get((*keys, "optimizer", "betas"))
    pair = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.95)]
    for key in given:
        document.remove((*keys, key))
    if old is not None and [as_number(v) for v in old] != [as_number(v) for v in pair]:
        _say_conflict(document, at, place, pair, (*keys, "optimizer", "betas"))
    elif old is None and isinstance(stage.get("optimizer", {}), dict):
        document.put((*keys, "optimizer", "betas"), pair, place)
        document.notices.append(f"{place}: {', '.join(given)} is read as optimizer.betas: {pair}")


def _combine_four_bits(document: Document, keys: Keys) -> None:
    """`use_peft: true` beside `load_in_4bit: true`: one thing, and the second says which."""
    found = document.get(keys)
    given = found if isinstance(found, dict) else {}
    asked = [
        key
        for key, words in aliases.FOUR_BITS.items()
        if key in given and str(given[key]).strip().lower() in words
    ]
    for key, word in aliases.SAYS_LORA.items() if asked else ():
        if key in given and str(given[key]).strip().lower() == word:
            document.notice((*keys, key), f"{key} and {asked[0]} together are adapter.kind: qlora")
            document.remove((*keys, key))
