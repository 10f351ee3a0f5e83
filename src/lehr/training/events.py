"""What the engine tells its observers; progress bars, event logs and answers hang here.

An observer is a callable that takes one event. It runs in the training thread: what it
raises stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lehr.training.layers import FlowVerdict, LayerFlow
from lehr.training.noise_scale import NoiseScale
from lehr.training.steps import EffectiveStep


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True)
class RunStarted(Event):
    """update, attempt: where the run stands; 0 for a new one."""

    update: int
    attempt: int
    updates: int


@dataclass(frozen=True)
class ResumedFrom(Event):
    """A checkpoint was loaded; `lines_cut` lines of metrics.jsonl lay past it."""

    update: int
    path: Path
    lines_cut: int


@dataclass(frozen=True)
class ResumeInexact(Event):
    """The promise of bit-exact resume is withdrawn, for these reasons."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "resume is not bit-exact because " + "; ".join(self.reasons)


@dataclass(frozen=True)
class CheckpointSkipped(Event):
    """A checkpoint was not used: it is damaged, or another run's."""

    path: Path
    reason: str


@dataclass(frozen=True)
class CheckpointWritten(Event):
    update: int
    path: Path
    removed: tuple[Path, ...]


@dataclass(frozen=True)
class UpdateDone(Event):
    """An attempt ended; `row` is its line of metrics.jsonl, without the evaluation.

    spans  seconds since the attempt before ended, by name: see training/spans
    """

    row: Mapping[str, Any]
    spans: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OrderUnknown(Event):
    """`operation` adds in no fixed order on this card: a resume may differ in last bits."""

    operation: str


@dataclass(frozen=True)
class RunDone(Event):
    """The last event of a run that came to its end. spans: as of UpdateDone, since the last."""

    spans: Mapping[str, float]


def not_finite(names: Sequence[str]) -> str:
    """What was not finite, in few words.

    A loss that is not finite leaves no gradient finite.

    >>> not_finite(["loss", "gradient of a"]), not_finite([f"gradient of {n}" for n in "abcd"])
    ('loss', 'gradient of a, gradient of b, and 2 more')
    """
    if "loss" in names:
        return "loss"
    more = [f"and {len(names) - 2} more"] if len(names) > 3 else []
    return ", ".join([*names[: 2 if more else 3], *more])


@dataclass(frozen=True)
class NonFinite(Event):
    """An update was skipped: no weight changed.

    names    what was not finite: `loss`, `gradient of <tensor>`
    origins  file:line of each example of the micro-batches concerned
    """

    attempt: int
    update: int
    names: tuple[str, ...]
    origins: tuple[str, ...]
    in_a_row: int


@dataclass(frozen=True)
class UpdateUnusual(Event):
    """The guard skipped an update: no weight changed. `why` names signal, value and limit."""

    attempt: int
    update: int
    why: str
    origins: tuple[str, ...]


@dataclass(frozen=True)
class StepUnusual(Event):
    """An update that was applied moved the weights unusually far."""

    attempt: int
    update: int
    why: str


@dataclass(frozen=True)
class BatchPassedOver(Event):
    """A batch of the quarantine: nothing was computed with it."""

    attempt: int
    update: int
    why: str
    origins: tuple[str, ...]


@dataclass(frozen=True)
class WentBack(Event):
    """The run returned from update `undone` to `reached`, and passes `attempts` over from now on.

    number  of the return, from 1      origins  rows of those batches
    """

    undone: int
    reached: int
    number: int
    attempts: tuple[int, ...]
    origins: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class ScaleLowered(Event):
    """fp16: a scaled gradient overflowed; the update was skipped and the scale halved.

    names  tensors whose gradient was not finite, in the model's order
    """

    attempt: int
    update: int
    used: float
    next: float
    names: tuple[str, ...]


@dataclass(frozen=True)
class Float8Converted(Event):
    """The linear layers that compute in FP8 from here on, and those that do not.

    layers   names in FP8        choices  a line for every linear layer with its verdict
    backend  emulated | scaled_mm
    """

    layers: tuple[str, ...]
    choices: tuple[str, ...]
    backend: str


@dataclass(frozen=True)
class Evaluated(Event):
    update: int
    values: Mapping[str, float]
    is_best: bool


@dataclass(frozen=True)
class StoppedEarly(Event):
    update: int
    evaluations_without_improvement: int


@dataclass(frozen=True)
class PromotedBest(Event):
    """The model holds the weights of this earlier update again."""

    update: int
    value: float


@dataclass(frozen=True)
class PromotedAverage(Event):
    """The model holds the average of `count` updates, as it was after `update`."""

    update: int
    count: int
    decay: float


@dataclass(frozen=True)
class StepsMeasured(Event):
    """How far each parameter group really moved in `update`."""

    update: int
    groups: tuple[EffectiveStep, ...]


@dataclass(frozen=True)
class MissingGradient(Event):
    """Trained tensors that the first backward pass did not reach; they do not train."""

    names: tuple[str, ...]
    of: int


@dataclass(frozen=True)
class GradientFlowMeasured(Event):
    """What reached each layer in `update`, first layer first, and the verdict on it."""

    update: int
    layers: tuple[LayerFlow, ...]
    verdict: FlowVerdict


@dataclass(frozen=True)
class NoiseScaleMeasured(Event):
    """The gradient noise scale at the end of a run, and what it says about the batch size."""

    update: int
    scale: NoiseScale
    batch_size: float
    advice: str


@dataclass(frozen=True)
class BatchNormAlarm(Event):
    """Batch norms that do not do what they are for: `why`, and which."""

    update: int
    why: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class BatchNormGap(Event):
    """An evaluation with running statistics, and again with those of its own batches."""

    update: int
    values: Mapping[str, float]
    as_in_training: Mapping[str, float]


@dataclass(frozen=True)
class InterruptNoted(Event):
    """INT or TERM arrived; the current micro-batch is finished, then a checkpoint written."""

    signal: str


Observer = Callable[[Event], None]
