"""`--set a.b=c`: values of the command line over those of the file.

Precedence: a later `--set` over an earlier one, any `--set` over the file, the file
over the defaults. Each override that changes a value of the file is said in a notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from lehr.errors import Problem, RecipeError
from lehr.recipe.aliases import names_of
from lehr.recipe.positions import Document, Keys, Place, parse_value
from lehr.recipe.schema import STAGE_CLASSES, Stage
from lehr.recipe.suggestions import LATER_KINDS
from lehr.recipe.translate import (
    expand_short_forms,
    expand_stages,
    translate_all,
)

# One of the two says how long a stage is: an override of one takes the other's place.
RIVALS = {"epochs": "max_updates", "max_updates": "epochs"}


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Set every override in the tree; a bad one is a problem that names itself."""
    for text in overrides:
        place = Place(f"--set {text}", "")
        try:
            keys, value = _read(text)
            path = _resolve(document, keys)
        except RecipeError as error:
            document.problems += error.problems
            continue
        _set(document, path, value, place)


def _read(text: str) -> tuple[list[str], Any]:
    name, equals, value = text.partition("=")
    keys = [key.strip() for key in name.strip().split(".")]
    if not equals or not all(keys):
        expected = "a key path and a value, as in --set stages.0.sft.learning_rate=1e-4"
        raise RecipeError(Problem(f"--set {text}", expected))
    return keys, parse_value(value, f"--set {text}")


def _resolve(document: Document, keys: list[str]) -> Keys:
    """The path in the tree; stages go by number, name or kind."""
    shown = f"--set {'.'.join(keys)}"
    stages = document.tree.get("stages")
    stages = stages if isinstance(stages, list) else []
    if keys[0] not in names_of("recipe") and keys[0] in names_of("stage") and len(stages) == 1:
        keys = ["stages", "0", *keys]  # another tool's training key: the only stage's
    if keys[0] != "stages" or len(keys) == 1:
        return _with_indexes(document, tuple(keys), shown)
    index = _stage_index(stages, keys[1], shown)
    rest = keys[2:]
    if not isinstance(stages[index], dict):
        raise RecipeError(Problem(shown, f"a stage that can be read; number {index} can not"))
    kind = stages[index].get("kind")
    if rest and rest[0] in (*STAGE_CLASSES, *LATER_KINDS) and keys[1].isdigit():
        if rest[0] != kind:
            raise RecipeError(
                Problem(shown, f"stages.{index}.{kind}; stage {index} is of that kind")
            )
        rest = rest[1:]
    if not rest:
        raise RecipeError(Problem(shown, f"a key of the stage, as in stages.{index}.epochs=1"))
    return _with_indexes(document, ("stages", index, *rest), shown)


def _stage_index(stages: list[Any], word: str, shown: str) -> int:
    if word.isdigit() and int(word) < len(stages):
        return int(word)
    found = [
        index
        for index, stage in enumerate(stages)
        if isinstance(stage, dict) and word in (stage.get("kind"), stage.get("name"))
    ]
    names = ", ".join(
        f"{i} ({s.get('name') or s.get('kind')})"
        for i, s in enumerate(stages)
        if isinstance(s, dict)
    )
    if len(found) == 1:
        return found[0]
    if found:
        raise RecipeError(Problem(shown, f"one stage; {word} means {found}: use its number"))
    raise RecipeError(Problem(shown, f"a stage that exists: {names or 'there is none'}"))


def _with_indexes(document: Document, keys: Keys, shown: str) -> Keys:
    """Numbers index into lists of the file; a list must have the item."""
    path: Keys = ()
    for key in keys:
        holder = document.get(path)
        in_list = bool(path) and isinstance(document.get(path[:-1]), list)
        if isinstance(holder, str | int | float) or (holder is None and in_list):
            at = document.shown(path)
            raise RecipeError(Problem(shown, f"no key inside {at}, which is one value", holder))
        if isinstance(holder, list) and not isinstance(key, int):
            if not str(key).isdigit() or int(key) >= len(holder):
                expected = f"an item of a list of {len(holder)}, counted from 0"
                raise RecipeError(Problem(shown, expected, key))
            key = int(key)
        path = (*path, key)
    return path


def _set(document: Document, path: Keys, value: Any, place: Place) -> None:
    old, was = document.get(path), document.places.get(path)
    in_stage = len(path) > 2 and path[0] == "stages"
    key = path[-1]
    holder = document.get(path[:-1])
    if isinstance(holder, str):  # a short form: the mapping that it stands for
        expand_short_forms(document)
    section = "stage" if in_stage and len(path) == 3 else _section_of(path)
    target = names_of(section).get(str(key)) if section else None
    rival = RIVALS.get(str(target or key)) if in_stage else None
    if rival is not None and document.get((*path[:-1], rival)) is not None:
        document.notices.append(f"{place}: instead of {rival} in the file")
        document.remove((*path[:-1], rival))
    if target is not None:
        new = (*path[:-1], *target.split("."))
        if document.get(new) is not None:
            document.notices.append(
                f"{place}: replaces {document.get(new)} ({document.place(new)})"
            )
            document.remove(new)
    for known in [keys for keys in document.places if keys[: len(path)] == path]:
        del document.places[known]
    if value is None and in_stage and not _null_says_something(path):
        document.remove(path)  # the default again
    else:
        document.put(path, value, place)
    if path == ("stages",):
        expand_stages(document)
    expand_short_forms(document)
    translate_all(document)
    if old is not None and old != value:
        document.notices.append(f"{place}: replaces {old!r} ({was or document.name})")


def _null_says_something(path: Keys) -> bool:
    """True for a stage's key whose null is a value and not its default: `clip: null`."""
    field = Stage.model_fields.get(str(path[2])) if len(path) == 3 else None
    if field is None or field.default is None or field.default_factory is not None:
        return False
    return type(None) in get_args(field.annotation)


def _section_of(path: Keys) -> str | None:
    if len(path) == 1:
        return "recipe"
    if len(path) == 3 and path[0] == "data":
        return "source"
    return "adapter" if path[-2] == "adapter" else None
