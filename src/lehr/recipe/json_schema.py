"""JSON Schema of the recipe file, for completion and checks in editors.

`python -m lehr.recipe.json_schema docs/recipe.schema.json` writes it anew; a test
holds the file to this module. Keys of other tools are accepted by `load_recipe`, but
are no part of it: an editor should offer our own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lehr.recipe.schema import PROTECT_MEASURES, STAGE_CLASSES, Recipe

TEXT = {"type": "string"}


def json_schema() -> dict[str, Any]:
    """The schema of a recipe as it is written: with short forms, stages keyed by kind."""
    schema = Recipe.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    properties: dict[str, Any] = schema["properties"]
    for model in STAGE_CLASSES.values():
        _as_written(definitions[model.__name__])
    properties["stages"] = {
        "type": "array",
        "minItems": 1,
        "description": "what is done to the model, in order",
        "items": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {kind: {"$ref": f"#/$defs/{model.__name__}"}},
                    "required": [kind],
                    "additionalProperties": False,
                }
                for kind, model in STAGE_CLASSES.items()
            ]
        },
    }
    source = {"anyOf": [TEXT, _list_of(TEXT), {"$ref": "#/$defs/Source"}]}
    properties["data"]["additionalProperties"] = source
    properties["adapter"] = _or_word({"$ref": "#/$defs/Adapter"}, "lora", "qlora", "none")
    gates = definitions["Gates"]["properties"]
    limits = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "default"}]}
    harms = {"properties": dict.fromkeys(PROTECT_MEASURES, limits), "additionalProperties": False}
    gates["protect"] = {
        "description": gates["protect"]["description"].replace(" (null here)", ""),
        "anyOf": [{"const": "default"}, {"type": "object", **harms}],
    }
    properties["gates"] = _or_word({"$ref": "#/$defs/Gates"}, "default", "none")
    for key in ("suites", "export", "show"):
        whole = properties[key]
        properties[key] = {
            "description": whole.get("description", ""),
            "anyOf": [whole["items"], {"type": "array", "items": whole["items"]}],
        }
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lehr recipe",
        "description": "A run of lehr: a model, data, stages, gates and exports.",
    }
    return head | {key: _untitled(value) for key, value in schema.items() if key not in head}


def _untitled(node: Any) -> Any:
    """Without the titles that only repeat a key."""
    if isinstance(node, dict):
        return {k: _untitled(v) for k, v in node.items() if k != "title" or isinstance(v, dict)}
    return [_untitled(item) for item in node] if isinstance(node, list) else node


def _as_written(stage: dict[str, Any]) -> None:
    properties = stage["properties"]
    del properties["kind"]
    shares = properties["data"]
    shares.pop("title", None)
    description = shares.pop("description")
    properties["data"] = {
        "description": description,
        "anyOf": [TEXT, _list_of(TEXT), shares],
    }
    properties["schedule"] = _or_word(
        {"$ref": "#/$defs/Schedule"}, "cosine", "linear", "wsd", "constant", "infinite"
    )
    kinds = ("adamw", "adam", "adam_l2", "sgd", "muon")
    properties["optimizer"] = _or_word({"$ref": "#/$defs/Optimizer"}, *kinds)
    average = properties["ema"]
    average["anyOf"].insert(0, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1})
    properties["adapter"] = _or_word({"$ref": "#/$defs/Adapter"}, "lora", "qlora", "none")
    rate = properties["learning_rate"]
    rate["description"] = f"peak; {rate.pop('default'):g} for an adapter, else by the model"


def _or_word(reference: dict[str, Any], *words: str) -> dict[str, Any]:
    return {"anyOf": [{"enum": list(words)}, reference]}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def schema_text() -> str:
    """The text of docs/recipe.schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(schema_text(), encoding="utf-8")
