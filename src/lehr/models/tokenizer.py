"""A model's tokenizer without its weights, for looking at data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lehr.data.templates import control_tokens
from lehr.errors import Problem, RecipeError
from lehr.models import fetch as fetching
from lehr.models.loading import resolve_spec, template_source

GENERATION_CONFIG = "generation_config.json"


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
    from transformers import AutoConfig, AutoTokenizer

    source = resolve_spec(spec, folder)
    if source.kind in ("tiny", "gguf"):
        expected = "a folder, a hub id or a known name: its tokenizer stands beside its weights"
        raise RecipeError(Problem("--model", expected, spec))
    where = str(source.path or spec)
    if source.kind == "known" and source.path is None:
        where = str(fetching.fetch(spec))
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        rows = embedding_rows(AutoConfig.from_pretrained(where))
    except Exception as error:  # a damaged file can raise anything in the libraries that read it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        expected = f"a config and a tokenizer that can be loaded ({reason})"
        raise RecipeError(Problem("--model", expected, spec)) from error
    require_rows(tokenizer, rows, spec)
    if template != "auto":
        source_text = template_source(template, folder)
        tokenizer.add_special_tokens(
            {"additional_special_tokens": control_tokens(source_text)},
            replace_extra_special_tokens=False,
        )
        tokenizer.chat_template = source_text
    return tokenizer, _stop_ids(where, spec)


def embedding_rows(config: Any) -> int | None:
    """Rows of the embedding by a model's config, or None where it does not say."""
    rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def require_rows(tokenizer: Any, rows: int | None, name: str) -> None:
    """Raise RecipeError where the tokenizer has ids for which the embedding has no row."""
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if rows is None or highest < rows:
        return
    expected = (
        f"a model whose embedding has a row for every id of its tokenizer: the highest id is "
        f"{highest:,}, and there are {rows:,} rows; its tokenizer belongs to another model"
    )
    raise RecipeError(Problem("model", expected, name))


def _stop_ids(where: str, spec: str) -> frozenset[int]:
    """Ids that end generation by the folder's generation config, where there is one."""
    from transformers import GenerationConfig

    try:
        generation: Any = GenerationConfig.from_pretrained(where)
    except Exception as error:  # of whatever kind: the file is the user's
        if isinstance(error, OSError) and not (Path(where) / GENERATION_CONFIG).exists():
            return frozenset()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        expected = f"a {GENERATION_CONFIG} that can be loaded, or none ({reason})"
        raise RecipeError(Problem("--model", expected, spec)) from error
    end = generation.eos_token_id
    stops = [] if end is None else list(end) if isinstance(end, list | tuple) else [end]
    if not all(type(one) is int for one in stops):
        expected = f"an eos_token_id of whole numbers in its {GENERATION_CONFIG}"
        raise RecipeError(Problem("--model", expected, f"{spec}: {end!r}"))
    return frozenset(stops)
