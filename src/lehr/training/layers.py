"""Backpropagation made visible: what reaches each layer, how far it moves, what is dead.

A layer is what stands under one number of a tensor's name (`model.layers.3`), else one
module. Its gradient is the root mean square over its matrices' elements, before clipping:
layers of other sizes compare. Over a stack of n layers a straight line through the
logarithms says by which factor the gradient changes from the last layer to the first:

    log rms_i = a + b i        factor = exp(-b (n - 1))

Below 1 / LIMIT the first layers hardly learn (vanishing), above LIMIT their step is far
larger than the last ones' (exploding); Hochreiter 1991, Glorot and Bengio 2010.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIMIT = 1e3  # between the ends of a stack; healthy networks stay within about 30
SHORTEST = 3  # layers that a line is put through


@dataclass(frozen=True)
class LayerFlow:
    """One layer in one update.

    names     its trained tensors
    gradient  root mean square of the gradient's elements
    ratio     L2 norm of the change over that of the weights before; about 1e-3 is usual
    dead      share of its matrices' rows (units) without any gradient in this update; rows
              of embeddings are tokens that did not occur, and do not count
    """

    name: str
    names: tuple[str, ...]
    gradient: float
    ratio: float
    dead: float

    def columns(self) -> dict[str, float]:
        """As columns of metrics.jsonl."""
        values = ("gradient", "ratio", "dead")
        return {f"flow.{self.name}.{value}": getattr(self, value) for value in values}


@dataclass(frozen=True)
class FlowVerdict:
    """healthy | vanishing | exploding | blocked (no gradient at all) | short (too few layers).

    factor  first layer's gradient over the last one's, by the fitted line; NaN where blocked
    layers  the blocked ones, else the stack
    """

    kind: str
    factor: float
    layers: tuple[str, ...]

    def __str__(self) -> str:
        if self.kind == "blocked":
            return f"no gradient reaches {', '.join(self.layers[:3])}"
        if self.kind == "short":
            return f"fewer than {SHORTEST} layers: nothing to compare"
        ends = f"the first layer's gradient is {self.factor:.3g} times the last one's"
        return f"{self.kind}: {ends} ({self.layers[0]} to {self.layers[-1]})"


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to.

    >>> layer_of("model.layers.12.mlp.up.weight"), layer_of("embed.weight"), layer_of("0.bias")
    ('model.layers.12', 'embed', '0')
    """
    numbered = re.match(r"(.*?(?:^|\.)\d+)(\.|$)", name)
    if numbered:
        return numbered.group(1)
    return name.rpartition(".")[0] or name


def layers_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Tensor names by layer; layers in the order of their first tensor, numbered ones sorted."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(layer_of(name), []).append(name)
    place: dict[str, int] = {}
    for layer in found:
        place.setdefault(_stack_of(layer), len(place))
    ordered = sorted(found, key=lambda layer: (place[_stack_of(layer)], _number_of(layer)))
    return {layer: found[layer] for layer in ordered}


def judge(gradients: Mapping[str, float]) -> FlowVerdict:
    """The verdict on root mean squares by layer, first layer first.

    The longest numbered stack decides; without one of three layers, all layers.

    >>> str(judge({f"layers.{i}": 10.0 ** (2 * i) for i in range(3)}))
    "vanishing: the first layer's gradient is 0.0001 times the last one's (layers.0 to layers.2)"
    """
    stacks: dict[str, list[str]] = {}
    for layer in gradients:
        if _number_of(layer) >= 0:
            stacks.setdefault(_stack_of(layer), []).append(layer)
    stack = max(stacks.values(), key=len, default=[])
    if len(stack) < SHORTEST:
        stack = list(gradients)
    blocked = tuple(layer for layer in stack if gradients[layer] == 0.0)
    if blocked:
        return FlowVerdict("blocked", math.nan, blocked)
    if len(stack) < SHORTEST:
        return FlowVerdict("short", math.nan, tuple(stack))
    logs = [math.log(gradients[layer]) for layer in stack]
    middle, mean = (len(logs) - 1) / 2, sum(logs) / len(logs)
    above = sum((i - middle) * (value - mean) for i, value in enumerate(logs))
    slope = above / sum((i - middle) ** 2 for i in range(len(logs)))
    drop = -slope * (len(logs) - 1)
    kind = "healthy"
    if abs(drop) > math.log(LIMIT):
        kind = "vanishing" if drop < 0 else "exploding"
    return FlowVerdict(kind, math.exp(max(-700.0, min(700.0, drop))), tuple(stack))


def _stack_of(layer: str) -> str:
    return layer.rpartition(".")[0] if _number_of(layer) >= 0 else layer


def _number_of(layer: str) -> int:
    last = layer.rpartition(".")[2]
    return int(last) if last.isdigit() else -1
