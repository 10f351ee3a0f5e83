"""strategy.md: what a run will do and why, in plain words, for this model, data and machine.

Every number comes from the plan; where the plan does not say, the sentence is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lehr.report.reading import items, mapping, number, objects, text
from lehr.report.wording import change, count, duration, gate_name, plain, plural, size

PURPOSES = {
    "pretrain": "reads plain text and learns to continue it: knowledge, language and style, not "
    "how to behave when asked",
    "sft": "shows answers to imitate: the form of an answer, when to stop, what to refuse; it "
    "teaches a habit, and little knowledge that the model did not have",
    "preference": "shows two answers and which is better: it sharpens a choice between things the "
    "model already says, and cannot teach what neither answer holds",
}
LIMITS = {
    "pretrain": "It will not follow instructions better for having read text.",
    "sft": "Facts that stand only in a few answers are recited, not understood; trained on "
    "without being known, they teach guessing.",
    "preference": "Where the two answers differ in length or tone only, length or tone is what "
    "is learnt.",
}


def write_strategy(plan: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """strategy.md as Markdown, at most two pages.

    plan    plan.json; its optional `data` is a list of data accountings by source
    recipe  the resolved recipe as plain values
    """
    stages = _stages(plan, recipe)
    sections = [
        _summary(plan, recipe, stages),
        _parent(plan, recipe),
        _section("What each stage is for", _purposes(stages)),
        _section("What this data will and will not teach", _data(plan, recipe, stages)),
        _section("Why these methods", _methods(plan, recipe, stages)),
        _section("What can be forgotten, and what protects it", _forgetting(plan, recipe, stages)),
        _section("How the result is judged, and why not by loss", _judging(plan, recipe)),
        _section("What tokenizer and length cost", _lengths(plan, recipe, stages)),
        _section(
            "Look at these first", [f"- {text(note)}" for note in items(plan.get("findings"))]
        ),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _notes(plan: Mapping[str, Any]) -> list[Any]:
    return items(plan.get("findings"))[:20]


def _section(title: str, lines: list[str]) -> str:
    kept = [line for line in lines if line]
    return f"## {title}\n\n" + "\n".join(kept) if kept else ""


def _stages(plan: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each stage of the recipe joined with its plan; accepts `{kind: ...}` and `{sft: {...}}`."""
    planned = objects(plan.get("stages"))
    described = []
    for entry in objects(recipe.get("stages")):
        if "kind" in entry:
            described.append(dict(entry))
        elif len(entry) == 1:
            kind, values = next(iter(entry.items()))
            described.append({"kind": kind, **mapping(values)})
    while len(described) < len(planned):
        described.append({})
    joined = []
    for index, stage in enumerate(described):
        more = planned[index] if index < len(planned) else {}
        known = {key: value for key, value in more.items() if value is not None}
        if isinstance(stage.get("data"), Mapping):
            known.pop("data", None)  # the recipe has the shares as well
        joined.append({**stage, **known})
    return joined


def _name(stage: Mapping[str, Any]) -> str:
    return text(stage.get("name")) or text(stage.get("kind")) or "stage"


def _sources(stage: Mapping[str, Any]) -> dict[str, float]:
    data = stage.get("data")
    if isinstance(data, Mapping):
        return {text(name): number(share) or 0.0 for name, share in data.items()}
    names = data if isinstance(data, list) else [data] if isinstance(data, str) else []
    return {text(name): 1.0 / len(names) for name in names}


def _summary(
    plan: Mapping[str, Any], recipe: Mapping[str, Any], stages: list[dict[str, Any]]
) -> str:
    model, machine = mapping(plan.get("model")), mapping(plan.get("machine"))
    name = text(model.get("name")) or text(recipe.get("model")) or "the model"
    seconds = sum(number(stage.get("seconds")) or 0.0 for stage in stages)
    peaks: list[float] = [
        number(mapping(stage.get("memory")).get("peak")) or 0.0 for stage in stages
    ]
    words = [f"# Strategy for {name}", ""]
    parts = [f"{plural(len(stages), 'stage')} of training"]
    if seconds:
        parts.append(f"about {duration(seconds)}")
    peak = max(peaks, default=0.0)
    if peak:
        parts.append(f"at most {size(peak)} of live memory")
    where = text(machine.get("accelerator")) or text(machine.get("cpu"))
    place = f" on {where}" if where else ""
    if number(machine.get("cores")):
        place += f" ({plural(int(number(machine.get('cores')) or 0), 'core')}"
        memory = number(machine.get("memory_gib"))
        place += f", {memory:.0f} GiB)" if memory else ")"
    words.append(f"{', '.join(parts)}{place}. Nothing has been trained yet.")
    return "\n".join(words)


def _parent(plan: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    model = mapping(plan.get("model"))
    name = text(model.get("name")) or text(recipe.get("model"))
    facts = []
    if number(model.get("parameters")):
        facts.append(f"{count(model['parameters'])} parameters")
    if number(model.get("layers")):
        facts.append(f"{plain(model['layers'], 0)} layers")
    if number(model.get("vocabulary")):
        facts.append(f"a vocabulary of {count(model['vocabulary'])}")
    lines = [f"`{name}`: {', '.join(facts)}."] if facts else []
    if model.get("assistant") is True:
        lines.append(
            "**The parent is already an assistant.** It has habits of its own: how it greets, "
            "refuses and formats. Training moves them rather than adding to nothing, so every "
            "score below is read as a difference from it, and its template is kept."
        )
    elif name.startswith("tiny:"):
        lines.append(
            "It starts from random weights: whatever it will know, it learns from the data below."
        )
    elif model.get("assistant") is False:
        lines.append(
            "The parent continues text and is no assistant yet: it needs a template, and the "
            "tokens that end a turn have to be learnt first."
        )
    return _section("The model", lines)


def _purposes(stages: list[dict[str, Any]]) -> list[str]:
    lines = []
    seen: set[str] = set()
    for stage in stages:
        kind = text(stage.get("kind"))
        figures = []
        updates, tokens = number(stage.get("updates")), number(stage.get("tokens_per_update"))
        if updates:
            figures.append(plural(int(updates), "update"))
        if updates and tokens:
            figures.append(f"{count(updates * tokens)} tokens")
        if number(stage.get("seconds")):
            figures.append(duration(stage["seconds"]))
        sources = ", ".join(_sources(stage))
        fed = f", from {sources}" if sources else ""
        purpose = f"another {kind} stage" if kind in seen else PURPOSES.get(kind, "trains")
        seen.add(kind)
        sized = f" ({', '.join(figures)})" if figures else ""
        lines.append(f"- **{_name(stage)}**{fed}{sized}: {purpose}.")
    return lines


def _data(
    plan: Mapping[str, Any], recipe: Mapping[str, Any], stages: list[dict[str, Any]]
) -> list[str]:
    lines = []
    accounts = {text(entry.get("name")): entry for entry in objects(plan.get("data"))}
    for name, entry in accounts.items():
        dropped = sum(
            number(mapping(how).get("rows") if isinstance(how, Mapping) else how) or 0.0
            for how in mapping(entry.get("dropped")).values()
        )
        line = (
            f"- **{name}**: {count(entry.get('kept'))} of {count(entry.get('rows'))} rows train, "
            f"{count(entry.get('heldout'))} are held out, {count(dropped)} dropped"
        )
        tokens, trained = number(entry.get("tokens")), number(entry.get("supervised_tokens"))
        if tokens and trained is not None:
            line += f"; {count(trained)} of {count(tokens)} tokens ({trained / tokens:.0%}) teach"
            unshared = number(entry.get("unshared_tokens")) or 0.0
            if unshared > tokens:
                line += f" (with a prompt for each answer they would be {count(unshared)})"
        lines.append(line + ".")
    for kind in dict.fromkeys(text(stage.get("kind")) for stage in stages):
        if kind in LIMITS:
            lines.append(f"- {LIMITS[kind]}")
    lines.append("- What no row shows is not taught, however low the loss gets.")
    return lines


def _methods(
    plan: Mapping[str, Any], recipe: Mapping[str, Any], stages: list[dict[str, Any]]
) -> list[str]:
    lines = []
    model, adapter = mapping(plan.get("model")), mapping(recipe.get("adapter"))
    parameters = number(model.get("parameters"))
    four_bits = bool(model.get("four_bits"))
    for names, trained in _trained(stages, model):
        if not parameters:
            continue
        if trained < parameters:
            rank, name = plain(adapter.get("rank"), 0), "QLoRA" if four_bits else "LoRA"
            lines.append(
                f"- **{name}, rank {rank}** ({names}): {count(trained)} parameters train beside "
                f"{count(parameters)} frozen ones. Gradients and optimizer of the frozen ones, "
                f"{size(12.0 * parameters)}, are never needed, an update costs about two thirds "
                "of one through all weights, and the parent stays whole beside the adapter."
            )
        else:
            lines.append(
                f"- **All weights train** ({names}): gradients and AdamW's two moments of "
                f"{count(parameters)} parameters take {size(12.0 * parameters)} beside them."
            )
    if four_bits:
        way = (
            "dequantised at every token: slow" if model.get("decodes_in_place") else "a dense copy"
        )
        lines.append(
            f"- **The base in four bits** (NF4): {size(number(model.get('weight_bytes')) or 0.0)} "
            "of weights; a layer is dequantised while it multiplies, and nothing else. Parent and "
            f"reference are that rounded base. Evaluations decode from it by {way}."
        )
    precision = mapping(plan.get("precision"))
    if text(precision.get("value")):
        lines.append(f"- **{text(precision['value'])}**: {text(precision.get('why'))}.")
    lines += _memory(stages)
    lines += _recomputation(stages)
    if any(text(stage.get("kind")) == "preference" for stage in stages):
        lines.append(
            "- **DPO** compares with the state that its stage begins from; that reference is the "
            "same weights with the frozen adapter, so no second model is held."
        )
    return lines


def _trained(stages: list[dict[str, Any]], model: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(names of stages, parameters that they train), one entry for each number."""
    found: dict[float, list[str]] = {}
    for stage in stages:
        # A gradient is 4 bytes a trained parameter, whatever else the plan says.
        gradients = number(mapping(stage.get("memory")).get("gradients"))
        trained = gradients / 4 if gradients else number(model.get("trained"))
        if trained:
            found.setdefault(trained, []).append(_name(stage))
    return [(", ".join(names), trained) for trained, names in found.items()]


def _memory(stages: list[dict[str, Any]]) -> list[str]:
    """One line for all stages that need the same."""
    needs: dict[str, list[str]] = {}
    for stage in stages:
        parts = {
            text(name): number(amount) or 0.0
            for name, amount in mapping(stage.get("memory")).items()
            if name != "peak"
        }
        if sum(parts.values()):
            largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
            shown = ", ".join(f"{name} {size(amount)}" for name, amount in largest if amount)
            needs.setdefault(f"{size(sum(parts.values()))} ({shown})", []).append(_name(stage))
    return [f"- Memory of {', '.join(names)}: {need}." for need, names in needs.items()]


def _recomputation(stages: list[dict[str, Any]]) -> list[str]:
    """What the backward pass computes again, and what the other choices would cost."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        report = objects(stage.get("recompute_report"))
        if not report:
            continue
        chosen = mapping(stage.get("recompute"))
        name = f"budget {number(chosen.get('budget')):g}" if chosen else text(stage["recompute"])
        costs = []
        for line in report:
            added = number(line.get("share_added")) or 0.0
            price = f", {added:+.1%} operations" if added else ""
            costs.append(f"{text(line.get('choice'))} {size(line.get('kept_bytes'))}{price}")
        what = (
            f"**Recomputation: {name}**, {text(stage.get('recompute_why'))}. Kept for the "
            f"backward pass of a micro-batch: {'; '.join(costs)}. The gradient is the same."
        )
        missing = items(mapping(stage.get("recompute_operations")).get("uncovered"))
        if missing and name != "none":
            what += f" Computed again although it is a product: {plural(len(missing), 'matrix')}"
            what += f" ({text(missing[0])}, ...)."
        found.setdefault(what, []).append(_name(stage))
    return [f"- {', '.join(names)}: {what}" for what, names in found.items()]


def _forgetting(
    plan: Mapping[str, Any], recipe: Mapping[str, Any], stages: list[dict[str, Any]]
) -> list[str]:
    lines = []
    fresh = text(mapping(plan.get("model")).get("name")).startswith("tiny:")
    if fresh:
        lines.append("- The base knows nothing yet; a stage can forget what earlier ones taught.")
    else:
        lines.append(
            "- What the parent can do and the data does not show: other subjects, languages, "
            "formats, and when to refuse."
        )
    for stage in stages:
        replay = mapping(mapping(stage.get("keep")).get("replay"))
        shares = ", ".join(f"{number(share) or 0:.0%} {name}" for name, share in replay.items())
        rate = number(stage.get("learning_rate"))
        if shares:
            lines.append(f"- {_name(stage)} replays {shares} of its tokens.")
        elif rate and not (fresh and stage is stages[0]):
            lines.append(f"- {_name(stage)} replays nothing; its peak rate is {rate:g}.")
    protected = [gate for gate in objects(plan.get("gates")) if number(gate.get("limit"))]
    if protected:
        names = ", ".join(gate_name(gate) for gate in protected)
        lines.append(
            f"- Gates watch it after every stage: {names}. A stage that fails is not kept."
        )
    elif recipe.get("gates") == "none":
        lines.append("- **No gate protects anything**: the recipe switches them off.")
    return lines


def _judging(plan: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    lines = [
        "A falling loss says that the model agrees more with the rows, not that it answers "
        "better: it falls as well while a model learns to refuse everything. Each stage is "
        "compared with its parent and with the base on the same items; the whole interval has to "
        "lie inside the limit.",
        "",
    ]
    for gate in objects(plan.get("gates")):
        limit = number(gate.get("limit"))
        note = text(gate.get("note"))
        unit = text(gate.get("unit"))
        figures = []
        if limit:
            figures.append(f"limit {_amount(abs(limit), unit)}")
        else:
            figures.append("has to be better than the parent")
        if number(gate.get("resolves")):
            resolves = _amount(gate["resolves"], unit)
            figures.append(f"{plain(gate.get('n'), 0)} items resolve {resolves}")
        line = f"- **{gate_name(gate)}**: {', '.join(figures) or 'no figures'}"
        if gate.get("can_pass") is False:
            line += f". **Cannot pass**{': ' + note if note else ''}"
        lines.append(line + ".")
    return lines


def _amount(value: object, unit: str) -> str:
    return change(value, unit).lstrip("+") if unit else plain(value)


def _lengths(
    plan: Mapping[str, Any], recipe: Mapping[str, Any], stages: list[dict[str, Any]]
) -> list[str]:
    lines = []
    vocabulary = number(mapping(plan.get("model")).get("vocabulary"))
    if vocabulary:
        lines.append(
            f"- The output layer computes {count(vocabulary)} numbers for every token that is "
            "trained on (4 bytes each); only those tokens go through it, a chunk at a time."
        )
    limits: dict[int, list[str]] = {}
    for stage in stages:
        if longest := number(stage.get("max_length")):
            limits.setdefault(int(longest), []).append(_name(stage))
    for longest_tokens, names in limits.items():
        lines.append(
            f"- {', '.join(names)}: what is longer than {longest_tokens:,} tokens is cut or "
            "dropped."
        )
    for entry in objects(plan.get("data")):
        lost = number(entry.get("dropped_tokens"))
        if lost:
            lines.append(f"- {text(entry.get('name'))} loses {count(lost)} tokens to that limit.")
        tokens, characters = number(entry.get("tokens")), number(entry.get("characters"))
        if tokens and characters:
            lines.append(
                f"- {text(entry.get('name'))}: {characters / tokens:.1f} characters a token."
            )
    return lines
