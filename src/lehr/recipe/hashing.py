"""What a recipe is, as a hash: resolved values and the bytes of its files.

Where a file lies does not count, what it holds does: a recipe that moved with its
data has the same hash, and an edited data file has another.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from lehr.errors import Problem, RecipeError
from lehr.recipe.adapters import is_adapter, named_base
from lehr.recipe.checks import is_local_model
from lehr.recipe.schema import Recipe, Source, Stage

SAMPLE_BYTES = 1 << 16
SAMPLES = 16
# Keys of a stage that say how it is watched and stored, not what it produces.
WATCHING = ("name", "checkpoint_every", "checkpoints_kept")


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 (hex) of resolved values, data and templates; not of `output` or the folder."""
    value = recipe.model_dump(mode="json", exclude={"output", "data"})
    value["model"] = model_part(recipe)
    value["template"] = template_part(recipe)
    value["data"] = {name: source_part(recipe, name) for name in recipe.data}
    for index, stage in enumerate(recipe.stages):
        _with_record(recipe, stage, value["stages"][index])
    return _hash(value)


def stage_part(recipe: Recipe, index: int) -> dict[str, Any]:
    """Everything in the recipe that can change what stage `index` produces from its parent.

    Of use as part of the stage's key. `threads` and `memory_limit` change only the last
    digits and are left out, as are gates, exports, other stages and what is shown. The
    tokenizer of a tiny: model comes from all data, so all data counts there.
    """
    stage = recipe.stages[index]
    values = stage.model_dump(mode="json", exclude={"data", "keep", *WATCHING})
    _with_record(recipe, stage, values)
    if stage.promote == "last" and stage.early_stop is None:
        values.pop("evaluate_every")
    part: dict[str, Any] = {
        "model": model_part(recipe),
        "template": template_part(recipe),
        "system": recipe.system,
        "date": recipe.date,
        "seed": recipe.seed,
        "trust_remote_code": recipe.trust_remote_code,
        "stage": values,
        "shares": stage.data,
        "keep": stage.keep.model_dump(mode="json"),
        "sources": {
            name: source_part(recipe, name) for name in sorted({*stage.data, *stage.keep.replay})
        },
    }
    if recipe.model.startswith("tiny:"):
        part["corpus"] = {name: source_part(recipe, name) for name in sorted(recipe.data)}
    return part


def source_part(recipe: Recipe, name: str) -> dict[str, Any]:
    """A source with its files' kinds and SHA-256 in place of their paths."""
    source: Source = recipe.data[name]
    value = source.model_dump(mode="json", exclude={"path"})
    value["files"] = [
        {"suffix": "".join(path.suffixes).lower(), "sha256": file_sha256(path)}
        for path in recipe.files_of(name)
    ]
    return value


def _with_record(recipe: Recipe, stage: Stage, value: dict[str, Any]) -> None:
    """What a record of batches to leave out says, in place of where it lies."""
    if stage.guard.quarantine is not None:
        value["guard"]["quarantine"] = file_sha256(recipe.path_of(stage.guard.quarantine))


def template_part(recipe: Recipe) -> str:
    """`auto`, `chatml`, or the SHA-256 of the template file."""
    if recipe.template in ("auto", "chatml"):
        return recipe.template
    return "sha256:" + file_sha256(recipe.path_of(recipe.template))


def model_part(recipe: Recipe) -> str:
    """The model's name; of a local one a fingerprint of its files instead of its path."""
    path = recipe.path_of(recipe.model)
    if not is_local_model(recipe.model) and not path.exists():
        return recipe.model
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    names = [str(file.relative_to(path)) if path.is_dir() else file.suffix for file in files]
    samples = [sampled_sha256(file) for file in files]
    parts: list[Any] = list(zip(names, samples, strict=True))
    if path.is_dir() and (base := _base_under(recipe, path)) is not None:
        parts.append(base)
    return "sampled:" + _hash(parts)


def _base_under(recipe: Recipe, folder: Path) -> str | None:
    """`model_part` of what an adapter's folder lies over; None for a folder with weights."""
    if not is_adapter(folder):
        return None
    try:
        base = named_base(folder, recipe.folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # refused where the model is loaded, as is an adapter over an adapter
    if is_adapter(Path(base)):
        return None
    under = recipe.model_copy(update={"model": base})
    under._folder = recipe.folder
    return model_part(under)


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file; remembered while size and time of change stay.

    Raises RecipeError where the file cannot be read.
    """
    try:
        status = path.stat()
        return _file_sha256(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise RecipeError(Problem(str(path), f"a readable file ({error.strerror})")) from None


@lru_cache(maxsize=256)
def _file_sha256(path: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sampled_sha256(path: Path) -> str:
    """Hash of a file's size and of blocks spread over it: weights of gigabytes in milliseconds."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    step = max(size // SAMPLES, SAMPLE_BYTES)
    with path.open("rb") as stream:
        for start in [*range(0, size, step), max(0, size - SAMPLE_BYTES)]:
            stream.seek(start)
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
