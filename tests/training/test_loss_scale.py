"""The fp16 loss scaler: its sequence in closed form, its order of calls, its state."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from lehr.errors import Diverged, RecipeError
from lehr.training import gradients
from lehr.training.loss_scale import LossScaler, LossScaleSettings

INF = math.inf


def parameter(value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def attempt(scaler: LossScaler, weight: nn.Parameter, gradient: float) -> float:
    """One attempt whose true gradient is `gradient`; what the optimizer would see."""
    weight.grad = None
    scaler.scaled((weight * gradient).sum()).backward()
    scaler.unscale({"weight": weight})
    measured = gradients.measure({"weight": weight})
    scaler.finish(measured.nonfinite)
    assert weight.grad is not None
    return float(weight.grad)


def test_closed_form_sequence() -> None:
    scaler = LossScaler(LossScaleSettings(init=16.0, growth_interval=2))
    weight, scales, seen = parameter(), [], []
    for gradient in (1.0, 1.0, INF, 1.0, 1.0, 1.0):
        seen.append(attempt(scaler, weight, gradient))
        scales.append(scaler.scale)
    assert scales == [16, 32, 16, 16, 32, 32]
    assert scaler.skips == 1 and scaler.metrics() == {"loss_scale": 32, "loss_scale_skips": 1}
    # Also in the update after which the scale grows, gradients are divided by the scale they had.
    assert [value for value in seen if math.isfinite(value)] == [1.0] * 5


def test_small_gradients_survive_fp16_only_when_scaled() -> None:
    """A true gradient of 2⁻²⁶ passes through an fp16 product."""

    def gradient(scale: float) -> float:
        scaler = LossScaler(LossScaleSettings(init=scale))
        weight = parameter(1.0)
        product = weight.half() * torch.tensor([2.0**-13], dtype=torch.float16)
        scaler.scaled(product.float().sum() * 2.0**-13).backward()
        scaler.unscale({"weight": weight})
        assert weight.grad is not None
        return float(weight.grad)

    assert gradient(1.0) == 0.0
    assert gradient(2.0**16) == 2.0**-26
    assert float(torch.tensor(2.0**-24).half()) == 2.0**-24
    assert float(torch.tensor(2.0**-25).half()) == 0.0


def test_micro_batches_share_one_scale_and_add_up() -> None:
    scaler, weight = LossScaler(), parameter()
    for part in (1.0, 2.0, 3.0):
        scaler.scaled((weight * part).sum()).backward()
    scaler.unscale({"weight": weight, "frozen": parameter()})
    assert weight.grad is not None and float(weight.grad) == 6.0


def test_an_fp16_loss_is_scaled_in_fp32() -> None:
    scaler = LossScaler()
    assert float(scaler.scaled(torch.tensor(4.0, dtype=torch.float16))) == 4.0 * 2**16


def test_calls_out_of_order_raise() -> None:
    scaler, weight = LossScaler(), parameter()
    trained = {"weight": weight}
    with pytest.raises(RuntimeError, match="unscale follows"):
        scaler.unscale(trained)
    scaler.scaled((weight * 2).sum()).backward()
    with pytest.raises(RuntimeError, match="clip before unscale"):
        scaler.require_unscaled("clip")
    with pytest.raises(RuntimeError, match="finish follows unscale"):
        scaler.finish(())
    scaler.unscale(trained)
    scaler.require_unscaled("clip")
    with pytest.raises(RuntimeError, match="once"):
        scaler.unscale(trained)
    with pytest.raises(RuntimeError, match="after unscale"):
        scaler.scaled(torch.tensor(1.0))
    scaler.finish(())
    scaler.scaled(torch.tensor(1.0))
    scaler.abandon()
    with pytest.raises(RuntimeError):
        scaler.unscale(trained)


def test_the_floor_stops_with_the_first_tensor_by_name() -> None:
    scaler = LossScaler(LossScaleSettings(init=2.0, floor=1.0))
    weight = parameter()
    attempt(scaler, weight, INF)
    assert scaler.scale == 1.0
    scaler.scaled((weight * INF).sum()).backward()
    scaler.unscale({"weight": weight})
    with pytest.raises(Diverged, match=r"gradient of blocks.3.up, and 1 more.*smallest loss scale"):
        scaler.finish(("blocks.3.up", "blocks.4.up"))


def test_a_skip_restarts_the_count_and_the_ceiling_holds() -> None:
    scaler = LossScaler(LossScaleSettings(init=8.0, growth_interval=3, ceiling=16.0))
    weight = parameter()
    for gradient in (1.0, 1.0, INF, 1.0, 1.0):
        attempt(scaler, weight, gradient)
    assert (scaler.scale, scaler.good_updates) == (4.0, 2)
    for _ in range(40):
        attempt(scaler, weight, 0.0)
    assert scaler.scale == 16.0


def test_finish_says_what_happened() -> None:
    scaler = LossScaler(LossScaleSettings(init=8.0))
    weight = parameter()
    scaler.scaled(weight.sum()).backward()
    scaler.unscale({"weight": weight})
    step = scaler.finish(("weight",))
    assert (step.used, step.next, step.skipped, step.names) == (8.0, 4.0, True, ("weight",))


def test_narrow_gradients_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = LossScaler()
    scaler.scaled(weight.float().sum()).backward()
    with pytest.raises(RecipeError, match="fp32 for a tensor trained with fp16"):
        scaler.unscale({"weight": weight})


def test_state_resumes_the_sequence() -> None:
    settings = LossScaleSettings(init=16.0, growth_interval=2)
    gradients_given = (1.0, INF, 1.0, 1.0, 1.0, INF, 1.0, 1.0)
    whole, weight = LossScaler(settings), parameter()
    wanted = []
    for gradient in gradients_given:
        attempt(whole, weight, gradient)
        wanted.append(whole.state())
    for cut in range(len(gradients_given)):
        again = LossScaler(settings)
        again.load(json.loads(json.dumps(wanted[cut])))
        for index in range(cut + 1, len(gradients_given)):
            attempt(again, weight, gradients_given[index])
            assert again.state() == wanted[index]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": 0.0, "good_updates": 0, "skips": 0},
        {"scale": 3.0, "good_updates": 0, "skips": 0},
        {"scale": INF, "good_updates": 0, "skips": 0},
        {"scale": 2.0**30, "good_updates": 0, "skips": 0},
        {"scale": 4.0, "good_updates": -1, "skips": 0},
        {"scale": 4.0, "good_updates": 0, "skips": None},
        {"scale": "4", "good_updates": 0, "skips": 0},
    ],
)
def test_a_state_that_cannot_be_one_is_refused(state) -> None:
    with pytest.raises(RecipeError, match="loss scale"):
        LossScaler().load(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": 3.0}, "power of two"),
        ({"init": 0.0}, "power of two"),
        ({"floor": math.nan}, "power of two"),
        ({"ceiling": INF}, "power of two"),
        ({"init": True}, "power of two"),
        ({"growth_interval": 0}, "at least 1"),
        ({"growth_interval": 2.5}, "at least 1"),
        ({"init": 2.0, "floor": 4.0}, "floor <= init"),
    ],
)
def test_bad_settings_are_refused(changes, message) -> None:
    with pytest.raises(RecipeError, match=message):
        LossScaler(LossScaleSettings(**changes))
