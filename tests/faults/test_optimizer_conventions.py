"""Known faults of optimizers: which momentum, whose clock, a norm of zero."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from lehr.training.muon import COEFFICIENTS, orthogonal
from lehr.training.optimizers import OptimizerSettings, make_optimizer, set_rate
from lehr.training.state import load_optimizer, optimizer_tensors


def one(value: float = 0.0) -> dict[str, Parameter]:
    return {"layer.weight": Parameter(torch.full((1, 1), value, dtype=torch.float64))}


def pull(optimizer: torch.optim.Optimizer, weights: dict[str, Parameter], rate: float) -> float:
    """One update with a gradient of 1; how far the weight moved."""
    before = weights["layer.weight"].item()
    weights["layer.weight"].grad = torch.ones(1, 1, dtype=torch.float64)
    set_rate(optimizer, rate)
    optimizer.step()
    return before - weights["layer.weight"].item()


@pytest.mark.parametrize("b", [0.5, 0.9, 0.99])
def test_momentum_adds_gradients_up_and_does_not_average_them(b: float) -> None:
    """The trace m = b m + g ends 1 / (1 - b) times as fast as the mean m = b m + (1 - b) g.

    A recipe for one of them is wrong for the other by that factor: ours is torch's, the trace.
    """
    weights = one()
    optimizer = make_optimizer(weights, OptimizerSettings("sgd", momentum=b))
    moved = [pull(optimizer, weights, 0.1) for _ in range(2000)]
    mean, averaged = 0.0, []
    for _ in range(2000):
        mean = b * mean + (1 - b) * 1.0
        averaged.append(0.1 * mean)
    assert moved[0] == pytest.approx(0.1), "no dampening: the first step is the plain one"
    assert averaged[0] == pytest.approx(0.1 * (1 - b))
    assert moved[-1] / averaged[-1] == pytest.approx(1 / (1 - b))


@pytest.mark.parametrize("kind", ["adamw", "adam", "adam_l2"])
def test_the_clock_of_adam_goes_on_also_over_a_save(kind: str) -> None:
    """A constant gradient moves the weight by the rate, always. With the clock frozen at 1 (the
    fault: a step count that is not kept) the correction of the first update stays, and later
    updates are sqrt(1 - 0.95) / (1 - 0.9) = 2.24 times too large."""
    weights = one()
    optimizer = make_optimizer(weights, OptimizerSettings(kind))
    moved = [pull(optimizer, weights, 1e-3) for _ in range(100)]
    kept = {name: value.clone() for name, value in optimizer_tensors(optimizer).items()}
    again = make_optimizer(weights, OptimizerSettings(kind))
    load_optimizer(again, kept)
    moved += [pull(again, weights, 1e-3) for _ in range(100)]
    assert moved == pytest.approx([1e-3] * 200, rel=1e-6)

    frozen = make_optimizer(weights, OptimizerSettings(kind))
    faulty = []
    for _ in range(200):
        for state in frozen.state.values():
            state["step"].zero_()
        faulty.append(pull(frozen, weights, 1e-3))
    assert faulty[-1] / faulty[0] == pytest.approx(2.236, abs=0.01)


def test_a_gradient_of_zero_has_no_direction() -> None:
    """Divided by its norm it is NaN, which the published three lines would spread."""
    for shape in ((8, 3), (3, 8), (4, 4)):
        zero = torch.zeros(shape)
        assert torch.equal(orthogonal(zero, torch.float32), zero)
        assert bool((zero / zero.norm()).isnan().all()), "the fault"


def test_a_tall_matrix_is_a_wide_one_on_its_side() -> None:
    """The Gram matrix is taken on the short side: the long one gives the same, for more work."""
    stream = torch.Generator().manual_seed(0)
    tall = torch.randn(24, 5, generator=stream, dtype=torch.float64)
    found = orthogonal(tall, torch.float64)
    assert torch.equal(found, orthogonal(tall.T, torch.float64).T)
    x = tall / tall.norm()
    for _ in range(5):
        first, second, third = COEFFICIENTS
        gram = x @ x.T  # 24 x 24
        x = first * x + (second * gram + third * gram @ gram) @ x
    torch.testing.assert_close(found, x, rtol=0, atol=1e-12)
