"""Batch norm: one step of the running statistics per applied update, whatever the cut.

With μ and σ² (unbiased) of all values that a norm saw in the whole update, over all
micro-batches and ranks, and its momentum m (Ioffe and Szegedy 2015, arXiv 1502.03167):

    running mean = (1 - m) running mean + m μ        running variance likewise with σ²

torch takes one such step per forward pass instead: accumulation takes several, and
recomputation counts each micro-batch twice. Here a forward pass changes no statistics; what
it saw is added up and applied with the update, so a skipped update leaves them alone.
The normalisation itself is of the micro-batch, so the gradient depends on the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lehr import ranks
from lehr.errors import Problem, RecipeError
from lehr.training import events

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
ALONE = "a batch of one example: its statistics are its own, and no other example's"
UNLIKE = "an evaluation with the statistics of its batches: scores depend on their cut"


@dataclass(frozen=True)
class BatchNormSettings:
    """How the batch norms of a model are treated; without effect where it has none.

    freeze_after        applied updates after which they use their running statistics in
                        training too, and keep them; 0 = from the start, None = never
    gap                 repeat each evaluation with the statistics of its own batches and
                        report the difference; costs that second evaluation
    reestimate_updates  updates of data (the first of the run) over which the statistics are
                        measured for averaged weights
    """

    freeze_after: int | None = None
    gap: bool = True
    reestimate_updates: int = 8

    def problems(self) -> list[Problem]:
        """Everything that is wrong with these values."""
        found = []
        freeze = self.freeze_after
        if freeze is not None and (not _is_whole(freeze) or freeze < 0):
            expected = "a whole number of updates, at least 0, or None"
            found.append(Problem("batch_norm.freeze_after", expected, freeze))
        if not _is_whole(self.reestimate_updates) or self.reestimate_updates < 1:
            expected = "a whole number, at least 1"
            found.append(
                Problem("batch_norm.reestimate_updates", expected, self.reestimate_updates)
            )
        return found


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of a model that keep running statistics, by name.

    Raises RecipeError for a SyncBatchNorm: its variance has another count than its batch.
    """
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if isinstance(module, nn.SyncBatchNorm):
            expected = "a plain batch norm: running statistics are pooled over ranks anyway"
            raise RecipeError(Problem(name or "model", expected, type(module).__name__))
        if module.running_mean is not None:
            found[name] = module
    return found


def micro_batch_problems(model: nn.Module, micro_batch: object) -> list[Problem]:
    """The refusal of `micro_batch: auto` where the cut changes what is learnt."""
    norms = batch_norms(model)
    if micro_batch != "auto" or not norms:
        return []
    first = next(iter(norms))
    expected = (
        f"a number: the model has batch norms ({first or 'itself'}), whose statistics are of a "
        "micro-batch, so that the free memory would decide what is learnt"
    )
    return [Problem("micro_batch", expected, micro_batch)]


@dataclass
class Pool:
    """Sums over values of one batch norm: n [], Σx [C], Σx² [C], in float64."""

    count: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Pool:
        """Of no values. Devices without float64 sum in float32."""
        wide = torch.float64 if like.device.type in ("cpu", "cuda") else torch.float32
        zeros = torch.zeros(like.shape, dtype=wide, device=like.device)
        return cls(zeros.new_zeros(()), zeros, zeros.clone())

    def add(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Take in `count` values a channel with this mean and unbiased variance [C]."""
        mean, variance = mean.to(self.total.dtype), variance.to(self.total.dtype)
        self.count += count
        self.total += count * mean
        self.squares += (count - 1) * variance + count * mean.square()

    def over_ranks(self) -> Pool:
        """The sums over all ranks."""
        return Pool(*(ranks.add_up(part) for part in (self.count, self.total, self.squares)))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and unbiased variance [C] of all values.

        >>> pool = Pool.empty(torch.zeros(1))
        >>> pool.add(2, torch.tensor([1.0]), torch.tensor([2.0]))    # 0, 2
        >>> pool.add(2, torch.tensor([5.0]), torch.tensor([2.0]))    # 4, 6
        >>> [round(value.item(), 3) for value in pool.statistics()]  # of 0, 2, 4, 6
        [3.0, 6.667]
        """
        mean = self.total / self.count
        spread = (self.squares - self.count * mean.square()).clamp_min(0.0)
        return mean, spread / (self.count - 1)


class BatchNorms:
    """The batch norms of a model in training: their pooled statistics, modes and alarms.

    Falsy where the model has none; every method then does nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: BatchNormSettings,
        emit: Callable[[events.Event], None] = lambda event: None,
    ) -> None:
        self.settings = settings
        self.norms = batch_norms(model)
        self._without = {  # no running statistics: of the batch for good
            name
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) and module.running_mean is None
        }
        self._emit = emit
        self._names: dict[nn.Module, str] = {module: name for name, module in self.norms.items()}
        self._pools: dict[str, Pool] = {}
        self._phase = "ignore"  # or count, evaluate, as in training
        self._update = 0
        self._alone: set[str] = set()  # met a batch of one example
        self._told_alone = False
        self._unlike: set[str] = set()  # used statistics of the batch in an evaluation
        self._kept: dict[nn.Module, tuple[dict[str, Tensor], Any, bool]] = {}

    def __bool__(self) -> bool:
        return bool(self.norms)

    def frozen(self, update: int) -> bool:
        """Whether the statistics stay as they are after `update` applied updates."""
        after = self.settings.freeze_after
        return after is not None and update >= after

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, no forward pass moves the statistics."""
        handles = []
        for module in self.norms.values():
            handles.append(module.register_forward_pre_hook(self._before, prepend=True))
            # Recomputation leaves a forward pass by an exception as soon as it has enough.
            handles.append(module.register_forward_hook(self._after, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, update: int) -> None:
        """Before the forward passes of an attempt, after `update` applied updates."""
        self._update = update
        self._alone.clear()
        self._empty_pools()
        if self.frozen(update):
            for module in self.norms.values():
                module.eval()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Forward passes inside are part of the update; those of a backward pass are not."""
        self._phase = "count"
        try:
            yield
        finally:
            self._phase = "ignore"

    @torch.no_grad()
    def apply(self) -> dict[str, float]:
        """One step of the running statistics; columns of how far the update was from them."""
        shifts, ratios = [], []
        for name, module in self.norms.items():
            pool = self._pools[name].over_ranks()
            if pool.count <= 1:  # frozen, or reached by no forward pass
                continue
            mean, variance = pool.statistics()
            old_mean, old_variance, tracked = _buffers(module)
            safe = old_variance + module.eps
            shifts.append(((mean - old_mean).square() / safe).mean().sqrt())
            ratios.append(((variance + module.eps) / safe).log().abs().mean())
            tracked += 1
            momentum = 1.0 / tracked.item() if module.momentum is None else module.momentum
            old_mean.copy_(old_mean + momentum * (mean - old_mean))
            old_variance.copy_(old_variance + momentum * (variance - old_variance))
        self._empty_pools()
        columns = {} if not shifts else {
            "batch_norm.mean_shift": float(torch.stack(shifts).max()),
            "batch_norm.log_variance_ratio": float(torch.stack(ratios).max()),
        }  # fmt: skip
        if self._alone and not self._told_alone:
            self._told_alone = True
            self._emit(events.BatchNormAlarm(self._update + 1, ALONE, tuple(sorted(self._alone))))
        return columns

    def measure(
        self, evaluate: Callable[[int], Mapping[str, float]], update: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """An evaluation's values, and columns of the gap between the two modes.

        Raises an alarm where a batch norm used the statistics of its batch: then scores
        depend on how the items were batched.
        """
        self._unlike = set(self._without)
        values = self._evaluated(evaluate, update, "evaluate")
        if self._unlike:
            self._emit(events.BatchNormAlarm(update, UNLIKE, tuple(sorted(self._unlike))))
        if not self.norms or not values or not self.settings.gap or self._unlike:
            return values, {}
        as_in_training = self._evaluated(evaluate, update, "as in training")
        self._emit(events.BatchNormGap(update, values, as_in_training))
        first = next(iter(values))
        return values, {"batch_norm.gap": as_in_training[first] - values[first]}

    def reestimate(self, forwards: Iterable[Callable[[], object]]) -> int:
        """Measure the running statistics anew, pooled over all `forwards`; must be watched.

        Each runs the model on one batch of training data, of any size. Only batch norms are
        in train mode inside, so that dropout changes nothing; the caller sees to the rest.
        Returns how many batch norms were measured.
        """
        modes = {module: module.training for module in self.norms.values()}
        self._empty_pools()
        try:
            for module in self.norms.values():
                module.train()
            with torch.no_grad():
                for forward in forwards:
                    with self.counting():
                        forward()
        finally:
            for module, training in modes.items():
                module.train(training)
        measured = 0
        for name, module in self.norms.items():
            pool = self._pools[name].over_ranks()
            if pool.count > 1:
                mean, variance, _ = _buffers(module)
                for target, value in zip((mean, variance), pool.statistics(), strict=True):
                    target.copy_(value)
                measured += 1
        self._empty_pools()
        return measured

    @contextmanager
    def reestimated(self, forwards: Iterable[Callable[[], object]]) -> Iterator[None]:
        """Statistics measured by `forwards` inside; the same bits as before outside."""
        kept = [[buffer.clone() for buffer in _buffers(norm)] for norm in self.norms.values()]
        self.reestimate(forwards)
        try:
            yield
        finally:
            for module, buffers in zip(self.norms.values(), kept, strict=True):
                for target, buffer in zip(_buffers(module), buffers, strict=True):
                    target.copy_(buffer)

    # -- one forward pass -------------------------------------------------------

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Let the pass write into buffers of its own, which then hold what the batch was."""
        assert isinstance(module, _BatchNorm)
        values: Tensor = inputs[0]
        per_channel = values.numel() // values.shape[1]
        was_training = module.training
        if self._phase == "as in training" and per_channel > 1:
            module.training = True
        if not module.training:
            return
        if self._phase == "evaluate":
            self._unlike.add(self._names[module])
        if self._phase == "count":
            self._refuse_one_value(module, per_channel)
            if values.shape[0] == 1:
                self._alone.add(self._names[module])
        own = {name: module._buffers[name] for name in BUFFERS}
        self._kept[module] = (own, module.momentum, was_training)  # type: ignore[assignment]
        for name in BUFFERS:
            buffer = own[name]
            module._buffers[name] = None if buffer is None else torch.zeros_like(buffer)
        module.momentum = 1.0  # the buffers become the batch's own mean and variance

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        kept = self._kept.pop(module, None)
        if kept is None:
            return
        assert isinstance(module, _BatchNorm)
        mean, variance, _ = _buffers(module)
        own, module.momentum, module.training = kept
        module._buffers.update(own)
        if self._phase == "count":
            values: Tensor = inputs[0]
            count = values.numel() // values.shape[1]
            self._pools[self._names[module]].add(count, mean, variance)

    def _refuse_one_value(self, module: nn.Module, per_channel: int) -> None:
        if per_channel == 1:
            expected = (
                "at least 2 values a channel in every micro-batch: raise micro_batch, leave out "
                "a last batch of one, or freeze the batch norms (freeze_after: 0)"
            )
            where = f"batch norm {self._names[module]}, update {self._update + 1}"
            raise RecipeError(Problem(where, expected, 1))

    def _evaluated(
        self, evaluate: Callable[[int], Mapping[str, float]], update: int, phase: str
    ) -> dict[str, float]:
        self._phase = phase
        try:
            return {name: float(value) for name, value in evaluate(update).items()}
        finally:
            self._phase = "ignore"

    def _empty_pools(self) -> None:
        self._pools = {name: Pool.empty(_buffers(module)[0]) for name, module in self.norms.items()}


def _buffers(module: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance, tracked = (module._buffers[name] for name in BUFFERS)
    assert mean is not None and variance is not None and tracked is not None
    return mean, variance, tracked


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def reestimate_batch_norm(model: nn.Module, forwards: Iterable[Callable[[], object]]) -> int:
    """Measure the running statistics of a model's batch norms anew: other weights have others.

    As `BatchNorms.reestimate`, with the rest of the model in eval mode and all modes as
    before outside.
    """
    norms = BatchNorms(model, BatchNormSettings())
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with norms.watched():
            return norms.reestimate(forwards)
    finally:
        for module, training in modes:
            module.training = training
