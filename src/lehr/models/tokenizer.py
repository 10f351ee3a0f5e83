"""A model's tokenizer without its weights, for looking at data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lehr.data.templates import control_tokens
from lehr.errors import Problem, RecipeError
from lehr.models import fetch as fetching
from lehr.models.loading import resolve_spec, template_source


def stop_ids_of(network: Any) -> frozenset[int]:
    """Ids that end generation, by the network's own generation config."""
    found = getattr(getattr(network, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def load_tokenizer(
    spec: str, template: str = "auto", folder: Path | None = None
) -> tuple[Any, frozenset[int]]:
    """(tokenizer with the template in use, stop ids) of the model that `spec` names.

    Raises RecipeError for a tiny model (its tokenizer is made from a recipe's data), and
    for what cannot be loaded.
    """
    from transformers import AutoTokenizer, GenerationConfig

    source = resolve_spec(spec, folder)
    if source.kind in ("tiny", "gguf"):
        expected = "a folder, a hub id or a known name: its tokenizer stands beside its weights"
        raise RecipeError(Problem("--model", expected, spec))
    where = str(source.path or spec)
    if source.kind == "known" and source.path is None:
        where = str(fetching.fetch(spec))
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        expected = f"a tokenizer that can be loaded ({reason})"
        raise RecipeError(Problem("--model", expected, spec)) from error
    if template != "auto":
        source_text = template_source(template, folder)
        tokenizer.add_special_tokens(
            {"additional_special_tokens": control_tokens(source_text)},
            replace_extra_special_tokens=False,
        )
        tokenizer.chat_template = source_text
    try:
        generation: Any = GenerationConfig.from_pretrained(where)
    except (OSError, ValueError):
        generation = None
    end = getattr(generation, "eos_token_id", None)
    stops = [] if end is None else [end] if isinstance(end, int) else list(end)
    return tokenizer, frozenset(stops)
