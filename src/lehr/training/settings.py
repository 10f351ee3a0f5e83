"""What the engine is told; every value is checked before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from lehr.errors import Problem
from lehr.training.averaging import AverageSettings
from lehr.training.batch_norm import BatchNormSettings
from lehr.training.clipping import AdaptiveClipSettings
from lehr.training.float8_recipe import Float8Settings
from lehr.training.guard import GuardSettings
from lehr.training.loss_scale import LossScaleSettings
from lehr.training.optimizers import OptimizerSettings, optimizer_problems
from lehr.training.precision import precision_problems
from lehr.training.quarantine import Quarantined
from lehr.training.restarts import RestartSettings
from lehr.training.schedules import Schedule, is_number, raise_problems, schedule_problems


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one run of the engine; nothing is `auto` any more.

    updates           applied updates; a skipped one is not counted
    learning_rate     peak of the schedule
    ema               average of the weights beside them; None = none
    batch_norm        of a model that has batch norms
    clip              largest gradient norm (L2 over all trained tensors), None = no clipping
    restart           moments emptied and the rate climbing again within the run; None = never
    adaptive_clip     limits that follow the run, after `clip`; None = none
    precision         fp32 | bf16 | fp16 | fp8 | pure_bf16; a model with its own `compute_dtype`
                      has settled it already, any other module runs under autocast
    loss_scale        of fp16, which is refused without
    fp8               of fp8; None = its defaults
    stochastic_rounding  of pure_bf16: round updates at random with the mean kept
    micro_batch       packs per backward: changes memory and speed, never the update
    gradient_flow_every  updates between two measurements of each layer; None = never
    noise_scale_every  updates between two measurements of signal and noise; None = never
    evaluate_every    updates between two evaluations; None = only after the last
    checkpoint_every  updates between two checkpoints; None = a tenth of the run
    checkpoints_kept  newest ones kept, besides the best
    early_stop        evaluations without improvement before the run stops; None = never
    promote           last | best: which weights the model holds when the run is done
    nonfinite_limit   non-finite attempts in a row before the run goes back or is given up
    guard             watches for unusual updates; None = only for values that are not finite
    quarantine        batches that are passed over from the start
    stage             name written into each line of metrics.jsonl
    """

    updates: int
    learning_rate: float
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    ema: AverageSettings | None = None
    batch_norm: BatchNormSettings = field(default_factory=BatchNormSettings)
    clip: float | None = 1.0
    adaptive_clip: AdaptiveClipSettings | None = None
    restart: RestartSettings | None = None
    precision: str = "fp32"
    loss_scale: LossScaleSettings | None = None
    fp8: Float8Settings | None = None
    stochastic_rounding: bool = False
    micro_batch: int = 1
    gradient_flow_every: int | None = None
    noise_scale_every: int | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    checkpoints_kept: int = 2
    early_stop: int | None = None
    promote: str = "last"
    nonfinite_limit: int = 3
    guard: GuardSettings | None = None
    quarantine: tuple[Quarantined, ...] = ()
    stage: str = ""

    @property
    def checkpoint_interval(self) -> int:
        """Updates between two checkpoints."""
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        return max(1, round(self.updates / 10))

    def rate(self, index: int) -> float:
        """Learning rate of applied update `index`, from 0."""
        return self.schedule.rate(index, self.learning_rate, self.updates)

    def problems(self, has_evaluation: bool = True) -> list[Problem]:
        """Everything that is wrong with these values."""
        problems = [
            Problem(name, f"{kind.__name__}(...){' or None' if optional else ''}", value)
            for name, (kind, optional) in _SECTIONS.items()
            if not (isinstance(value := getattr(self, name), kind) or (optional and value is None))
        ]
        if problems:  # the rest asks these for their own
            return problems
        if not is_number(self.learning_rate) or self.learning_rate < 0:
            expected = "a finite number, at least 0"
            problems.append(Problem("learning_rate", expected, self.learning_rate))
        if self.clip is not None and (not is_number(self.clip) or self.clip <= 0):
            expected = "a finite number above 0, or null for no clipping"
            problems.append(Problem("clip", expected, self.clip))
        for name, optional in _COUNTS.items():
            value = getattr(self, name)
            if not (optional and value is None) and not _is_count(value):
                problems.append(Problem(name, "a whole number, at least 1", value))
        problems += precision_problems(
            self.precision,
            self.loss_scale,
            self.fp8,
            self.stochastic_rounding,
            self.ema is not None,
        )
        if self.precision == "fp16" and self.noise_scale_every is not None:
            expected = "none with fp16: its micro-batches' gradients are scaled"
            problems.append(Problem("noise_scale_every", expected, self.noise_scale_every))
        if self.promote not in ("last", "best"):
            problems.append(Problem("promote", "last or best", self.promote))
        if not has_evaluation:
            unmet = {
                "promote": self.promote == "best",
                "early_stop": self.early_stop is not None,
                "evaluate_every": self.evaluate_every is not None,
            }
            expected = "something to evaluate: held-out data for this stage"
            problems += [
                Problem(name, expected, getattr(self, name))
                for name, asked in unmet.items()
                if asked
            ]
        problems += optimizer_problems(self.optimizer) + self.batch_norm.problems()
        if self.adaptive_clip is not None:
            problems += self.adaptive_clip.problems()
        if self.guard is not None:
            problems += self.guard.problems()
        if self.restart is not None:
            goes_back = self.guard is not None and self.guard.policy == "rewind"
            updates = self.updates if _is_count(self.updates) else None
            problems += self.restart.problems(self.optimizer.moments > 0, goes_back, updates)
        if self.ema is not None:
            problems += self.ema.problems(self.updates)
        if _is_count(self.updates):
            problems += schedule_problems(self.schedule, self.updates)
        return problems

    def check(self, has_evaluation: bool = True) -> None:
        """Raise RecipeError with all problems, if there are any."""
        raise_problems(self.problems(has_evaluation))


_SECTIONS: dict[str, tuple[type, bool]] = {  # name -> its class, may be None
    "schedule": (Schedule, False),
    "optimizer": (OptimizerSettings, False),
    "batch_norm": (BatchNormSettings, False),
    "ema": (AverageSettings, True),
    "adaptive_clip": (AdaptiveClipSettings, True),
    "restart": (RestartSettings, True),
    "loss_scale": (LossScaleSettings, True),
    "fp8": (Float8Settings, True),
    "guard": (GuardSettings, True),
}
_COUNTS = {  # name -> may be None
    "updates": False,
    "micro_batch": False,
    "gradient_flow_every": True,
    "noise_scale_every": True,
    "evaluate_every": True,
    "checkpoint_every": True,
    "checkpoints_kept": False,
    "early_stop": True,
    "nonfinite_limit": False,
}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
