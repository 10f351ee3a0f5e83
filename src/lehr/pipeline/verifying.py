"""`lehr run --verify`: is a finished run still what its ledger says?"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lehr.errors import LehrError, Problem, RecipeError
from lehr.pipeline.events import Events, Listener
from lehr.pipeline.exporting import export_promoted
from lehr.pipeline.files import read_json
from lehr.pipeline.ledger import Ledger
from lehr.pipeline.planning import prepare
from lehr.pipeline.reopening import promoted_state
from lehr.pipeline.resuming import replay_last_updates
from lehr.recipe.loading import recipe_hash
from lehr.recipe.resolve import resumed
from lehr.streams import file_hash


def verify(recipe: Any, folder: Path, *, listeners: Sequence[Listener] = ()) -> dict[str, Any]:
    """Check hashes, resume and exports of a finished run: {"ok", "checks": [{name, ok, found}]}.

    Nothing in the run's folder is changed. Raises RecipeError where there is no finished run.
    """
    ledger = Ledger.read(folder)
    if ledger is None or ledger.data.get("finished") is None:
        raise RecipeError(Problem(str(folder), "a finished run; run the recipe first"))
    recipe = resumed(recipe, folder)
    checks: list[dict[str, Any]] = []

    def check(name: str, test: Callable[[], tuple[bool, str]]) -> None:
        try:
            ok, found = test()
        except LehrError as error:
            ok, found = False, str(error)
        checks.append({"name": name, "ok": ok, "found": found})

    check("recipe", lambda: _recipe(recipe, ledger))
    check("data", lambda: _data(recipe, ledger))
    check("model files", lambda: _model_files(folder, ledger))
    events = Events(None, listeners)
    prepared = prepare(recipe, folder, events, read_json(folder / "plan.json"), write=False)
    for planned in prepared.stages:
        name = f"resume of {planned.folder_name}"
        check(name, partial(replay_last_updates, prepared, planned, events))
    check("exports", lambda: _exports(recipe, folder, ledger, prepared, events))
    return {"ok": all(one["ok"] for one in checks), "checks": checks}


def _recipe(recipe: Any, ledger: Ledger) -> tuple[bool, str]:
    same = recipe_hash(recipe) == ledger.data["recipe_hash"]
    return same, "unchanged" if same else "the recipe (or a file it names) changed since the run"


def _data(recipe: Any, ledger: Ledger) -> tuple[bool, str]:
    changed = []
    for stage in ledger.stages:
        for entry in stage["data"]:
            for path, sha in zip(
                entry["path"].split(", "), entry["sha256"].split(", "), strict=False
            ):
                file = Path(path)
                if path.startswith(("microworld:", "builtin:")):
                    continue
                if not file.is_file() or file_hash(file) != sha:
                    changed.append(path)
    return not changed, "hashes agree" if not changed else f"changed: {', '.join(changed)}"


def _model_files(folder: Path, ledger: Ledger) -> tuple[bool, str]:
    state = promoted_state(folder, ledger)
    assert state.folder is not None
    produced = state.folder / ("adapter" if state.kind == "adapter" else "weights")
    for path in sorted(produced.glob("*.safetensors")):
        twin = folder / "model" / path.name
        if not twin.is_file() or file_hash(twin) != file_hash(path):
            return False, f"model/{path.name} is not what {state.folder.name} produced"
    return True, f"model/ is what {state.folder.name} produced"


def _exports(
    recipe: Any, folder: Path, ledger: Ledger, prepared: Any, events: Events
) -> tuple[bool, str]:
    kinds = [entry["kind"] for entry in ledger.data["exports"]]
    if not kinds:
        return True, "none were made"
    state = promoted_state(folder, ledger)
    with tempfile.TemporaryDirectory() as aside:
        entries, gap = export_promoted(
            recipe, Path(aside), prepared.bench, state, prepared.sources, events, kinds
        )
        for entry in entries:
            for path in sorted((Path(aside) / entry["path"]).glob("*.safetensors")):
                kept = folder / entry["path"] / path.name
                if not kept.is_file() or file_hash(kept) != file_hash(path):
                    return False, f"{entry['path']}/{path.name} changed since it was written"
        shutil.rmtree(Path(aside) / "exports")
    return not gap, gap or f"{', '.join(kinds)}: files and parity agree"
