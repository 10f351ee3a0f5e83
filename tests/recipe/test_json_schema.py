"""docs/recipe.schema.json is current, and says what load_recipe accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lehr.recipe.json_schema import json_schema, schema_text
from lehr.recipe.schema import STAGE_CLASSES, Recipe

FILE = Path(__file__).parents[2] / "docs" / "recipe.schema.json"


def test_the_file_in_docs_is_current():
    assert FILE.read_text(encoding="utf-8") == schema_text(), (
        "write it anew: python -m lehr.recipe.json_schema docs/recipe.schema.json"
    )


def test_every_reference_resolves_and_every_section_is_closed():
    schema = json_schema()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/$defs/") in schema["$defs"]
            if "properties" in node and node.get("type") == "object":
                assert node["additionalProperties"] is False
            for item in node.values():
                walk(item)
        elif isinstance(node, list):
            for item in node:
                walk(item)

    walk(json.loads(json.dumps(schema)))


def test_the_keys_are_those_of_the_classes():
    schema = json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    for model in STAGE_CLASSES.values():
        keys = set(schema["$defs"][model.__name__]["properties"])
        assert keys == set(model.model_fields) - {"kind"}
    assert schema["required"] == ["model", "stages"]
