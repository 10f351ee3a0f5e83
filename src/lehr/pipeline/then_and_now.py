"""A run's folder beside what its recipe finds today: what is not as it was when it was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lehr.errors import Problem, RecipeError
from lehr.pipeline.files import read_json
from lehr.pipeline.keys import versions
from lehr.recipe.hashing import file_sha256
from lehr.recipe.loading import load_recipe
from lehr.recipe.schema import Recipe


def recipe_of(folder: Path, plan: Mapping[str, Any]) -> Recipe:
    """The recipe in a run's folder. Raises RecipeError; of a folder that was moved, what helps."""
    try:
        return load_recipe(folder / "recipe.yaml")
    except RecipeError as error:
        gone = [one for one in error.problems if "a file that exists" in one.expected]
        if not gone:
            raise
        files = [file["path"] for _, _, file in _recorded(plan)]
        trained_on = f" It was trained on {', '.join(files[:5])}." if files else ""
        text = (
            f"paths in {folder / 'recipe.yaml'} start at the run's folder: was it moved?"
            f"{trained_on} Put it back beside its files, or write their full paths into that "
            "recipe.yaml: what they hold counts, not where they lie"
        )
        raise RecipeError([*error.problems, Problem(str(folder), text, says=True)]) from error


def differences(recipe: Recipe, folder: Path, base_key: str) -> list[str]:
    """What differs from when the run was trained, in words: data files, versions, the model.

    base_key  of the model as it is loaded now
    """
    now: dict[str, dict[str, set[str]]] = {name: {} for name in recipe.data}
    for name, named in now.items():
        for path in recipe.files_of(name):
            named.setdefault(path.name, set()).add(file_sha256(path))
    found = []
    for source, rows, file in _recorded(read_json(folder / "plan.json")):
        name = Path(file["path"]).name
        here = now.get(source, {}).get(name)
        if not here:
            found.append(f"{name} of data.{source} is no longer among its files")
        elif file["sha256"] not in here:
            found.append(
                f"{name} of data.{source} holds other bytes (SHA-256 {file['sha256'][:8]} with "
                f"{rows} rows then, {min(here)[:8]} now)"
            )
    ledger = read_json(folder / "ledger.json")
    ledger = ledger if isinstance(ledger, dict) else {}
    current = versions()
    found += [
        f"{name} {then} then, {current[name]} now"
        for name, then in ledger.get("versions", {}).items()
        if name in current and current[name] != then
    ]
    first = next((one.get("parent") for one in ledger.get("stages", [])), None)
    if not found and first is not None and first != base_key:
        found.append(f"the model {recipe.model} is another than then")
    return found


def _recorded(plan: object) -> Iterator[tuple[str, object, Mapping[str, str]]]:
    """(source, rows, file) of every data file that the plan names."""
    for source in plan.get("data") or [] if isinstance(plan, dict) else []:
        for file in source.get("files") or []:
            if {"path", "sha256"} <= file.keys():
                yield source["name"], source.get("rows"), file
