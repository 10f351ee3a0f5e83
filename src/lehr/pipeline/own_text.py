"""The base's own texts, by which forgetting is measured: written once, then read from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lehr.data.shapes import Example, Origin
from lehr.evaluation.forgetting import TEXT_TOKENS, TEXTS, own_texts
from lehr.pipeline.files import read_json, write_json
from lehr.pipeline.workbench import Workbench
from lehr.streams import content_hash


def texts_of_base(bench: Workbench, cache: Path) -> list[Example]:
    """What the base writes by itself; from `cache` where this very base wrote before."""
    key = content_hash(["own text", bench.base.key, TEXTS, TEXT_TOKENS])[:20]
    path = cache / f"own-text-{key}.json"
    known: Any = read_json(path)
    if isinstance(known, dict) and known.get("key") == key:
        return [
            Example("text", Origin("own text", "written by the base", number), text=text)
            for number, text in known["texts"]
        ]
    found = own_texts(bench.become(bench.base), bench.encoder, TEXTS, TEXT_TOKENS)
    rows = [[example.origin.line, example.text] for example in found]
    write_json(path, {"key": key, "texts": rows})
    return found
