"""Text, a file or a dict to a Recipe, and back to text that reads as the same recipe.

    text -> tree with lines -> one shape -> overrides -> sources -> types -> checks -> defaults

Each step adds its problems to one list; all of them are raised together.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from lehr.errors import Problem, RecipeError
from lehr.recipe.checks import check, is_local_model
from lehr.recipe.fields import Section
from lehr.recipe.hashing import recipe_hash, stage_part
from lehr.recipe.overrides import apply_overrides
from lehr.recipe.positions import Document, parse, read_text
from lehr.recipe.resolve import improve_gate, resolve, resumed
from lehr.recipe.schema import Recipe, Source, Stage
from lehr.recipe.sources import resolve_sources
from lehr.recipe.translate import normalise
from lehr.recipe.validate import validate

__all__ = [
    "dump_recipe",
    "improve_gate",
    "load_recipe",
    "loads",
    "recipe_from",
    "recipe_hash",
    "recipe_notices",
    "resumed",
    "stage_part",
]


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), today: datetime.date | None = None
) -> Recipe:
    """The recipe of a file, with `--set` overrides on top.

    Raises RecipeError with every problem: file:line, key path, value, what was expected.
    """
    path = Path(path).expanduser()
    document = parse(read_text(path), str(path))
    recipe = _build(document, path.absolute().parent, overrides, today)
    recipe._name = path.stem
    return recipe


def loads(
    text: str,
    folder: Path | str = ".",
    overrides: Sequence[str] = (),
    name: str = "recipe",
    today: datetime.date | None = None,
) -> Recipe:
    """The recipe of a text; `folder` is where its relative paths start.

    >>> recipe = loads("model: tiny:1m\\nstages: [pretrain: {data: {path: pyproject.toml}}]")
    Traceback (most recent call last):
    ...
    lehr.errors.RecipeError: ...
    """
    return _build(parse(text, name), Path(folder).absolute(), overrides, today)


def recipe_from(
    value: Mapping[str, Any],
    folder: Path | str = ".",
    overrides: Sequence[str] = (),
    today: datetime.date | None = None,
) -> Recipe:
    """The recipe of a mapping with the keys of a recipe file."""
    tree = _plain(value, "recipe")
    if not isinstance(tree, dict):
        raise RecipeError(Problem("recipe", "a mapping with the keys model, data and stages"))
    return _build(Document("recipe", tree), Path(folder).absolute(), overrides, today)


def recipe_notices(recipe: Recipe) -> list[str]:
    """What was understood without being an error: aliases, overrides, keys without effect."""
    return list(recipe._notices)


def _build(
    document: Document,
    folder: Path,
    overrides: Sequence[str],
    today: datetime.date | None,
) -> Recipe:
    normalise(document)
    apply_overrides(document, overrides)
    resolve_sources(document, folder)
    parts = validate(document)
    if parts.recipe is not None:
        parts.recipe._folder = folder
    check(document, parts, folder)
    recipe = resolve(document, parts, today)
    if document.problems or recipe is None:
        raise RecipeError(_in_order(document.problems))
    recipe._folder = folder
    recipe._date_was_auto = parts.recipe is not None and parts.recipe.date == "auto"
    recipe._notices = tuple(document.notices)
    return recipe


def _in_order(problems: Sequence[Problem]) -> list[Problem]:
    """By line, as a reader goes through the file; overrides and the rest stay at the end."""

    def line(problem: Problem) -> tuple[int, int]:
        head = problem.where.split(" ", 1)[0]
        number = next((part for part in head.split(":")[1:] if part.isdigit()), None)
        return (1, 0) if number is None else (0, int(number))

    return sorted(problems, key=line)


def _plain(value: Any, where: str) -> Any:
    """Python values as YAML would give them; the caller's objects stay untouched."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where} {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RecipeError(Problem(where, "text, a number, a list or a mapping", value))


def dump_recipe(recipe: Recipe, folder: Path | str | None = None) -> str:
    """YAML of the resolved recipe, which reads back to the same hash.

    Paths are written from `folder`, where the text will be saved; absolute without it.
    """
    from ruamel.yaml import YAML

    base = None if folder is None else Path(folder).absolute()

    def moved(text: str) -> str:
        path = recipe.path_of(text)
        return str(path) if base is None else os.path.relpath(path, base)

    value = recipe.model_dump(mode="json")
    local = is_local_model(recipe.model) or recipe.path_of(recipe.model).exists()
    if local:
        value["model"] = _as_path(moved(recipe.model))
    if recipe.template not in ("auto", "chatml"):
        value["template"] = moved(recipe.template)
    if recipe.output is not None:
        value["output"] = moved(recipe.output)
    for source in value["data"].values():
        path = source["path"]
        if path is not None:
            source["path"] = moved(path) if isinstance(path, str) else [moved(p) for p in path]
    for stage in value["stages"]:
        if (record := stage.get("guard", {}).get("quarantine")) is not None:
            stage["guard"]["quarantine"] = moved(record)
    protect = value["gates"]["protect"]
    value["gates"]["protect"] = _default_words(protect)
    value["data"] = {name: _without_nulls(source, Source) for name, source in value["data"].items()}
    value["stages"] = [
        {stage.pop("kind"): _without_nulls(stage, Stage)} for stage in value["stages"]
    ]
    stream = StringIO()
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = None
    writer.sort_base_mapping_type_on_output = False
    writer.allow_unicode = True
    writer.width = 100
    writer.dump(value, stream)
    return stream.getvalue()


def _as_path(text: str) -> str:
    return text if is_local_model(text) else f"./{text}"


def _default_words(protect: dict[str, float | None] | None) -> Any:
    if protect is None:
        return "default"
    return {name: "default" if limit is None else limit for name, limit in protect.items()}


def _without_nulls(section: dict[str, Any], model: type[Section]) -> dict[str, Any]:
    """Without the keys whose null is the default and says nothing."""
    fields = model.model_fields
    return {
        key: value
        for key, value in section.items()
        if value is not None or key not in fields or fields[key].default is not None
    }
