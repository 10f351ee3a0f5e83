"""Reverse-mode differentiation in numpy, small enough to be believed: an independent oracle.

Each operation writes its result and, on the tape, how a gradient of the result becomes
gradients of its inputs (vector-Jacobian products). Backward reads the tape from the end.
It shares no line with torch, so a gradient that both agree on is right or twice wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray


class Tape:
    """A record of operations on float64 arrays."""

    def __init__(self) -> None:
        self._back: list[Callable[[], None]] = []

    def variable(self, value) -> Variable:
        """An input whose gradient is wanted."""
        return Variable(np.array(value, dtype=np.float64), self)

    def backward(self, result: Variable) -> None:
        """Fill `gradient` of everything that `result`, a number, was made from."""
        assert result.value.shape == ()
        result.gradient = np.ones(())
        for back in reversed(self._back):
            back()


class Variable:
    """A value on a tape. `gradient`: of the result that `Tape.backward` was asked for."""

    def __init__(self, value: Array, tape: Tape) -> None:
        self.value, self.tape = value, tape
        self.gradient = np.zeros_like(value)

    def _made(self, value: Array, *inputs: tuple[Variable, Callable[[Array], Array]]) -> Variable:
        made = Variable(np.asarray(value), self.tape)

        def back() -> None:
            for one, of in inputs:
                one.gradient = one.gradient + _summed_to(of(made.gradient), one.value.shape)

        self.tape._back.append(back)
        return made

    def __add__(self, other: Variable) -> Variable:
        return self._made(self.value + other.value, (self, lambda g: g), (other, lambda g: g))

    def __mul__(self, other: Variable) -> Variable:
        a, b = self.value, other.value
        return self._made(a * b, (self, lambda g: g * b), (other, lambda g: g * a))

    def __matmul__(self, other: Variable) -> Variable:
        a, b = self.value, other.value
        return self._made(a @ b, (self, lambda g: g @ b.T), (other, lambda g: a.T @ g))

    def tanh(self) -> Variable:
        result = np.tanh(self.value)
        return self._made(result, (self, lambda g: g * (1 - result**2)))

    def rows(self, index) -> Variable:
        """Rows of a table; a row that is taken twice gets both gradients."""

        def back(g: Array) -> Array:
            found = np.zeros_like(self.value)
            np.add.at(found, index, g)
            return found

        return self._made(self.value[index], (self, back))

    def normalised(self, eps: float = 1e-5) -> Variable:
        """Layer norm over the last axis, without weight and bias."""
        x = self.value
        scale = 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
        y = (x - x.mean(-1, keepdims=True)) * scale

        def back(g: Array) -> Array:
            return scale * (g - g.mean(-1, keepdims=True) - y * (g * y).mean(-1, keepdims=True))

        return self._made(y, (self, back))

    def cross_entropy(self, targets) -> Variable:
        """Sum over rows of -log softmax(row)[target]."""
        x = self.value - self.value.max(-1, keepdims=True)
        log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
        row = np.arange(len(targets))

        def back(g: Array) -> Array:
            found = np.exp(log_p)
            found[row, targets] -= 1
            return g * found

        return self._made(-log_p[row, targets].sum(), (self, back))


def _summed_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """A gradient of a broadcast value, as one of the value itself."""
    while gradient.ndim > len(shape):
        gradient = gradient.sum(0)
    for axis, size in enumerate(shape):
        if size == 1 and gradient.shape[axis] != 1:
            gradient = gradient.sum(axis, keepdims=True)
    return gradient
