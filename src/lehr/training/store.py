"""Saving and restoring a run: weights, buffers, moments, data position, progress.

Holds the promise of bit-exact resume, and withdraws it visibly where it cannot be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lehr import ranks
from lehr.data.shapes import Pack
from lehr.errors import LehrError, Problem
from lehr.training import checkpoint, events
from lehr.training.averaging import Average
from lehr.training.clipping import AdaptiveClip
from lehr.training.guard import Guard
from lehr.training.metrics import MetricsFile
from lehr.training.numerics import Numerics
from lehr.training.progress import Progress
from lehr.training.quarantine import Quarantine
from lehr.training.resources import require_disk
from lehr.training.settings import EngineSettings
from lehr.training.state import (
    differences,
    environment,
    load_optimizer,
    numeric_settings,
    optimizer_tensors,
    put_back,
    tensors_of,
)


class Batches(Protocol):
    """The engine's source of data; it never ends.

    next   the packs of the next update (this rank's part)
    state  a small JSON value: where the source stands; asked for before every update
    load   go to such a place
    epoch  passes over the data so far, as a fraction
    """

    @property
    def epoch(self) -> float: ...
    def next(self) -> list[Pack]: ...
    def state(self) -> Any: ...
    def load(self, state: Any) -> None: ...


class Store:
    """The checkpoints of one run, in `folder`/checkpoints."""

    def __init__(
        self,
        folder: Path,
        key: str,
        settings: EngineSettings,
        trained: Mapping[str, Parameter],
        buffers: Mapping[str, Tensor],
        optimizer: Optimizer,
        emit: Callable[[events.Event], None],
        average: Average | None = None,
        numerics: Numerics | None = None,
        quarantine: Quarantine | None = None,
        guard: Guard | None = None,
        clip: AdaptiveClip | None = None,
    ) -> None:
        self.root = folder / "checkpoints"
        self.saved_update = 0
        self._key, self._settings, self._emit = key, settings, emit
        self._trained, self._buffers, self._optimizer = trained, buffers, optimizer
        self._average, self._numerics = average, numerics
        self._quarantine = quarantine or Quarantine(folder, key)
        self._guard, self._clip = guard, clip
        self._damaged: set[Path] = set()

    def resume(
        self, progress: Progress, batches: Batches, metrics: MetricsFile, told: bool = True
    ) -> None:
        """Go to the newest usable checkpoint, or to the start; cut metrics.jsonl to fit.

        told  False: within a run that goes back, which tells it in its own way

        Raises RecipeError where another run's checkpoints are in the way or a checkpoint
        holds a pickle, OutOfResources where the disk has no room for the new ones.
        """
        checkpoint.refuse_collisions(self.root, self._key, self._settings.updates)
        if ranks.is_main():
            checkpoint.clean(self.root)
        ranks.barrier()
        found = checkpoint.newest(self.root, self._key, self._quarantine.left_out_by)
        ranks.barrier()
        if ranks.is_main():
            for path in found.outdated:
                checkpoint.remove(path)
        for skipped in found.skipped:
            self._emit(events.CheckpointSkipped(skipped.path, skipped.reason))
        self._damaged = {skipped.path for skipped in found.skipped if not skipped.foreign}
        if found.checkpoint is not None:
            self._load(found.checkpoint, progress, batches)
            if ranks.is_main() and not self._damaged:  # a kill came between saving and deleting
                kept = self._settings.checkpoints_kept
                checkpoint.rotate(self.root, self._key, progress.update, kept, ())
        kept, removed = metrics.cut(progress.attempt) if ranks.is_main() else (0, 0)
        ranks.barrier()
        self._require_room(fresh=found.checkpoint is None)
        if found.checkpoint is None or not told:
            return
        self._emit(events.ResumedFrom(progress.update, found.checkpoint.path, removed))
        reasons = self._reasons_for_doubt(found.checkpoint)
        if ranks.is_main() and kept < progress.attempt:
            lost = progress.attempt - kept
            reasons.append(f"metrics.jsonl lost {lost} line(s) from before the checkpoint")
        if reasons:
            self._emit(events.ResumeInexact(tuple(reasons)))

    def save(self, progress: Progress, batches_state: Any) -> None:
        """Write a checkpoint unless this update has one, then delete the superseded ones."""
        if progress.update != self.saved_update:
            self._write(progress, batches_state)

    def save_start(self, progress: Progress, batches_state: Any) -> None:
        """A checkpoint from before the first update: what a run that goes back may need."""
        if progress.attempt == 0 and not checkpoint.folder_of(self.root, 0).exists():
            self._write(progress, batches_state)

    def usable(self, quarantine: Quarantine) -> checkpoint.Checkpoint | None:
        """The newest checkpoint that left out all batches of this record."""
        return checkpoint.newest(self.root, self._key, quarantine.left_out_by).checkpoint

    def _write(self, progress: Progress, batches_state: Any) -> None:
        path, removed = checkpoint.folder_of(self.root, progress.update), []
        if ranks.is_main():
            path = checkpoint.save(
                self.root,
                progress.update,
                self._files(),
                self._state(progress, batches_state),
                self._key,
            )
            self._damaged.discard(path)
            removed = checkpoint.rotate(
                self.root,
                self._key,
                progress.update,
                self._settings.checkpoints_kept,
                self._damaged,
            )
        ranks.barrier()
        self.saved_update = progress.update
        self._emit(events.CheckpointWritten(progress.update, path, tuple(removed)))

    def load_weights(self, update: int) -> None:
        """Put back weights, their average and buffers of an earlier update; the moments stay."""
        path = checkpoint.folder_of(self.root, update)
        try:
            _, found = checkpoint.read(path)
        except checkpoint.DamagedCheckpointError as error:
            expected = f"the whole checkpoint of the best update: {error}"
            raise LehrError(Problem(str(path), expected)) from error
        self._load_weights(found)

    def _files(self) -> dict[str, dict[str, Tensor]]:
        weights: dict[str, Tensor] = {}
        weights |= {f"parameter.{name}": value for name, value in self._trained.items()}
        weights |= {f"buffer.{name}": value for name, value in self._buffers.items()}
        files = {"weights": weights, "optimizer": optimizer_tensors(self._optimizer)}
        if self._average is not None:
            files["average"] = self._average.tensors()
        return files

    def _state(self, progress: Progress, batches_state: Any) -> dict[str, Any]:
        state = {
            "progress": progress.state(),
            "best_update": progress.best_update if self._settings.promote == "best" else None,
            "batches": batches_state,
            "environment": environment(self._trained),
            "settings": numeric_settings(self._settings),
        }
        if self._average is not None:
            state["average"] = {"count": self._average.count}
        if self._numerics is not None and (numerics := self._numerics.state()):
            state["numerics"] = numerics
        if left_out := self._quarantine.upto(progress.attempt):
            state["quarantined"] = left_out
        if self._guard is not None:
            state["guard"] = self._guard.state()
        if self._clip is not None:
            state["clip"] = self._clip.state()
        return state

    def _load(self, found: checkpoint.Checkpoint, progress: Progress, batches: Batches) -> None:
        self._load_weights(found)
        load_optimizer(self._optimizer, found.tensors("optimizer"))
        if self._numerics is not None:
            self._numerics.load(found.state.get("numerics", {}), str(found.path))
        if self._guard is not None:
            self._guard.load(found.state.get("guard", {}))
        if self._clip is not None:
            self._clip.load(found.state.get("clip", {}))
        progress.load(found.state["progress"])
        batches.load(found.state["batches"])
        self.saved_update = progress.update

    def _load_weights(self, found: checkpoint.Checkpoint) -> None:
        where = str(found.path)
        put_back(self._trained, tensors_of(found, "weights", "parameter."), where)
        put_back(self._buffers, tensors_of(found, "weights", "buffer."), where)
        if self._average is None:
            return
        if "average" in found.state:
            count = int(found.state["average"]["count"])
            self._average.load(found.tensors("average"), count, where)
        else:  # the setting is new: `_reasons_for_doubt` says so
            self._average.begin()

    def _reasons_for_doubt(self, found: checkpoint.Checkpoint) -> list[str]:
        now = {
            **environment(self._trained),
            "settings": numeric_settings(self._settings),
        }
        then = {**found.state["environment"], "settings": found.state["settings"]}
        return differences(then, now)

    def _require_room(self, fresh: bool) -> None:
        """Room for the checkpoints to come: said before the first update, not after hours."""
        weights = sum(value.nbytes for value in self._trained.values())
        averages = 0 if self._average is None else 1
        each = weights * (1 + self._settings.optimizer.moments + averages) + (1 << 20)
        best = 1 if self._settings.promote == "best" else 0
        count = self._settings.checkpoints_kept + 1 + best if fresh else 1
        require_disk(self.root, each * count, what=f"{count} checkpoint(s)")
