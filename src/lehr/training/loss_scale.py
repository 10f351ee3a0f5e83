"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, §3.2).

fp16 has no value between 0 and 2⁻²⁴: gradients below 2⁻²⁵ vanish. The loss is multiplied by a
scale before the backward pass and the gradients are divided by it after, in fp32. A scale that
makes a gradient overflow is halved and that update is skipped; one that has been good for
`growth_interval` updates is doubled.

All scales are powers of two, so that scaling and unscaling are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lehr.errors import Diverged, Problem, RecipeError


@dataclass(frozen=True)
class LossScaleSettings:
    """Powers of two, but for `growth_interval`.

    init             scale of the first update
    growth_interval  applied updates in a row after which the scale is doubled
    floor            smallest scale; an overflow there ends the run
    ceiling          largest scale: without it, gradients of 0 would raise it for ever
    """

    init: float = 2.0**16
    growth_interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24

    def problems(self) -> list[Problem]:
        """Everything that is wrong with these values."""
        problems = []
        for name in ("init", "floor", "ceiling"):
            if not _is_power_of_two(getattr(self, name)):
                expected = "a power of two: then scaling is exact"
                problems.append(Problem(f"loss_scale.{name}", expected, getattr(self, name)))
        interval = self.growth_interval
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            expected = "a whole number, at least 1"
            problems.append(Problem("loss_scale.growth_interval", expected, interval))
        if not problems and not self.floor <= self.init <= self.ceiling:
            expected = (
                f"floor <= init <= ceiling, not {self.floor:g}, {self.init:g}, {self.ceiling:g}"
            )
            problems.append(Problem("loss_scale", expected))
        return problems


@dataclass(frozen=True)
class ScaleStep:
    """What one attempt did to the scale.

    used     scale of this attempt's backward passes
    next     scale of the next attempt
    skipped  the update must not be applied
    names    tensors whose gradient is not finite, in the model's order
    """

    used: float
    next: float
    skipped: bool
    names: tuple[str, ...] = ()


class LossScaler:
    """Scale of the loss over a run. One attempt is

        scaler.scaled(loss).backward()     # each micro-batch
        ... sum over ranks ...
        scaler.unscale(trained)            # once, before norm, finite check and clip
        step = scaler.finish(names of non-finite gradients)
        if not step.skipped: clip, optimizer, EMA, schedule, counters

    An attempt that is given up half-way is forgotten by `abandon`. Calls out of order raise
    RuntimeError: they are mistakes of the loop, such as a clip of gradients still scaled.
    """

    def __init__(self, settings: LossScaleSettings | None = None) -> None:
        """Raises RecipeError with all problems of the settings."""
        self.settings = settings or LossScaleSettings()
        if problems := self.settings.problems():
            raise RecipeError(problems)
        self.scale = self.settings.init
        self.good_updates = 0  # in a row at this scale
        self.skips = 0
        self._phase = "idle"  # idle -> scaled -> unscaled -> idle

    def scaled(self, loss: Tensor) -> Tensor:
        """loss × scale, in fp32: call backward on it."""
        if self._phase == "unscaled":
            raise RuntimeError("a backward pass after unscale: its gradients would stay scaled")
        self._phase = "scaled"
        return loss.float() * self.scale if loss.dtype.itemsize < 4 else loss * self.scale

    def unscale(self, trained: Mapping[str, Parameter]) -> None:
        """Divide every gradient by the scale that its loss had, in place.

        Raises RecipeError for a gradient in fp16: dividing there would lose it again.
        """
        if self._phase != "scaled":
            raise RuntimeError("unscale follows the backward passes of an attempt, once")
        narrow = [
            Problem(name, "fp32 for a tensor trained with fp16", str(value.grad.dtype))
            for name, value in trained.items()
            if value.grad is not None and value.grad.dtype.itemsize < 4
        ]
        if narrow:
            raise RecipeError(narrow)
        for value in trained.values():
            if value.grad is not None:
                value.grad.mul_(1.0 / self.scale)
        self._phase = "unscaled"

    def require_unscaled(self, what: str) -> None:
        """Raise RuntimeError where `what` (clip, norm) would see gradients still scaled."""
        if self._phase == "scaled":
            raise RuntimeError(f"{what} before unscale: gradients are {self.scale:g} times too big")

    def finish(self, nonfinite: Sequence[str]) -> ScaleStep:
        """End the attempt and move the scale; `nonfinite` names tensors, in the model's order.

        Raises Diverged where a gradient is not finite at the smallest scale: no scale helps.
        """
        if self._phase != "unscaled":
            raise RuntimeError("finish follows unscale: the finite check is made on true gradients")
        self._phase = "idle"
        used = self.scale
        if nonfinite:
            self.skips += 1
            self.good_updates = 0
            if used <= self.settings.floor:
                raise Diverged(_at_the_floor(nonfinite, used))
            self.scale = used / 2
            return ScaleStep(used, self.scale, True, tuple(nonfinite))
        self.good_updates += 1
        if self.good_updates >= self.settings.growth_interval:
            self.scale = min(used * 2, self.settings.ceiling)
            self.good_updates = 0
        return ScaleStep(used, self.scale, False)

    def abandon(self) -> None:
        """Forget an attempt that was interrupted, or whose forward pass already failed."""
        self._phase = "idle"

    def metrics(self) -> dict[str, float]:
        """Columns for metrics.jsonl: the next attempt's scale, and skips since the start."""
        return {"loss_scale": self.scale, "loss_scale_skips": float(self.skips)}

    def state(self) -> dict[str, Any]:
        """Everything a resume needs, as JSON."""
        return {"scale": self.scale, "good_updates": self.good_updates, "skips": self.skips}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave. Raises RecipeError for a state that cannot be one."""
        scale, good, skips = (state.get(name) for name in ("scale", "good_updates", "skips"))
        within = _is_power_of_two(scale) and (
            self.settings.floor <= float(scale or 0) <= self.settings.ceiling
        )
        if not within or not _is_count(good) or not _is_count(skips):
            expected = "a loss scale between floor and ceiling, with its counters"
            raise RecipeError(Problem("loss scale state", expected, dict(state)))
        self.scale = float(scale or 0)
        self.good_updates, self.skips = int(good or 0), int(skips or 0)
        self._phase = "idle"


def _at_the_floor(nonfinite: Sequence[str], scale: float) -> Problem:
    others = f", and {len(nonfinite) - 1} more" if len(nonfinite) > 1 else ""
    return Problem(
        f"gradient of {nonfinite[0]}{others}",
        f"finite at the smallest loss scale ({scale:g}). This tensor is the first that is not: "
        "use bf16 or fp32, a lower learning rate, or look at its layer with `lehr doctor`",
    )


def _is_power_of_two(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
