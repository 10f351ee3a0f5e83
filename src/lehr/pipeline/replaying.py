"""A stretch of a stage's training computed again beside the run, and compared with its lines."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lehr.data.packing import merge
from lehr.errors import Diverged
from lehr.objectives.base import Objective
from lehr.pipeline.files import link_weights
from lehr.stages.context import StageContext
from lehr.training import checkpoint, events
from lehr.training.checkpoint import Checkpoint
from lehr.training.engine import Engine
from lehr.training.quarantine import Quarantine, Quarantined
from lehr.training.settings import EngineSettings
from lehr.training.state import copied, trained_parameters

NEVER = 10**9
APART = ("seconds", "nonfinite")  # of a line: what no replay can give, and what follows from null


class _ReachedError(Exception):
    """The attempt that was asked for is done."""


@dataclass
class Again:
    """What came out.

    met, met_update        weights before the last attempt, and how many updates they had
    middle, middle_update  the same before an earlier attempt, where that was asked for
    departure              first update whose line is another one; 0 = none
    saved                  tensors of the state at `save_at`, by file
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    met: dict[str, Tensor] = field(default_factory=dict)
    met_update: int = 0
    middle: dict[str, Tensor] | None = None
    middle_update: int = 0
    departure: int = 0
    saved: dict[str, dict[str, Tensor]] | None = None


@dataclass(frozen=True)
class Source:
    """What is computed again.

    place    the stage's folder: only read
    aside    where the replay writes
    begin    state of the batches before the first update
    rows     lines of metrics.jsonl that are compared; evaluations are taken from them
    entries  of the quarantine, as far as that history knew them
    """

    place: Path
    aside: Path
    begin: Any
    rows: Sequence[Mapping[str, Any]]
    entries: Sequence[Quarantined] = ()


def again(
    context: StageContext,
    objective: Objective,
    source: Source,
    start: Checkpoint | None,
    upto: int,
    middle: int | None = None,
    save_at: int = 0,
    rate: float = 1.0,
) -> Again:
    """Train from `start` (None: the stage's beginning) to the end of attempt `upto`.

    middle   keep the weights from before this attempt
    save_at  keep the whole state of this update
    rate     factor on the learning rate: another one is a branch, not a replay

    The model is left in the state that was reached.
    """
    found = Again()
    rows = source.rows
    trained = trained_parameters(context.model, context.settings.precision)
    known = {int(one["update"]): one for one in rows if not one["skipped"]}

    def stand(attempt: int, update: int) -> None:
        if attempt == upto - 1:
            found.met, found.met_update = copied(trained), update
        if middle is not None and attempt == middle - 1:
            found.middle, found.middle_update = copied(trained), update

    def observe(event: Any) -> None:
        if isinstance(event, events.RunStarted):
            stand(event.attempt, event.update)
        elif isinstance(event, events.UpdateDone):
            found.rows.append(comparable(event.row))
            if event.row["attempt"] >= upto:
                raise _ReachedError
            stand(event.row["attempt"], event.row["update"])

    def evaluate(update: int) -> dict[str, float]:
        value = known.get(update, {}).get("evaluation.loss")
        return {"loss": math.nan if value is None else float(value)}

    context.batches.load(source.begin)
    with tempfile.TemporaryDirectory(dir=source.aside) as name:
        folder = Path(name)
        prepared_folder(folder, source.place, start, context.key, source.entries)
        settings = replace(
            context.settings,
            checkpoint_every=save_at or NEVER,
            learning_rate=context.settings.learning_rate * rate,
        )
        engine = engine_aside(context, objective, settings, folder, observe, evaluate)
        with suppress(_ReachedError, Diverged):
            engine.run()
        path = checkpoint.folder_of(folder / "checkpoints", save_at)
        if save_at and path.is_dir():
            _, one = checkpoint.read(path)
            found.saved = {file.stem: one.tensors(file.stem) for file in path.glob("*.safetensors")}
    found.departure = departure(found.rows, [comparable(one) for one in rows])
    return found


def engine_aside(
    context: StageContext,
    objective: Objective,
    settings: EngineSettings,
    folder: Path,
    observe: Callable[[events.Event], None],
    evaluate: Callable[[int], dict[str, float]],
) -> Engine:
    """The stage's engine in another folder; `evaluate` stands for what the stage evaluates."""
    return Engine(
        model=context.model,
        objective=objective,
        batches=context.batches,
        settings=settings,
        folder=folder,
        seed_names=(context.seed, context.stage.kind, context.parent_key),
        observers=(observe,),
        evaluate=None if context.evaluate is None else evaluate,
        merge=merge,
        key=context.key,
    )


def comparable(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl as it is compared: numbers of the training, as JSON gives them."""
    kept = {
        name: value
        for name, value in row.items()
        if name not in APART and not name.startswith(("evaluation.", "guard.", "batch_norm."))
    }
    found: dict[str, Any] = json.loads(json.dumps(kept))
    return found


def departure(new: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]]) -> int:
    """The first update whose line differs, 0 where none does; absent lines are not compared.

    >>> departure([{"attempt": 1, "update": 1, "loss": 2.0}],
    ...           [{"attempt": 1, "update": 1, "loss": 2.5}])
    1
    """
    known = {int(one["attempt"]): one for one in old}
    for row in new:
        then = known.get(int(row["attempt"]))
        if then is None or then.get("quarantined") or row.get("quarantined"):
            continue
        if dict(then) != dict(row):
            return int(row["update"]) + (1 if row.get("skipped") else 0)
    return 0


def prepared_folder(
    folder: Path,
    place: Path,
    start: Checkpoint | None,
    key: str,
    entries: Sequence[Quarantined],
) -> None:
    """Put the checkpoint, the lines and the quarantine of the stage into `folder`."""
    for name in ("metrics.jsonl", "reference.json"):
        if (place / name).is_file():
            shutil.copy2(place / name, folder / name)
    if start is not None:
        target = folder / "checkpoints" / start.path.name
        shutil.copytree(start.path, target, copy_function=link_weights)
    if entries:
        Quarantine(folder, key).add(entries)
