"""What an unknown key was probably meant to be, and where it belongs.

The order matters: a key that exists elsewhere is misplaced, not misspelt; only then
are spellings compared.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import get_args

from pydantic import BaseModel

from lehr.recipe.schema import (
    STAGE_CLASSES,
    Adapter,
    Gates,
    Recipe,
    Source,
    Stage,
)


def _nested(models: Iterable[type[BaseModel]]) -> dict[str, tuple[str, type[BaseModel]]]:
    """The sections that stages alone have as values of their keys, by that key."""
    found: dict[str, tuple[str, type[BaseModel]]] = {}
    for model in models:
        for name, field in model.model_fields.items():
            for kind in (field.annotation, *get_args(field.annotation)):
                kind = next(iter(get_args(kind)), kind)
                if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not Adapter:
                    found[name] = (f"{name} (of a stage)", kind)
    return found


# Sections by id: what a message calls them, and their keys' home.
SECTIONS: Mapping[str, tuple[str, type[BaseModel]]] = {
    "recipe": ("the top level", Recipe),
    "adapter": ("adapter", Adapter),
    "source": ("a source in data", Source),
    "stage": ("a stage", Stage),
    "gates": ("gates", Gates),
    **_nested(STAGE_CLASSES.values()),
}

# Keys of the design that this version does not have, by section, and what is there instead.
LATER: Mapping[str, dict[str, str]] = {
    "stage": dict.fromkeys(
        (
            "teacher",
            "temperature",
            "top_k",
            "num_generations",
            "group_size",
            "reward",
            "reward_model",
            "neftune_noise_alpha",
            "kl",
            "gamma",
            "simpo_gamma",
            "weights",
        ),
        "",
    ),
    "keep": dict.fromkeys(("kl", "interpolate", "l2_to_parent"), "replay is there"),
    "adapter": dict.fromkeys(("init", "rslora", "dora", "quantisation", "rows"), ""),
    "recipe": dict.fromkeys(("judge", "teacher", "deepspeed", "fsdp", "trackers"), ""),
    "gates": dict.fromkeys(("judge",), ""),
}
LATER_KINDS = ("reward", "ppo", "grpo", "distill", "recalibrate")
# Words of the design that this version does not have, by dotted key path of the schema.
LATER_VALUES: Mapping[str, tuple[str, ...]] = {
    "stage.loss": (
        *("ipo", "kto", "orpo", "simpo", "cpo", "hinge", "robust", "apo_zero", "apo_down"),
        *("sppo_hard", "nca_pair", "exo_pair", "bco_pair", "discopop", "sigmoid_norm"),
    ),
    "stage.optimizer.kind": ("lion", "adafactor", "adamw_8bit", "schedule_free"),
    "export": ("gguf",),
}


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` most resembles, or None where nothing is near.

    >>> closest("learning_rte", ["learning_rate", "epochs"])
    'learning_rate'
    """
    by_plain = {plain(candidate): candidate for candidate in candidates}
    if plain(word) in by_plain:
        return by_plain[plain(word)]
    # In a short word one exchange of letters already costs a third of the likeness.
    cutoff = 0.6 if len(word) <= 4 else 0.7
    near = difflib.get_close_matches(plain(word), by_plain, n=1, cutoff=cutoff)
    return by_plain[near[0]] if near else None


def plain(word: str) -> str:
    """A key without the differences that people do not see.

    >>> plain("Learning-Rate") == plain("learning_rate")
    True
    """
    return word.lower().replace("-", "_").replace(" ", "_")


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    near = closest(word, candidates)
    return f"; did you mean {near}?" if near else ""


def only_of_other_stages(key: str, kind: str | None) -> list[str]:
    """Stage kinds that have `key`, where `kind` does not.

    >>> only_of_other_stages("beta", "sft")
    ['preference']
    """
    if key in STAGE_CLASSES.get(str(kind), Stage).model_fields:
        return []
    return [other for other, model in STAGE_CLASSES.items() if key in model.model_fields]


def explain_unknown(
    key: str, section: str, aliases: Mapping[str, str], kind: str | None = None
) -> str:
    """What to write instead of an unknown key.

    section: id of the section where it stands
    aliases: spelling of another tool -> where it goes
    kind:    of the stage, for keys that other kinds have
    """
    shown, model = SECTIONS[section]
    if section == "stage":
        shown, model = (
            f"{'an' if kind == 'sft' else 'a'} {kind} stage",
            STAGE_CLASSES.get(str(kind), Stage),
        )
    here = [name for name in model.model_fields if name != "kind"]
    exact = plain(key)
    if exact in here:
        return f"a known key; did you mean {exact}?"
    later = LATER.get(section, {}) | (LATER["stage"] if section == "recipe" else {})
    if exact in later:
        instead = later[exact]
        return f"no {exact}: it is not in this version" + (f"; {instead}" if instead else "")
    if home := _home(exact, section, kind):
        return f"a key of {shown}; {exact} belongs in {home}"
    if exact in aliases:
        return f"a key of {shown}; {exact} means {aliases[exact]}"
    if near := closest(key, here):
        return f"a key of {shown}; did you mean {near}?"
    if near := closest(key, aliases):
        return f"a key of {shown}; did you mean {near}, which means {aliases[near]}?"
    for other, (name, fields) in SECTIONS.items():
        if other != section and (near := closest(key, fields.model_fields)):
            return f"a key of {shown}; did you mean {near}, which belongs in {name}?"
    return f"a key of {shown}: {', '.join(here)}"


def _home(key: str, section: str, kind: str | None) -> str | None:
    """Where a key that is right somewhere else belongs."""
    if key == "kind":
        return None
    homes = [
        name
        for other, (name, model) in SECTIONS.items()
        if other != section and key in model.model_fields
    ]
    others = only_of_other_stages(key, kind)
    if 0 < len(others) < len(STAGE_CLASSES) and not any("stage" in home for home in homes):
        homes.append(f"{' and '.join(others)} stages only")
    return " or ".join(homes) or None
