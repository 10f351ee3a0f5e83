"""One stage of a recipe, made ready for the engine: batches, settings, what it is measured by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lehr.data.loader import UpdateBatches
from lehr.data.packing import fill, pack
from lehr.data.shapes import Encoded
from lehr.diagnosis.planner import Load
from lehr.pipeline.guarding import adaptive_clip_of, guard_of, restart_of
from lehr.pipeline.precision import float8_of, loss_scale_of
from lehr.pipeline.recomputing import Settled
from lehr.pipeline.sources import EncodedSource
from lehr.stages.context import StageContext
from lehr.stages.preference import preference
from lehr.stages.pretrain import pretrain
from lehr.stages.sft import sft
from lehr.training.averaging import AverageSettings
from lehr.training.batch import choose_micro_batch
from lehr.training.batch_rules import scaled_rate
from lehr.training.optimizers import GroupRule, OptimizerSettings, beta2_of_half_life
from lehr.training.progress import TrainingResult
from lehr.training.quarantine import Quarantined
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

STAGES: dict[str, Callable[[StageContext], TrainingResult]] = {
    "pretrain": pretrain,
    "sft": sft,
    "preference": preference,
}
EVALUATIONS_A_STAGE = 4
UPDATES_LOOKED_AT = 1000  # for the largest micro-batch: later ones are drawn from the same rows


@dataclass
class PlannedStage:
    """A stage with everything `auto` resolved, before anything is trained."""

    index: int
    stage: Any
    name: str
    folder_name: str
    sources: Mapping[str, EncodedSource]
    updates: int
    trains_all: bool
    micro_batch: int = 1
    micro_batch_why: str = ""
    head_chunk: int | None = None  # rows of the head's chunks; None: its own choice
    settled_for: str = ""  # what `auto` was settled for: the same again keeps the choice
    recompute: Settled = field(default_factory=Settled)
    recompute_report: list[dict[str, Any]] = field(default_factory=list)
    tokens_per_update: int = 0
    seconds: float = 0.0
    operations_per_token: float = 0.0  # that the model needs; none of what is computed again
    limit_tokens_per_second: float = 0.0  # by the measured product rate, if nothing else cost time
    memory: Mapping[str, int] | None = None
    disk: int = 0
    quarantine: tuple[Quarantined, ...] = ()
    float8: list[str] = field(default_factory=list)  # every linear layer with its verdict
    findings: list[str] = field(default_factory=list)
    _sizes: list[list[tuple[int, int]]] | None = None

    @property
    def pack_length(self) -> int:
        return int(self.stage.pack_length or self.stage.max_length)

    def batches(self, seed: int) -> UpdateBatches:
        """The stage's updates from the first one on."""
        mixture = self.stage.mixture()
        return UpdateBatches(
            {name: self.sources[name].train for name in mixture},
            mixture,
            self.stage.batch_size,
            seed,
            self.pack_length,
            self.stage.packing,
        )

    def settings(self, precision: str) -> EngineSettings:
        """The engine's view of the stage."""
        stage = self.stage
        every = stage.evaluate_every
        if every is None and self.heldout():
            every = max(1, math.ceil(self.updates / EVALUATIONS_A_STAGE))
        return EngineSettings(
            updates=self.updates,
            learning_rate=self.rate[0],
            schedule=_schedule(stage.schedule),
            optimizer=_optimizer(stage.optimizer, self.tokens_per_update),
            ema=_average(stage.ema),
            clip=stage.clip,
            adaptive_clip=adaptive_clip_of(stage),
            restart=restart_of(stage),
            guard=guard_of(stage),
            quarantine=self.quarantine,
            precision=precision,
            loss_scale=loss_scale_of(stage),
            fp8=float8_of(stage),
            stochastic_rounding=bool(stage.stochastic_rounding),
            micro_batch=self.micro_batch,
            gradient_flow_every=stage.gradient_flow_every,
            noise_scale_every=stage.noise_scale_every,
            evaluate_every=every,
            checkpoint_every=stage.checkpoint_every,
            checkpoints_kept=stage.checkpoints_kept,
            early_stop=stage.early_stop,
            promote=stage.promote,
            stage=self.folder_name,
        )

    @property
    def rate(self) -> tuple[float, str]:
        """The learning rate for this batch size; why it is not the recipe's, or nothing."""
        stage, scale_rate = self.stage, self.stage.scale_rate
        if scale_rate is None:
            return float(stage.learning_rate), ""
        found_at, rule = scale_rate.found_at, scale_rate.rule
        kind = stage.optimizer.kind
        return scaled_rate(stage.learning_rate, found_at, stage.batch_size, kind, rule)

    def first_packs(self, seed: int) -> list[Any]:
        """The packs of the first update: what planning measures."""
        return self.batches(seed).next()

    def pack_sizes(self, seed: int) -> list[list[tuple[int, int]]]:
        """(tokens, predicted positions) of each pack, by update."""
        if self._sizes is None:
            batches = self.batches(seed)
            count = max(1, min(self.updates, UPDATES_LOOKED_AT))
            self._sizes = [batches.next_sizes() for _ in range(count)]
        return self._sizes

    def fill(self, seed: int) -> float:
        """Share of the first updates' room that holds tokens."""
        return fill(self.first_packs(seed), self.pack_length)

    def heldout(self) -> list[Encoded]:
        """Held-out examples of the stage's own data."""
        return [one for name in self.stage.data for one in self.sources[name].heldout]


def _schedule(schedule: Any) -> Schedule:
    return Schedule(
        schedule.kind,
        schedule.warmup,
        schedule.decay,
        schedule.final,
        schedule.shape,
        schedule.initial,
        schedule.cooldown,
        schedule.hold,
    )


def _optimizer(optimizer: Any, tokens_per_update: int) -> OptimizerSettings:
    """tokens_per_update is 0 until it is counted: what is checked before that needs no beta2."""
    first, second = optimizer.betas
    half_life = optimizer.beta2_half_life_tokens
    if half_life is not None and tokens_per_update:
        second = beta2_of_half_life(half_life, tokens_per_update)
    return OptimizerSettings(
        optimizer.kind,
        (first, second),
        optimizer.eps,
        optimizer.weight_decay,
        optimizer.momentum,
        optimizer.nesterov,
        optimizer.match_rms,
        tuple(
            GroupRule(group.pattern, group.weight_decay, group.learning_rate_scale)
            for group in optimizer.groups
        ),
        optimizer.watch_every,
    )


def _average(ema: Any) -> AverageSettings | None:
    if ema is None:
        return None
    return AverageSettings(ema.decay, ema.warmup, ema.start_after, ema.evaluate)


def planned_stage(
    index: int,
    stage: Any,
    sources: Mapping[str, EncodedSource],
    seed: int,
    trains_all: bool,
) -> PlannedStage:
    """Count the stage's updates and name its folder."""
    name = stage.name or stage.kind
    planned = PlannedStage(
        index=index,
        stage=stage,
        name=name,
        folder_name=f"{index + 1:02d}-{name}",
        sources=sources,
        updates=0,
        trains_all=trains_all,
    )
    if stage.max_updates is not None:
        planned.updates = stage.max_updates
    else:
        planned.updates = max(1, math.ceil(stage.epochs * planned.batches(seed).updates_per_epoch))
    return planned


def load_of(updates: Sequence[Sequence[tuple[int, int]]], packs: int) -> Load:
    """What the largest micro-batch of `packs` packs holds, cut as the engine cuts.

    updates  (tokens, predicted positions) of each pack, by update

    >>> load_of([[(10, 2), (9, 3), (4, 4)], [(12, 1)]], 2)
    Load(tokens=19, pairs=5, micro_batches=2)
    """
    tokens = pairs = several = 1
    for sizes in updates:
        groups = [sizes[start : start + packs] for start in range(0, len(sizes), packs)]
        several = max(several, len(groups))
        for group in groups:
            tokens = max(tokens, sum(one for one, _ in group))
            pairs = max(pairs, sum(one for _, one in group))
    return Load(tokens, pairs, several)


def settle_micro_batch(
    planned: PlannedStage,
    seed: int,
    estimate: Callable[[int], int],
    limit_bytes: int,
    packs_exactly: bool = True,
) -> str:
    """Choose how many packs go through at once; returns the reason."""
    if planned.stage.micro_batch != "auto":
        planned.micro_batch = planned.stage.micro_batch
        return "as the recipe says"
    packs = len(planned.first_packs(seed)) if packs_exactly else 1
    if planned.stage.noise_scale_every is not None:  # two sizes of gradient in each update
        packs = -(-packs // 2)
    chosen = choose_micro_batch(max(1, packs), estimate, limit_bytes)
    planned.micro_batch = chosen.packs
    return chosen.why


def stage_context(
    planned: PlannedStage,
    *,
    key: str,
    folder: Path,
    seed: int,
    model: Any,
    precision: str,
    parent: Any,
    parent_key: str,
    observers: Sequence[Callable[[Any], None]],
    evaluate: Callable[[int], Mapping[str, float]] | None,
) -> StageContext:
    """What the stage's own function is given."""
    return StageContext(
        name=planned.folder_name,
        key=key,
        folder=folder,
        stage=planned.stage,
        seed=seed,
        model=model,
        batches=planned.batches(seed),
        pack_length=planned.pack_length,
        settings=planned.settings(precision),
        parent=parent,
        parent_key=parent_key,
        observers=observers,
        evaluate=evaluate,
    )


def heldout_loss(model: Any, encoded: Sequence[Encoded], pack_length: int) -> float:
    """Mean negative log-probability (nats) of the supervised tokens."""
    total, count = 0.0, 0.0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for one in pack(list(enumerate(encoded)), pack_length, model.packs_exactly):
            stats = model.token_stats(model.hidden(one), one.predict_from, one.targets)
            own = stats.log_probability.double().cpu()
            total -= float((own * one.weights.double()).sum())
            count += float(one.weights.sum())
    model.train(was_training)
    return total / max(count, 1.0)
