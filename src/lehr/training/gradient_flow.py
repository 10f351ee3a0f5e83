"""Watching the gradients of a run: what is missing, what reaches each layer, how far it moves.

The arithmetic of the verdict is in `layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import Parameter

from lehr.training import events
from lehr.training.gradients import squared
from lehr.training.layers import SHORTEST, LayerFlow, judge, layers_of
from lehr.training.metrics import gather
from lehr.training.state import copied


def missing(trained: Mapping[str, Parameter]) -> tuple[str, ...]:
    """Trained tensors that a backward pass left without a gradient, on every rank."""
    mine = [name for name, parameter in trained.items() if parameter.grad is None]
    everywhere = set.intersection(*(set(names) for names in gather(mine)))
    return tuple(name for name in mine if name in everywhere)


@dataclass(frozen=True)
class _Begun:
    update: int
    before: Mapping[str, Tensor]
    gradients: Mapping[str, float]
    dead: Mapping[str, float]


class GradientFlow:
    """Watches the gradients of a run: what is missing once, each layer every `every` updates."""

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, Parameter],
        every: int | None,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._trained, self._every, self._emit = trained, every, emit
        self._layers = layers_of(list(trained))
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self._units = {  # a row is a unit
            name for name, one in trained.items() if one.ndim > 1 and id(one) not in tables
        }
        self._looked = False

    def name_missing(self) -> None:
        """After the first backward pass, before ranks are summed: name what got no gradient."""
        if self._looked:
            return
        self._looked = True
        names = missing(self._trained)
        if names:
            self._emit(events.MissingGradient(names, len(self._trained)))

    def begin(self, update: int) -> _Begun | None:
        """Measure the gradients of an update that is about to be applied, where that is due."""
        if self._every is None or update % self._every:
            return None
        gradients = {layer: self._rms(names) for layer, names in self._layers.items()}
        dead = {layer: self._dead(names) for layer, names in self._layers.items()}
        return _Begun(update, copied(self._trained), gradients, dead)

    def end(self, begun: _Begun | None) -> dict[str, float]:
        """After the update: columns of metrics.jsonl, and an event with the verdict."""
        if begun is None:
            return {}
        layers = tuple(
            LayerFlow(
                layer,
                tuple(names),
                begun.gradients[layer],
                self._moved(names, begun.before),
                begun.dead[layer],
            )
            for layer, names in self._layers.items()
        )
        verdict = judge(self._of_matrices(begun.gradients))
        self._emit(events.GradientFlowMeasured(begun.update, layers, verdict))
        columns = {key: value for layer in layers for key, value in layer.columns().items()}
        if math.isfinite(verdict.factor):
            columns["flow.factor"] = verdict.factor
        return columns

    def _of_matrices(self, gradients: Mapping[str, float]) -> dict[str, float]:
        """Layers that hold a matrix: norms between them have gradients of another size."""
        found = {
            layer: value
            for layer, value in gradients.items()
            if any(name in self._units for name in self._layers[layer])
        }
        return found if len(found) >= SHORTEST else dict(gradients)

    def _rms(self, names: Sequence[str]) -> float:
        chosen = [name for name in names if name in self._units] or list(names)
        squares, count = 0.0, 0
        for name in chosen:
            gradient = self._trained[name].grad
            count += self._trained[name].numel()
            if gradient is not None:
                squares += squared(gradient)
        return math.sqrt(squares / count)

    def _dead(self, names: Sequence[str]) -> float:
        rows, without = 0, 0
        for name in names:
            if name not in self._units:
                continue
            gradient, count = self._trained[name].grad, len(self._trained[name])
            rows, without = rows + count, without + count
            if gradient is not None:  # the largest of a row: a quarter of the time of `any` of it
                without -= int(gradient.flatten(1).abs().amax(1).count_nonzero())
        return without / rows if rows else 0.0

    def _moved(self, names: Sequence[str], before: Mapping[str, Tensor]) -> float:
        change, size = 0.0, 0.0
        for name in names:
            size += squared(before[name])
            change += squared(before[name].sub_(self._trained[name].detach()))  # its last use
        if size == 0.0:
            return math.inf if change else 0.0
        return math.sqrt(change / size)
