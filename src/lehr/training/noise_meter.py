"""Measuring the gradient noise scale of a run; the arithmetic is in `noise_scale`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from lehr.errors import Problem, RecipeError
from lehr.training import events
from lehr.training.gradients import squared
from lehr.training.metrics import gather
from lehr.training.noise_scale import (
    NOISE,
    SIGNAL,
    WINDOW,
    NoisePair,
    noise_scale,
    pair_of,
    pairs_of,
)


class NoiseMeter:
    """Measures the pair of every `every`-th update of a run.

    It reads gradients and changes none, and takes the memory of one more gradient. What
    earlier updates gave is read back from metrics.jsonl, so a resumed run goes on exactly.
    """

    def __init__(
        self,
        trained: Mapping[str, Parameter],
        every: int | None,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._trained, self._every, self._emit = trained, every, emit
        self._pairs: list[NoisePair] = []
        self._before: dict[str, Tensor] = {}
        self._squares: list[float] = []
        self._sizes: list[float] = []
        self._weights: list[float] = []
        self._examples = 0.0

    def recall(self, path: Path) -> None:
        """Go on from the lines that a run has written."""
        if self._every is None or not path.exists():
            return
        rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        self._pairs = pairs_of(rows)

    def seen(self, update: int) -> Callable[[int, float], None] | None:
        """What is called after each backward pass with (examples, weight), where it is due."""
        self._before = {}
        self._squares, self._sizes, self._weights = [], [], []
        return None if self._every is None or update % self._every else self._after_backward

    def columns(self, update: int, denominator: float) -> dict[str, float]:
        """The update's pair, and the scale so far; the summed gradients must still be there.

        Raises RecipeError where the first one was one micro-batch: it has no second size.
        """
        if self._every is None or update % self._every:
            return {}
        of_ranks = gather([self._squares, self._sizes, self._weights])
        squares, sizes, weights = (
            [value for one in of_ranks for value in one[part]] for part in range(3)
        )
        self._before = {}
        if len(squares) < 2 and self._pairs:
            return {}  # a last update that is smaller than the others
        if len(squares) < 2:
            expected = (
                "two micro-batches in an update: lower micro_batch, or raise batch_size; one "
                "gradient cannot be told into signal and noise"
            )
            raise RecipeError(Problem("noise_scale_every", expected, len(squares)))
        whole = sum(squared(one.grad) for one in self._trained.values() if one.grad is not None)
        shares = [weight / denominator for weight in weights]
        # A micro-batch's gradient was divided by the weight of the whole update.
        means = [square / share**2 for square, share in zip(squares, shares, strict=True)]
        pair = pair_of(whole, means, sizes, shares)
        self._examples = sum(sizes)
        self._pairs = [*self._pairs, pair][-WINDOW:]
        columns = {SIGNAL: pair.signal, NOISE: pair.noise}
        found = noise_scale(self._pairs)
        if found is not None and math.isfinite(found.scale):
            columns["noise.scale"] = found.scale
        return columns

    def conclude(self, update: int) -> None:
        """At the end of a run: the scale, its interval, and what it means for the batch size."""
        found = noise_scale(self._pairs) if self._every is not None else None
        if found is not None and self._examples:
            advice = found.advice(self._examples)
            self._emit(events.NoiseScaleMeasured(update, found, self._examples, advice))

    @torch.no_grad()
    def _after_backward(self, examples: int, weight: float) -> None:
        square = 0.0
        for name, one in self._trained.items():
            if one.grad is None:
                continue
            before = self._before.get(name)
            if before is None:
                square += squared(one.grad)
                self._before[name] = one.grad.clone()
            else:  # in place: a fresh tensor costs more than the arithmetic
                square += squared(before.sub_(one.grad))
                before.copy_(one.grad)
        self._squares.append(square)
        self._sizes.append(examples)
        self._weights.append(weight)
