"""Averaged weights: an exponential moving average of what the optimizer leaves.

After applied update t > start_after, with n updates averaged before it:

    average = d average + (1 - d) weights        d = min(decay, (1 + n) / (10 + n))

Without the warm-up of d the average would hold the untrained weights for about
1 / (1 - decay) updates. Skipped updates changed no weight and do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lehr.errors import Problem
from lehr.training.schedules import is_number
from lehr.training.state import copied, put_back


@dataclass(frozen=True)
class AverageSettings:
    """How weights are averaged.

    decay        of the average; its memory is about 1 / (1 - decay) updates
    warmup       let the decay grow with the number of averaged updates, up to `decay`
    start_after  applied updates before the average begins (from the weights then)
    evaluate     evaluations and the weights that the model holds at the end are the
                 averaged ones. False: the average only follows, in the checkpoints
    buffers      floating buffers (running statistics): measure = those of batch norms are
                 measured anew for the averaged weights, others copied; copy = those of the
                 weights in training; average = averaged like weights. Integers are copied
    """

    decay: float = 0.999
    warmup: bool = True
    start_after: int = 0
    evaluate: bool = True
    buffers: str = "measure"

    def problems(self, updates: int) -> list[Problem]:
        """Everything that is wrong with these values for a run of `updates`."""
        problems = []
        if not is_number(self.decay) or not 0 < self.decay < 1:
            expected = "a number above 0 and below 1, such as 0.999"
            problems.append(Problem("ema.decay", expected, self.decay))
        start = self.start_after
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            problems.append(Problem("ema.start_after", "a whole number, at least 0", start))
        elif isinstance(updates, int) and start >= updates:
            expected = f"fewer than the {updates} updates of the run, or nothing is averaged"
            problems.append(Problem("ema.start_after", expected, start))
        if self.buffers not in ("measure", "copy", "average"):
            problems.append(Problem("ema.buffers", "measure, copy or average", self.buffers))
        return problems

    def decay_at(self, count: int) -> float:
        """The decay of the next update after `count` averaged ones.

        >>> [round(AverageSettings(0.9).decay_at(n), 3) for n in (0, 1, 80, 10_000)]
        [0.1, 0.182, 0.9, 0.9]
        """
        return min(self.decay, (1 + count) / (10 + count)) if self.warmup else self.decay


class Average:
    """The average of some tensors, in their own precision (fp32, or float64).

    trained  what is trained and nothing else: where an adapter trains, the average is one
    buffers  running statistics
    count    averaged updates; at 0 the weights themselves are used
    """

    def __init__(
        self,
        settings: AverageSettings,
        trained: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self.settings = settings
        self.count = 0
        self._followed = {f"parameter.{name}": value for name, value in trained.items()}
        if settings.buffers == "average":
            self._followed |= {
                f"buffer.{name}": value
                for name, value in buffers.items()
                if value.is_floating_point()
            }
        self._shadow: dict[str, Tensor] = {}

    @property
    def in_use(self) -> bool:
        """Whether evaluations and the end of the run see the average."""
        return self.settings.evaluate and self.count > 0

    def begin(self) -> None:
        """Begin from the weights as they are now."""
        self.count = 0
        self._shadow = copied(self._followed)

    @torch.no_grad()
    def follow(self, update: int) -> None:
        """Take in the weights after applied update `update`, from 1."""
        if update <= self.settings.start_after:
            if update == self.settings.start_after:
                self.begin()
            return
        weight = 1.0 - self.settings.decay_at(self.count)
        for name, value in self._followed.items():
            self._shadow[name].lerp_(value, weight)
        self.count += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The averaged values stand in the model inside; the same bits as before outside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange both, with one tensor's memory: no copy of everything."""
        for name, value in self._followed.items():
            kept = value.detach().clone()
            value.copy_(self._shadow[name])
            self._shadow[name].copy_(kept)

    def put_into_model(self) -> None:
        """Leave the averaged values in the model for good."""
        put_back(self._followed, self._shadow, "average")

    def tensors(self) -> dict[str, Tensor]:
        """The average by name, for checkpoints; `count` belongs to it."""
        return self._shadow

    def load(self, tensors: Mapping[str, Tensor], count: int, where: str) -> None:
        """Go to where `tensors` and `count` were; RecipeError for another model's."""
        self._shadow = copied(self._followed)
        put_back(self._shadow, tensors, where)
        self.count = count
