"""Optimizers over a group of runs: every tensor has a leading axis of runs.

Limits of the doctor are set on some of them and judged on others, see `benchmarks.doctor`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The usual rate of each at width 32; runs differ from it by 0.5 to 1.6 times.
RATES = {
    **{"adamw": 6e-3, "adam95": 6e-3, "lion": 1.2e-3, "sgd": 0.6},
    **{"adagrad": 0.03, "adafactor": 6e-3, "rmsprop": 3e-3, "muon": 0.02},
}
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: coefficients of the quintic


class Optimizer:
    """One of `RATES` over a group; `rate` [runs] is each run's own."""

    def __init__(self, kind: str, tensors: dict[str, Tensor]) -> None:
        self.kind, self.tensors, self.updates = kind, tensors, 0
        self.first = {name: torch.zeros_like(one) for name, one in tensors.items()}
        self.second = {name: torch.zeros_like(one) for name, one in tensors.items()}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], rate: Tensor, decay: float) -> None:
        self.updates += 1
        for name, tensor in self.tensors.items():
            each = rate.reshape(-1, *[1] * (tensor.dim() - 1))
            move = self._move(name, gradients[name])
            tensor.mul_(1 - each * decay).sub_(each * move)

    def _move(self, name: str, gradient: Tensor) -> Tensor:
        first, kind = self.first[name], self.kind
        if kind == "sgd":
            return first.mul_(0.9).add_(gradient) * 0.1
        if kind == "lion":
            move = (0.9 * first + 0.1 * gradient).sign()
            first.mul_(0.99).add_(gradient, alpha=0.01)
            return move
        if kind == "muon" and "." in name:  # matrices of a layer and their adapters
            first.mul_(0.95).add_(gradient)
            return orthogonal(gradient + 0.95 * first)
        if kind == "adagrad":
            return gradient / self.second[name].addcmul_(gradient, gradient).sqrt().add(1e-8)
        if kind == "rmsprop":
            second = self.second[name].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            return gradient / (second / (1 - 0.99**self.updates)).sqrt_().add_(1e-8)
        if kind == "adafactor":
            return self._factored(name, gradient)
        second, beta2 = self.second[name], 0.95 if kind == "adam95" else 0.999
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        rooted = (second / (1 - beta2**self.updates)).sqrt_().add_(1e-8)
        move = first / (1 - 0.9**self.updates) / rooted
        return move * 0.3 if kind == "muon" else move

    def _factored(self, name: str, gradient: Tensor) -> Tensor:
        """Second moment as rows times columns, the move cut to a root mean square of 1."""
        second = self.second[name]
        kept = 1.0 - self.updates**-0.8
        second.mul_(kept).addcmul_(gradient, gradient, value=1.0 - kept)
        rows, columns = second.mean(-1, keepdim=True), second.mean(-2, keepdim=True)
        whole = rows.mean(-2, keepdim=True).clamp_(min=1e-30)
        move = gradient * (rows * columns / whole).add_(1e-30).rsqrt_()
        size = move.square().mean((-2, -1), keepdim=True).sqrt_()
        return move / size.clamp_(min=1.0)


def orthogonal(matrix: Tensor) -> Tensor:
    """[runs, n, m] with singular values near 1, scaled to the size of an Adam move."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix.shape[-1] > matrix.shape[-2]
    x = matrix if wide else matrix.mT
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.mT) * max(matrix.shape[-2:]) ** 0.5 * 0.2
