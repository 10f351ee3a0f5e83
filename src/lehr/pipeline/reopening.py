"""A run's folder opened again: the model it promoted, and exports of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lehr.errors import Problem, RecipeError
from lehr.pipeline.events import Events, Listener
from lehr.pipeline.exporting import check_kinds, export_promoted
from lehr.pipeline.files import read_json
from lehr.pipeline.folder import claimed
from lehr.pipeline.keys import origin_of
from lehr.pipeline.ledger import Ledger
from lehr.pipeline.planning import prepare
from lehr.pipeline.promotion import describe, promotion_mark
from lehr.pipeline.states import State, damage, produced_json, state_from
from lehr.recipe.loading import load_recipe

NOTHING_PROMOTED = "a run that promoted a model; this one promoted none"
AGAIN = "run the recipe to its end again, then export"


def model_of(name: str) -> str:
    """What `load_model` takes: a run's folder stands for the model that it promoted."""
    folder = Path(name).expanduser()
    if (folder / "ledger.json").is_file():
        model = folder / "model"
        if not model.is_dir():
            raise RecipeError(Problem(name, NOTHING_PROMOTED))
        return str(model.absolute())
    return name


def promoted_state(folder: Path, ledger: Ledger) -> State:
    """The state that model/ holds, found by its key, its files checked by their hashes.

    A stage's folder may hold another state by now: a later start of the run begins there
    before anything is judged. Raises RecipeError where the promoted state is gone.
    """
    mark = promotion_mark(folder)
    if not ledger.data.get("promoted_from"):
        raise RecipeError(Problem(str(folder), NOTHING_PROMOTED))
    if "key" not in mark:
        expected = f"what model/ was promoted from; {AGAIN}"
        raise RecipeError(Problem(str(folder / "model" / "lehr.json"), expected))
    for place in sorted(folder.glob("[0-9][0-9]-*")):
        described = produced_json(place)
        if described.get("key") != mark["key"]:
            continue
        changed = damage(described, folder)
        if changed:
            expected = f"the file as its stage wrote it; {AGAIN}"
            raise RecipeError(Problem(str(folder / changed), expected))
        return state_from(described, folder)
    raise RecipeError(
        Problem(
            str(folder),
            f"the state that was judged and promoted ({mark['promoted_from']}, {mark['key']}): "
            f"its stage has begun again since; {AGAIN}",
        )
    )


def export(
    run_folder: Path, kinds: Sequence[str], *, listeners: Sequence[Listener] = ()
) -> tuple[list[dict[str, Any]], str]:
    """Export what a finished run promoted, with parity checks; (entries, first gap or "").

    Raises RecipeError where the folder is no run, nothing was promoted, or a kind is unknown.
    """
    folder = run_folder.absolute()
    ledger = Ledger.read(folder)
    if ledger is None or not (folder / "recipe.yaml").is_file():
        raise RecipeError(Problem(str(run_folder), "the folder of a run (with ledger.json)"))
    state = promoted_state(folder, ledger)
    check_kinds(kinds, state)
    recipe = load_recipe(folder / "recipe.yaml")
    with claimed(folder, str(ledger.data["name"]), fresh=False):
        events = Events(folder / "events.jsonl", listeners)
        plan = read_json(folder / "plan.json")
        prepared = prepare(recipe, folder, events, plan)
        if promotion_mark(folder).get("origin") != origin_of(recipe, prepared):
            expected = f"the base model and template that were promoted with; {AGAIN}"
            raise RecipeError(Problem(str(folder / "recipe.yaml"), expected))
        entries, gap = export_promoted(
            recipe, folder, prepared.bench, state, prepared.sources, events, kinds
        )
        others = [one for one in ledger.data["exports"] if one["kind"] not in kinds]
        ledger.data["exports"] = [*others, *entries]
        ledger.save()
        if ledger.data.get("finished"):  # else the ledger does not tell of model/
            describe(folder)
    return entries, gap
