"""Types, bounds and unknown keys, section by section, so that one mistake hides no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lehr.recipe.aliases import everywhere, names_of
from lehr.recipe.fields import Section, describe
from lehr.recipe.positions import Document, Keys
from lehr.recipe.schema import STAGE_CLASSES, Adapter, Gates, Recipe, Source, Stage
from lehr.recipe.suggestions import LATER_VALUES, closest, explain_unknown, plain

# Without these nothing sensible can be said about the rest of their section.
DECISIVE = {"kind", "model", "data", "path", "microworld", "builtin", "schedule", "optimizer"}
Model = TypeVar("Model", bound=Section)


@dataclass
class Parts:
    """The sections that are right by themselves, or are so without their wrong keys.

    None stands for one that is not: what its wrong keys mean to say decides the rest.
    """

    recipe: Recipe | None = None
    adapter: Adapter | None = None
    sources: dict[str, Source | None] = field(default_factory=dict)
    stages: list[Stage | None] = field(default_factory=list)
    gates: Gates | None = None


def validate(document: Document) -> Parts:
    """Every section by itself; problems go to the document."""
    tree = document.tree
    own = ("adapter", "data", "stages", "gates")
    header = {key: value for key, value in tree.items() if key not in own} | {"stages": []}
    parts = Parts(recipe=_check(document, (), Recipe, header))
    parts.adapter = _check(document, ("adapter",), Adapter, tree.get("adapter", {}))
    parts.gates = _check(document, ("gates",), Gates, tree.get("gates", {}))
    data = tree.get("data", {})
    if isinstance(data, dict):
        for name, source in data.items():
            parts.sources[name] = _check(document, ("data", name), Source, source)
    stages = tree.get("stages")
    if not isinstance(stages, list):
        expected = "a list of stages, as in [{sft: {data: chats}}]; the key is missing"
        if "stages" in tree:
            expected = "a list of stages, each beginning with a dash"
        document.problem(("stages",), expected, stages)
    elif not stages and ("stages",) in document.places and not document.problems:
        document.problem(("stages",), "at least one stage", stages)
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        parts.stages.append(_check_stage(document, index, stage))
    return parts


def _check_stage(document: Document, index: int, stage: Any) -> Stage | None:
    if not isinstance(stage, dict):
        return None  # reported where the stages were expanded
    kind = stage.get("kind")
    if not isinstance(kind, str) or kind not in STAGE_CLASSES:
        document.problem(("stages", index, "kind"), f"one of {', '.join(STAGE_CLASSES)}", kind)
        return None
    return _check(document, ("stages", index), STAGE_CLASSES[kind], stage)


def _check(document: Document, keys: Keys, model: type[Model], value: Any) -> Model | None:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
    for item in found:
        _report(document, keys, model, dict(item))
    wrong = {item["loc"][0] for item in found if item["loc"]}
    if not isinstance(value, dict) or not wrong or wrong & DECISIVE:
        return None
    try:  # what other keys say is still checked: one mistake hides no other
        return model.model_validate({key: v for key, v in value.items() if key not in wrong})
    except ValidationError:
        return None


def _report(document: Document, keys: Keys, model: type[Section], item: dict[str, Any]) -> None:
    location: Keys = tuple(item["loc"])
    kind, value = str(item["type"]), item["input"]
    if kind == "extra_forbidden":
        section, stage_kind = _section(document, keys, location[:-1])
        aliases = everywhere() | names_of(section)
        text = explain_unknown(str(location[-1]), section, aliases, stage_kind)
        document.problem((*keys, *location), text, _short(value))
        return
    depth, schema, definitions = locate(model, location)
    path = (*keys, *location[:depth])
    expected = describe(schema, definitions)
    if kind == "missing":
        name = str(location[-1])
        what = schema.get("description", expected)
        document.problem(path, f"{name}, which is missing: {what}")
        return
    if kind == "expected":
        expected = str(item["msg"])
    if kind == "finite_number":  # infinity is a number: say what is wrong with it
        expected = expected.replace("a number", "a finite number")
    whole = document.get(path) if document.get(path) is not None else value
    expected += _hint(document, path, kind, schema, definitions, whole)
    document.problem(path, expected, _short(whole))


def _hint(
    document: Document,
    path: Keys,
    kind: str,
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    value: Any,
) -> str:
    """What helps beyond the statement of what is allowed."""
    if value is None:
        return " (nothing is given)"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; quote it to make it text"
    later = LATER_VALUES.get(_schema_path(path), ())
    word = value if isinstance(value, str) else None
    for each in value if isinstance(value, list) else [word]:
        if isinstance(each, str) and plain(each) in later:
            return f"; {each} is not in this version"
    words = _words(schema, definitions)
    near = closest(value, words) if isinstance(value, str) and words else None
    return f"; did you mean {near}?" if near else ""


def _words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    """The words that a value may be, as far as the schema lists them."""
    if "anyOf" in schema:
        return [word for part in schema["anyOf"] for word in _words(part, definitions)]
    if "items" in schema and isinstance(schema["items"], Mapping):
        return _words(schema["items"], definitions)
    words = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [str(word) for word in words]


def _schema_path(path: Keys) -> str:
    """A path without names and numbers: stages.0.precision is stage.precision."""
    if len(path) > 1 and path[0] in ("stages", "data"):
        path = ("stage" if path[0] == "stages" else "source", *path[2:])
    return ".".join(str(key) for key in path if isinstance(key, str))


def _section(document: Document, keys: Keys, location: Keys) -> tuple[str, str | None]:
    """Id of the section at a path, and the kind of its stage."""
    path = (*keys, *location)
    if not path:
        return "recipe", None
    if path[0] in ("adapter", "gates"):
        return str(path[0]), None
    if path[0] == "data":
        return "source", None
    kind = document.get((*path[:2], "kind"))
    return (str(path[2]) if len(path) > 2 else "stage"), str(kind)


def locate(
    model: type[BaseModel], location: Keys
) -> tuple[int, Mapping[str, Any], Mapping[str, Any]]:
    """How far `location` names keys (and not branches of a union), and the schema there."""
    root = _schema_of(model)
    definitions: Mapping[str, Any] = root.get("$defs", {})
    schema: Mapping[str, Any] = root
    depth = 0
    for key in location:
        plain_schema = schema
        if "$ref" in schema:
            plain_schema = definitions[schema["$ref"].rsplit("/", 1)[-1]]
        options = [s for s in schema.get("anyOf", ()) if s.get("type") != "null"]
        if len(options) == 1:
            plain_schema = options[0]
            if "$ref" in plain_schema:
                plain_schema = definitions[plain_schema["$ref"].rsplit("/", 1)[-1]]
        inner = _inner(plain_schema, key)
        if inner is None:
            break
        schema, depth = inner, depth + 1
    return depth, schema, definitions


@lru_cache(maxsize=16)
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _inner(schema: Mapping[str, Any], key: str | int) -> Mapping[str, Any] | None:
    found: Any = None
    if isinstance(key, int) and "prefixItems" in schema and key < len(schema["prefixItems"]):
        found = schema["prefixItems"][key]
    elif isinstance(key, int):
        found = schema.get("items")
    elif "properties" in schema:
        found = schema["properties"].get(key)
    else:
        found = schema.get("additionalProperties")
    return found if isinstance(found, Mapping) else None


def _short(value: Any) -> Any:
    """A value as a message shows it: long ones are cut."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= 80:
        return value
    return text[:77] + "..."
