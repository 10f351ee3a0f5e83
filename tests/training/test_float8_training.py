"""Tiny runs, paired: FP8 follows bf16; E5M2 for everything and a stale scale do not."""

from __future__ import annotations

import pytest
import torch
from benchmarks.float8_numbers import ARMS, cast_table, make_model, train, unscaled_zeros
from torch import nn
from torch.nn import functional

from lehr.training.float8_convert import convert
from lehr.training.float8_recipe import Float8Settings, HealthLimits
from lehr.training.loss_scale import LossScaler, LossScaleSettings


@pytest.fixture(scope="module")
def runs():
    arms = ("bf16", "fp8 current", "fp8 delayed", "e5m2 everywhere", "stale scale")
    return {arm: train(arm, seed=0, updates=80, width=32, batch=128) for arm in arms}


def test_fp8_follows_bf16(runs) -> None:
    for arm in ("fp8 current", "fp8 delayed"):
        assert abs(runs[arm].excess - runs["bf16"].excess) < 0.02
        assert runs[arm].sqnr_db > 20


def test_what_is_wrong_on_purpose_is_worse(runs) -> None:
    good = runs["fp8 current"]
    assert runs["e5m2 everywhere"].gradient_error > 1.3 * good.gradient_error
    assert runs["e5m2 everywhere"].sqnr_db < good.sqnr_db
    assert runs["stale scale"].excess > good.excess + 0.2
    assert runs["stale scale"].gradient_error > 0.9


def test_a_run_is_a_function_of_its_seed() -> None:
    small = {"updates": 3, "width": 8, "batch": 16}
    torch.rand(7)
    first = train("fp8 delayed", 1, **small)
    torch.rand(5)
    assert train("fp8 delayed", 1, **small) == first != train("fp8 delayed", 2, **small)
    assert "fp32" in ARMS


def test_a_stale_scale_makes_layers_fall_back_instead() -> None:
    """The default limits catch the arm that the benchmark leaves alone."""
    model = make_model(0, 16)
    everywhere = {"keep_first_blocks": 0, "keep_last_blocks": 0, "smallest_features": 1}
    fp8 = convert(
        model,
        Float8Settings(scaling="delayed", window=10**6, measure_every=1, **everywhere,
                       limits=HealthLimits(patience=2)),
    )  # fmt: skip
    state = fp8.state()
    state["layers"]["1"]["histories"]["weight"] = {"amax": [1e9]}
    fp8.load(state)
    events = []
    for update in range(1, 4):
        inputs = torch.arange(32)
        functional.cross_entropy(model(inputs), inputs).backward()
        events += fp8.applied(update)
    assert [(e.update, e.layer, e.operand) for e in events] == [(2, "1", "weight")]
    assert fp8.active == ("4", "7")


def test_the_published_casts_and_the_flushed_gradients() -> None:
    rows = dict(cast_table())
    assert rows["none"]["e4m3"] == pytest.approx(31.5, abs=0.2)
    assert rows["100000 sigma"]["e4m3"] == pytest.approx(18.0, abs=0.5)
    assert rows["100 sigma"]["int8"] < 15
    assert unscaled_zeros() > 0.999


def test_fp16_learns_tiny_gradients_only_with_the_scaler() -> None:
    """True gradients near 2⁻²⁷ through fp16 products: at scale 1 nothing moves."""

    def moved(init: float) -> float:
        torch.manual_seed(0)
        layer = nn.Linear(8, 4)
        start = layer.weight.detach().clone()
        scaler = LossScaler(LossScaleSettings(init=init))
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, eps=1e-12)
        x = torch.full((2, 8), 2.0**-12, dtype=torch.float16)
        for _ in range(3):
            optimizer.zero_grad()
            out = functional.linear(x, layer.weight.half(), layer.bias.half())
            scaler.scaled(out.float().sum() * 2.0**-16).backward()
            scaler.unscale(dict(layer.named_parameters()))
            if not scaler.finish(()).skipped:
                optimizer.step()
        return float((layer.weight.detach() - start).abs().max())

    assert moved(1.0) == 0.0
    assert moved(2.0**16) > 0.2
