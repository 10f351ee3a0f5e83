"""`lehr run --verify`: is a finished run still what its ledger says?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lehr.errors import LehrError, Problem, RecipeError
from lehr.pipeline import float8_export
from lehr.pipeline.events import Events, Listener
from lehr.pipeline.exporting import FLOAT8_TEXTS, parity_of, parity_texts
from lehr.pipeline.files import differing, read_json
from lehr.pipeline.folder import claimed
from lehr.pipeline.ledger import Ledger
from lehr.pipeline.parity import trained_side
from lehr.pipeline.planning import prepare
from lehr.pipeline.reopening import promoted_state
from lehr.pipeline.resuming import replay_last_updates
from lehr.recipe.loading import recipe_hash
from lehr.recipe.resolve import resumed
from lehr.streams import file_hash
from lehr.training import checkpoint


def verify(recipe: Any, folder: Path, *, listeners: Sequence[Listener] = ()) -> dict[str, Any]:
    """Check hashes, resume and exports of a finished run: {"ok", "checks": [{name, ok, found}]}.

    Nothing in the run's folder is changed but its caches. Raises RecipeError where there is
    no finished run.
    """
    ledger = Ledger.read(folder)
    if ledger is None or ledger.data.get("finished") is None:
        raise RecipeError(Problem(str(folder), "a finished run; run the recipe first"))
    recipe = resumed(recipe, folder)
    checks: list[dict[str, Any]] = []

    def check(name: str, test: Callable[[], tuple[bool, str]]) -> bool:
        try:
            ok, found = test()
        except LehrError as error:
            ok, found = False, str(error)
        checks.append({"name": name, "ok": ok, "found": found})
        return ok

    with claimed(folder, str(ledger.data["name"]), fresh=False):
        same = check("recipe", lambda: _recipe(recipe, ledger))
        same &= check("data", lambda: _data(recipe, ledger))
        check("files of the stages", lambda: _produced(folder, ledger))
        check("checkpoints", lambda: _checkpoints(folder, ledger))
        check("model", lambda: _model(folder, ledger))
        if same:
            events = Events(None, listeners)
            for name, test in _repetitions(recipe, folder, ledger, events):
                check(name, test)
        else:
            text = "not repeated: recipe or data are not those of the run"
            checks.append({"name": "resume and exports", "ok": False, "found": text})
    return {"ok": all(one["ok"] for one in checks), "checks": checks}


def _repetitions(
    recipe: Any, folder: Path, ledger: Ledger, events: Events
) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
    """What is computed again: the last updates of each stage, and the exports."""
    prepared = prepare(recipe, folder, events, read_json(folder / "plan.json"), write=False)
    ran = {entry["folder"] for entry in ledger.stages}
    for planned in prepared.stages:
        if planned.folder_name in ran:
            test = partial(replay_last_updates, prepared, planned, events)
            yield f"resume of {planned.folder_name}", test
    yield "exports", lambda: _exports(folder, ledger, prepared)


def _recipe(recipe: Any, ledger: Ledger) -> tuple[bool, str]:
    same = recipe_hash(recipe) == ledger.data["recipe_hash"]
    return same, "unchanged" if same else "the recipe (or a file it names) changed since the run"


def _data(recipe: Any, ledger: Ledger) -> tuple[bool, str]:
    changed = []
    for entry in (entry for stage in ledger.stages for entry in stage["data"]):
        if entry["path"].startswith(("microworld:", "builtin:")) or entry["name"] in changed:
            continue
        files = recipe.files_of(entry["name"]) if entry["name"] in recipe.data else []
        known = [file["sha256"] for file in entry["files"]]
        if [file_hash(path) for path in files if path.is_file()] != known:
            changed.append(entry["name"])
    return not changed, f"changed: {', '.join(changed)}" if changed else "hashes agree"


def _produced(folder: Path, ledger: Ledger) -> tuple[bool, str]:
    for stage in ledger.stages:
        kind = "adapter" if stage["produced"]["kind"] == "adapter" else "weights"
        place = f"{stage['folder']}/{kind}"
        changed = differing(folder / place, stage["produced"]["files"])
        if changed:
            return False, f"{place}/{changed[0]} is not what the stage produced"
    return True, "hashes agree"


def _checkpoints(folder: Path, ledger: Ledger) -> tuple[bool, str]:
    count = 0
    for stage in ledger.stages:
        for path in sorted((folder / stage["folder"] / "checkpoints").glob("update-*")):
            try:
                checkpoint.read(path)
            except checkpoint.DamagedCheckpointError as error:
                return False, f"{stage['folder']}/checkpoints/{path.name}: {error}"
            count += 1
    return True, f"{count} are whole"


def _model(folder: Path, ledger: Ledger) -> tuple[bool, str]:
    name = ledger.data.get("promoted_from")
    if name is None:
        return True, "nothing was promoted"
    hashes = next(one for one in ledger.stages if one["folder"] == name)["produced"]["files"]
    changed = differing(folder / "model", hashes)
    if changed:
        return False, f"model/{changed[0]} is not what {name} produced"
    return True, f"model/ is what {name} produced"


def _exports(folder: Path, ledger: Ledger, prepared: Any) -> tuple[bool, str]:
    """The exports' files are those that were checked, and they are still what was trained."""
    entries = ledger.data["exports"]
    if not entries:
        return True, "none were made"
    for entry in entries:
        changed = differing(folder / entry["path"], entry["files"])
        if changed:
            return False, f"{entry['path']}/{changed[0]} changed since it was written"
    bench = prepared.bench
    model = bench.in_fp32(promoted_state(folder, ledger))
    trained = trained_side(model, bench.encoder, *parity_texts(prepared.sources, bench.encoder))
    for entry in entries:
        if entry["kind"] == "fp8":
            texts, _ = parity_texts(prepared.sources, bench.encoder, FLOAT8_TEXTS)
            problem = float8_export.measure(model, folder / entry["path"], texts).problem
        else:
            problem = parity_of(folder / entry["path"], entry["kind"], trained, bench).problem
        if problem:
            return False, f"{entry['kind']}: {problem}"
    return True, f"{', '.join(one['kind'] for one in entries)}: files and parity agree"
