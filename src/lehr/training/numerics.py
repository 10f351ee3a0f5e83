"""What the arithmetic of a run adds to the loop: a loss scale, FP8 layers, bf16 weights.

Around each attempt the engine calls, in this order,

    begin_attempt    scaled (each micro-batch)    unscale    settle    step | nothing    applied

and the parts that the run's precision does not have do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lehr.errors import Diverged, Problem, RecipeError
from lehr.training import events
from lehr.training.bf16_weights import Bf16Weights
from lehr.training.float8_convert import Float8Conversion, convert
from lehr.training.float8_recipe import Float8Settings
from lehr.training.loss_scale import LossScaler
from lehr.training.precision import capability_of, hardware_problems
from lehr.training.settings import EngineSettings


class Numerics:
    """The state of one run's precision.

    moved    what the optimizer is made of: the trained tensors, or fp32 stand-ins for them
    float8   the conversion between `convert` and `restore`; None otherwise
    gave_up  why the run must stop once this attempt's line is written; None = it goes on
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, Parameter],
        settings: EngineSettings,
        seed_names: Sequence[object],
    ) -> None:
        """Raises RecipeError where the device of the weights cannot do what is asked."""
        self._model, self._trained, self._settings = model, trained, settings
        self._device = next(iter(trained.values())).device
        problems = hardware_problems(
            settings.precision, settings.fp8, self._device.type, capability_of(self._device)
        )
        if problems:
            raise RecipeError(problems)
        self.scaler = LossScaler(settings.loss_scale) if settings.precision == "fp16" else None
        self.float8: Float8Conversion | None = None
        self.gave_up: Diverged | None = None
        self._bf16: Bf16Weights | None = None
        if settings.precision == "pure_bf16":
            self._bf16 = Bf16Weights(trained, settings.stochastic_rounding, seed_names)

    @property
    def moved(self) -> Mapping[str, Parameter]:
        return self._trained if self._bf16 is None else self._bf16.stand_ins

    @property
    def scale(self) -> float:
        """The loss scale of the next attempt; 1 without one."""
        return 1.0 if self.scaler is None else self.scaler.scale

    # -- around the run -------------------------------------------------------

    def convert(self) -> events.Float8Converted | None:
        """Put the model into FP8, where that is asked. Raises RecipeError with all problems."""
        self.release()
        if self._settings.precision != "fp8":
            return None
        settings = (self._settings.fp8 or Float8Settings()).on(self._device.type)
        # A model around a network, as lehr's: its layers are known by the network's names.
        network = getattr(self._model, "network", self._model)
        self.float8 = convert(network, settings, self._device.type, capability_of(self._device))
        choices = tuple(str(choice) for choice in self.float8.choices)
        return events.Float8Converted(self.float8.layers, choices, settings.backend)

    def restore(self) -> None:
        """Give the model its own layers back; its weights are what was trained."""
        if self.float8 is not None:
            self.float8.restore()
            self.float8 = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """FP8 is off inside: evaluations see what would be saved, and that has no FP8 layers."""
        if self.float8 is None:
            yield
            return
        with self.float8.off():
            yield

    # -- around an attempt ----------------------------------------------------

    def begin_attempt(self) -> None:
        """Before the first backward pass."""
        if self.scaler is not None:
            # A rank without packs has no backward pass, but is part of the attempt.
            self.scaler.scaled(torch.zeros(()))

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss of a micro-batch as the backward pass needs it."""
        return loss if self.scaler is None else self.scaler.scaled(loss)

    def unscale(self) -> None:
        """Make gradients true again: before norm, finite check and clip."""
        if self.scaler is not None:
            self.scaler.unscale(self._trained)

    def overflowed(self, loss: float, nonfinite: Sequence[str]) -> bool:
        """Whether the scale is to blame: the loss itself is finite, its scaled gradient is not."""
        return self.scaler is not None and math.isfinite(loss) and bool(nonfinite)

    def flagged(self) -> tuple[str, ...]:
        """FP8 operands that were not finite in this attempt."""
        return () if self.float8 is None else self.float8.flagged()

    def abandon(self) -> None:
        """The attempt is given up, or was skipped for another reason than its scale."""
        if self.scaler is not None:
            self.scaler.abandon()
        if self.float8 is not None:
            self.float8.skipped()

    def settle(self, skipped: bool, overflow: Sequence[str] = ()) -> dict[str, float]:
        """After the verdict: move the scale; columns of metrics.jsonl with the scale that was used.

        overflow  names of gradients that overflowed, in the model's order
        """
        if skipped and not overflow:
            self.abandon()
        if self.scaler is None:
            return {}
        used = self.scaler.scale
        if overflow or not skipped:
            try:
                self.scaler.finish(overflow)
            except Diverged as error:
                self.gave_up = error
        return {"loss_scale": used, "loss_scale_skips": float(self.scaler.skips)}

    def step(self, optimizer: Optimizer, update: int) -> dict[str, float]:
        """Move the weights; columns of metrics.jsonl."""
        if self._bf16 is None:
            optimizer.step()
            return {}
        return self._bf16.step(optimizer, update)

    def release(self) -> None:
        """Nobody looks at the step any more: its fp32 weights can go."""
        if self._bf16 is not None:
            self._bf16.release()

    def applied(self, update: int) -> tuple[dict[str, float], tuple[events.Event, ...]]:
        """Update number `update` was applied: columns of metrics.jsonl, layers that fell back."""
        fp8 = self.float8
        if fp8 is None:
            return {}, ()
        fallen: tuple[events.Event, ...] = ()
        try:
            fallen = fp8.applied(update)
        except Diverged as error:
            self.gave_up = error
        finite = {name: value for name, value in fp8.metrics().items() if math.isfinite(value)}
        return finite, fallen

    def stop_if_given_up(self) -> None:
        """Raise Diverged where no scale, or no layer in FP8, is left."""
        if self.gave_up is not None:
            raise self.gave_up

    # -- checkpoints ----------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything a resume needs besides the weights, as JSON."""
        state: dict[str, Any] = {}
        if self.scaler is not None:
            state["loss_scale"] = self.scaler.state()
        if self.float8 is not None:
            state["fp8"] = self.float8.state()
        return state

    def load(self, state: Mapping[str, Any], where: str) -> None:
        """Restore what `state` gave.

        Raises RecipeError for a state without what this precision needs: another precision's.
        """
        missing = [name for name in self.state() if name not in state]
        if missing:
            expected = (
                f"a checkpoint of {self._settings.precision}. Say the precision that it was "
                "written with, or start over (--fresh)"
            )
            raise RecipeError(Problem(where, expected, f"no {' and no '.join(missing)} in it"))
        if self.scaler is not None:
            self.scaler.load(state["loss_scale"])
        if self.float8 is not None:
            self.float8.load(state["fp8"])
