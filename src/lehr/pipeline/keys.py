"""Keys: what a state depends on. The same key is never trained twice."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from lehr.models.bitsandbytes import is_there
from lehr.recipe.hashing import template_part
from lehr.recipe.loading import stage_part
from lehr.streams import content_hash

# Raise it when a change of lehr's code changes the numbers of a stage.
STAGE_VERSION = 1


def versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    names = ["lehr", "torch", "transformers", "tokenizers", "peft"]
    names += ["bitsandbytes"] if is_there() else []
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


@lru_cache
def _version(name: str) -> str:
    return version(name)


def engines() -> list[str]:
    """Versions of what computes."""
    found = versions()
    return [found["torch"], found["transformers"]]


def in_four_bits(recipe: Any) -> bool:
    """Whether the run's base is held in NF4: for all stages, or for none."""
    return any((stage.adapter or recipe.adapter).kind == "qlora" for stage in recipe.stages)


def base_key(recipe: Any, model_fingerprint: str, encoder_fingerprint: str, precision: str) -> str:
    """Key of the model as it was loaded: what its scores and answers depend on."""
    parts = ["base", STAGE_VERSION, model_fingerprint, encoder_fingerprint, recipe.seed]
    if in_four_bits(recipe):
        parts += ["nf4", _version("bitsandbytes")]
    return content_hash([*parts, precision, engines()])[:20]


def origin_of(recipe: Any, prepared: Any) -> str:
    """What an export computes with beside the promoted state: base, template, date, seed.

    Versions of libraries do not count: an export of an older run is still checked.
    """
    parts = [prepared.fingerprint, template_part(recipe), recipe.system, recipe.date, recipe.seed]
    return content_hash(["origin", *parts])[:20]


def stage_key(
    recipe: Any, index: int, parent_key: str, encoder_fingerprint: str, precision: str
) -> str:
    """Key of what stage `index` produces: its recipe part, parent, data, template, versions."""
    parts = ["stage", STAGE_VERSION, stage_part(recipe, index), parent_key]
    return content_hash([*parts, encoder_fingerprint, precision, engines()])[:20]
