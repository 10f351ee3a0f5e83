"""What a stage is given, and the one way in which it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lehr.data.loader import UpdateBatches
from lehr.data.packing import merge
from lehr.models.language_model import LanguageModel
from lehr.objectives.base import Objective
from lehr.training.engine import Engine
from lehr.training.progress import Progress, TrainingResult, result_of
from lehr.training.settings import EngineSettings


@dataclass
class StageContext:
    """One stage's part of the world.

    name      of its folder: what metrics.jsonl and events say
    key       everything that the stage's numbers depend on
    parent    trained tensors that the stage begins from: what a reference is made of
    evaluate  measures the model in training; its first value is minimised by best / early stop
    drive     what is done with the stage's objective instead of training (a check of `plan`)
    """

    name: str
    key: str
    folder: Path
    stage: Any  # the recipe's stage: read by the stage's own file
    seed: int
    model: LanguageModel
    batches: UpdateBatches
    pack_length: int
    settings: EngineSettings
    parent: Mapping[str, Tensor]
    parent_key: str
    observers: Sequence[Callable[[Any], None]] = field(default_factory=tuple)
    evaluate: Callable[[int], Mapping[str, float]] | None = None
    drive: Callable[[StageContext, Objective], None] | None = None

    @property
    def seed_names(self) -> tuple[object, ...]:
        """Of the random stream; not the name: a renamed stage is the same stage."""
        return (self.seed, self.stage.kind, self.parent_key)


def train(
    context: StageContext, objective: Objective, *extra: Callable[[Any], None]
) -> TrainingResult:
    """Run the engine on the stage's batches; resumes by itself from the newest whole checkpoint."""
    if context.drive is not None:
        context.drive(context, objective)
        return result_of(Progress(), 0, 0)
    engine = Engine(
        model=context.model,
        objective=objective,
        batches=context.batches,
        settings=context.settings,
        folder=context.folder,
        seed_names=context.seed_names,
        observers=(*context.observers, *extra),
        evaluate=context.evaluate,
        merge=merge,
        key=context.key,
    )
    return engine.run()
