"""Closed forms of the training core that belong to no single part's file."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from small_runs import Cycle, Small, lines_of, make_engine, rows
from torch.nn import Parameter

from lehr.streams import generator_for
from lehr.training.muon import orthogonal
from lehr.training.optimizers import OptimizerSettings, make_optimizer, set_rate
from lehr.training.schedules import Schedule

# --- optimizers -----------------------------------------------------------------------


def test_fifty_updates_are_those_of_torchs_plain_adamw() -> None:
    """Ours is fused and set up by groups; torch's reference loop has neither."""
    stream = generator_for("fifty")
    weights = {
        name: Parameter(torch.randn(shape, generator=stream))
        for name, shape in (("up.weight", (16, 8)), ("norm.weight", (8,)), ("up.bias", (16,)))
    }
    copies = {name: Parameter(value.detach().clone()) for name, value in weights.items()}
    ours = make_optimizer(weights, OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.1))
    groups = [
        {"params": [copies["up.weight"]], "weight_decay": 0.1},
        {"params": [copies["norm.weight"], copies["up.bias"]], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False, fused=False)
    assert ours.param_groups[0]["fused"]
    for _ in range(50):
        for name, value in weights.items():
            value.grad = torch.randn(value.shape, generator=stream)
            copies[name].grad = value.grad.clone()
        set_rate(ours, 1e-2)
        ours.step()
        theirs.step()
    for name, value in weights.items():
        torch.testing.assert_close(value, copies[name], rtol=0, atol=1e-6)


def test_the_quintic_of_muon_on_every_singular_value() -> None:
    """From 0.01 to 1 of the norm: 0.682 to 1.134. The second direction fills the norm up."""
    found = []
    for value in torch.linspace(0.01, 1.0, 400, dtype=torch.float64):
        rest = (1 - value.square()).clamp(min=0).sqrt()
        out = orthogonal(torch.diag(torch.stack([value, rest])), torch.float64)
        assert out[0, 1].abs() < 1e-12, "directions stay"
        found.append(float(out[0, 0]))
    assert min(found) == pytest.approx(0.682, abs=1e-3)
    assert max(found) == pytest.approx(1.134, abs=1e-3)


# --- schedules ------------------------------------------------------------------------


def test_the_ten_rates_of_another_convention() -> None:
    """Where the peak is held for one update after the warm-up, in our words: wsd."""
    rates = Schedule("wsd", warmup=2, decay=7, final=0.0).curve(1.0, 10)
    assert rates == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


@pytest.mark.parametrize("updates", [10, 57, 400])
@pytest.mark.parametrize("warmup", [1, 2, 5])
def test_sums_of_the_rates(updates: int, warmup: int) -> None:
    """w + 1 over 2, and the decay's n steps: a straight line and a half cosine sum up alike."""
    steps = updates - warmup  # below the peak
    for final in (0.0, 0.1):
        # Shares 1 to `steps` of steps + 1: the one at `final` would come after the run.
        falling = final * steps + (1 - final) * steps / 2
        expected = (warmup + 1) / 2 + falling
        for kind in ("linear", "cosine"):
            rates = Schedule(kind, warmup, final=final).curve(1.0, updates)
            assert sum(rates) == pytest.approx(expected, rel=1e-12), kind
    root = Schedule("wsd", warmup, decay=steps, shape="sqrt", final=0.0).curve(1.0, updates)
    by_hand = sum(1 - math.sqrt(i / (steps + 1)) for i in range(1, steps + 1))
    assert sum(root) == pytest.approx((warmup + 1) / 2 + by_hand, rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_no_rate_is_far_from_the_one_before(kind: str) -> None:
    """Continuity: a step is at most the warm-up's, or pi / 2 of the decay's mean step."""
    for updates in (50, 500):
        rates = Schedule(kind, 0.1, decay=0.5, final=0.0).curve(1.0, updates)
        largest = max(abs(b - a) for a, b in itertools.pairwise(rates))
        assert largest <= 10 / updates + 1e-12
        assert rates[0] == pytest.approx(10 / updates)


# --- accumulation ---------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 3, 5])
def test_uneven_micro_batches_are_one_batch_to_twelve_digits(tmp_path, micro_batch: int) -> None:
    """Float64, rows of 3 to 7 tokens: whatever the cut, the same gradient."""

    def gradient(size: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        engine = make_engine(
            tmp_path / str(size), 1, model=Small(dropout=0.0).double(), micro_batch=size,
            batches=Cycle(rows(12), 12), clip=None,
        )  # fmt: skip
        for name, value in engine.model.named_parameters():
            value.register_post_accumulate_grad_hook(
                lambda p, name=name: found.__setitem__(name, p.grad.clone())
            )
        engine.run()
        return found

    whole, cut = gradient(12), gradient(micro_batch)
    for name, value in whole.items():
        assert value.dtype == torch.float64 and float(value.norm()) > 1e-3
        assert float((value - cut[name]).abs().max()) <= 1e-12, name
    assert lines_of(tmp_path / "12")[0]["loss"] == pytest.approx(
        lines_of(tmp_path / str(micro_batch))[0]["loss"], abs=1e-12
    )
