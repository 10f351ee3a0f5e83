"""The FP8 layer: products by hand, straight-through gradients, health, fallback, state."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lehr.errors import Diverged, RecipeError
from lehr.models.adapter_layers import AdapterSpec, LoraLinear
from lehr.training.float8_convert import LayerFellBack, convert
from lehr.training.float8_formats import E4M3, E5M2
from lehr.training.float8_linear import Float8Linear, Float8LoraLinear, product
from lehr.training.float8_recipe import Float8Settings, HealthLimits
from lehr.training.float8_scaling import quantize, quantize_blocks

ALL = {"keep_first_blocks": 0, "keep_last_blocks": 0, "smallest_features": 1}


def settings(**changes) -> Float8Settings:
    return Float8Settings(**{**ALL, **changes})


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(inputs: int = 24, outputs: int = 10, bias: bool = True, seed: int = 1) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(normal(outputs, inputs, seed=seed))
        if bias:
            layer.bias.copy_(normal(outputs, seed=seed + 1))
    return layer


def chain(layers: int = 2, width: int = 16) -> nn.Sequential:
    return nn.Sequential(*[linear(width, width, seed=7 * i) for i in range(layers)])


def run(model: nn.Module, x: torch.Tensor, grad: torch.Tensor | None = None) -> torch.Tensor:
    out = model(x)
    out.backward(normal(*out.shape, seed=9) if grad is None else grad)
    return out.detach()


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_the_three_products_by_hand(scaling) -> None:
    layer = linear()
    model = nn.Sequential(layer)
    convert(model, settings(scaling=scaling))
    x = normal(2, 5, 24).requires_grad_()
    grad = 1e-7 * normal(2, 5, 10, seed=3)
    out = run(model, x, grad)
    x_8 = quantize(x.reshape(10, 24), E4M3).values()
    weight_8 = quantize(layer.weight, E4M3).values()
    grad_8 = quantize(grad.reshape(10, 10), E5M2).values()
    assert torch.equal(out.reshape(10, 10), x_8 @ weight_8.T + layer.bias.detach())
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert torch.equal(x.grad.reshape(10, 24), grad_8 @ weight_8)
    assert torch.equal(layer.weight.grad, grad_8.T @ x_8)
    assert torch.allclose(layer.bias.grad, grad.sum((0, 1)))
    assert float(layer.weight.grad.abs().min()) > 0  # 1e-7 survives its scale


def test_block_products_scale_along_what_they_sum_over() -> None:
    layer = linear(150, 10, bias=False)
    model = nn.Sequential(layer)
    convert(model, settings(scaling="block"))
    x = normal(140, 150).requires_grad_()
    grad = normal(140, 10, seed=3)
    out = run(model, x, grad)
    w = layer.weight.detach()

    def blocks(values, form):
        return quantize_blocks(values, form).values()

    assert torch.equal(out, blocks(x, E4M3) @ blocks(w, E4M3).T)
    assert x.grad is not None and w is not None and layer.weight.grad is not None
    assert torch.equal(x.grad, blocks(grad, E5M2) @ blocks(w.T, E4M3).T)
    assert torch.equal(layer.weight.grad, blocks(grad.T, E5M2) @ blocks(x.T, E4M3).T)


def test_exact_where_the_values_are_on_the_grid() -> None:
    """Powers of two have no rounding error: FP8 equals fp32 bit for bit."""
    values = 2.0 ** torch.randint(-3, 4, (40, 24), generator=torch.Generator().manual_seed(0))
    layer, plain = linear(bias=False), linear(bias=False)
    for one in (layer, plain):
        with torch.no_grad():
            one.weight.copy_(values[:10])
    # Largest 448 in E4M3 and 57344 in E5M2 are 7 times a power of two: so is every scale's base.
    sevens = 7 * values[10:]
    model = nn.Sequential(layer)
    convert(model, settings(convert=("0",)))
    grad = 2.0 ** torch.randint(-3, 4, (30, 10), generator=torch.Generator().manual_seed(1))
    a, b = sevens.clone().requires_grad_(), sevens.clone().requires_grad_()
    with torch.no_grad():
        layer.weight.mul_(7)
        plain.weight.mul_(7)
    assert torch.equal(run(model, a, 7 * grad), run(plain, b, 7 * grad))
    assert torch.equal(a.grad, b.grad) and torch.equal(layer.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("shape", [(5, 7, 3), (32, 64, 16), (1, 1, 1), (9, 130, 30)])
def test_emulation_equals_torchs_own_product(shape) -> None:
    """torch._scaled_mm runs on a CPU, odd shapes too."""
    m, k, n = shape
    left, right = quantize(normal(m, k), E5M2), quantize(normal(n, k, seed=1), E4M3)
    own, other = product(left, right), product(left, right, "scaled_mm")
    assert own.dtype == other.dtype == torch.float32
    assert torch.allclose(own, other, rtol=1e-5, atol=1e-5)


def test_a_layer_computes_the_same_on_both_backends() -> None:
    results = []
    for backend in ("emulated", "scaled_mm"):
        layer = linear()
        model = nn.Sequential(layer)
        convert(model, settings(backend=backend))
        x = normal(7, 24).requires_grad_()
        results.append((run(model, x), x.grad, layer.weight.grad))
    for own, other in zip(*results, strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-4)


def test_close_to_high_precision_and_gradients_point_the_same_way() -> None:
    layer, plain = linear(256, 128), linear(256, 128)
    model = nn.Sequential(layer)
    convert(model, settings())
    a, b = normal(64, 256).requires_grad_(), normal(64, 256).requires_grad_()
    out, exact = run(model, a), run(plain, b)
    assert float((out - exact).norm() / exact.norm()) < 0.05
    for own, true in ((a.grad, b.grad), (layer.weight.grad, plain.weight.grad)):
        assert float(F.cosine_similarity(own.flatten(), true.flatten(), dim=0)) > 0.995


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_are_those_of_a_plain_layer(dtype) -> None:
    layer = linear().to(dtype)
    model = nn.Sequential(layer)
    convert(model, settings())
    x = normal(6, 24).to(dtype).requires_grad_()
    assert run(model, x, torch.ones(6, 10, dtype=dtype)).dtype == dtype
    assert x.grad.dtype == layer.weight.grad.dtype == dtype


def test_autocast_gives_its_dtype_and_does_not_touch_the_sums() -> None:
    layer = linear(bias=False)
    model = nn.Sequential(layer)
    convert(model, settings())
    x = normal(6, 24)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, model(x).bfloat16())


def test_frozen_weights_get_no_gradient_and_no_tokens_are_no_error() -> None:
    layer = linear()
    layer.weight.requires_grad_(False)
    model = nn.Sequential(layer)
    convert(model, settings())
    x = normal(3, 24).requires_grad_()
    run(model, x)
    assert layer.weight.grad is None and x.grad is not None
    assert run(model, torch.empty(0, 24, requires_grad=True)).shape == (0, 10)


def test_conversion_keeps_every_object_and_restores_the_class() -> None:
    model = chain()
    before = dict(model.named_parameters())
    modules = list(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fp8 = convert(model, settings())
    assert fp8.layers == ("0", "1") and all(type(m) is Float8Linear for m in model)
    assert list(model) == modules
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(model.get_parameter(name) is value for name, value in before.items())
    assert model.state_dict().keys() == state.keys()
    with pytest.raises(RecipeError, match="not converted to FP8 already"):
        convert(model, settings())
    fp8.restore()
    fp8.restore()
    assert all(type(m) is nn.Linear and not hasattr(m, "float8") for m in model)
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)


def test_off_is_high_precision_bit_for_bit() -> None:
    model, plain = chain(), chain()
    fp8 = convert(model, settings())
    x = normal(4, 16)
    with fp8.off():
        assert torch.equal(model(x), plain(x))
    assert not torch.equal(model(x), plain(x))


def test_an_adapted_layer_computes_only_its_base_in_fp8() -> None:
    spec = AdapterSpec(rank=2, alpha=4.0, dropout=0.0, targets=("0",))
    base = linear()
    base.requires_grad_(False)
    adapted = LoraLinear(base, spec, torch.Generator().manual_seed(0))
    model = nn.Sequential(adapted)
    fp8 = convert(model, settings())
    assert type(adapted) is Float8LoraLinear
    with torch.no_grad():
        adapted.lora_b.copy_(normal(10, 2, seed=4))
    x = normal(6, 24)
    low = (x @ adapted.lora_a.T) @ adapted.lora_b.T * 2.0
    x_8, weight_8 = quantize(x, E4M3).values(), quantize(adapted.weight, E4M3).values()
    wanted = x_8 @ weight_8.T + adapted.bias + low
    assert torch.allclose(model(x), wanted, atol=1e-5)
    run(model, x)
    assert adapted.weight.grad is None
    assert float(adapted.lora_a.grad.abs().sum()) > 0 < float(adapted.lora_b.grad.abs().sum())
    adapted.adapter_active = False
    assert torch.equal(model(x), x_8 @ weight_8.T + adapted.bias)
    adapted.adapter_active = True
    fp8.restore()
    assert type(adapted) is LoraLinear


def test_delayed_scaling_gives_the_same_gradient_however_the_update_is_cut() -> None:
    x, grad = normal(12, 16), normal(12, 16, seed=5)
    x[7] *= 50

    def gradient(parts: int) -> tuple[torch.Tensor, dict]:
        model = chain(1)
        fp8 = convert(model, settings(scaling="delayed"))
        run(model, normal(12, 16, seed=8), normal(12, 16, seed=6))
        fp8.applied(1)
        model.zero_grad()
        for rows in torch.arange(12).chunk(parts):
            run(model, x[rows], grad[rows])
        fp8.applied(2)
        return model[0].weight.grad, fp8.state()["layers"]["0"]["histories"]

    whole, cut = gradient(1), gradient(4)
    assert torch.allclose(whole[0], cut[0], rtol=1e-5, atol=1e-6)
    assert whole[1] == cut[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scaling", ["current", "delayed", "block"])
def test_recomputation_changes_nothing(scaling, reentrant) -> None:
    results = []
    for recompute in (False, True):
        model = chain()
        fp8 = convert(model, settings(scaling=scaling))
        for update in (1, 2):
            model.zero_grad()
            x = normal(4, 16, seed=update).requires_grad_()
            out = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            out.sum().backward()
            fp8.applied(update)
        states = {n: s["histories"] for n, s in fp8.state()["layers"].items()}
        results.append((x.grad, model[0].weight.grad, states))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_evaluation_leaves_no_trace() -> None:
    model = chain()
    fp8 = convert(model, settings(scaling="delayed"))
    model.eval()
    with torch.no_grad():
        model(normal(4, 16) * 1e4)
    model.train()
    with torch.no_grad():  # a reference's numbers
        model(normal(4, 16) * 1e4)
    fp8.applied(1)
    assert all(
        history == {"amax": []}
        for layer in fp8.state()["layers"].values()
        for history in layer["histories"].values()
    )


def test_an_infinity_is_flagged_shown_and_not_learned() -> None:
    model = chain()
    fp8 = convert(model, settings(scaling="delayed"))
    x = normal(4, 16)
    run(model, x)
    fp8.applied(1)
    before = fp8.state()
    x[2, 3] = math.inf
    out = model(x)
    assert not bool(out[2].isfinite().any()) and bool(out[[0, 1, 3]].isfinite().all())
    assert "input of 0" in fp8.flagged() and "weight of 0" not in fp8.flagged()
    fp8.skipped()
    assert fp8.flagged() == () and fp8.state() == before


def test_health_is_measured_at_its_updates_only() -> None:
    model = chain()
    fp8 = convert(model, settings(measure_every=3))
    seen = []
    for update in range(1, 8):
        run(model, normal(8, 16, seed=update))
        measured = bool(fp8._sides["0"].sums)
        assert fp8.applied(update) == ()
        seen.append(measured)
    assert seen == [True, False, False, True, False, False, True]
    health = fp8.health()["0"]
    assert set(health) == {"input", "weight", "gradient"}
    assert 29 < health["input"].sqnr_db < 34 and 23 < health["gradient"].sqnr_db < 28
    assert fp8.metrics()["fp8.layers"] == 2 and fp8.metrics()["fp8.worst_underflow"] == 0


def two_with_norm() -> nn.Sequential:
    return nn.Sequential(linear(16, 16), nn.LayerNorm(16), linear(16, 16))


def spoiled(patience: int = 3):
    """Layer 0 sees one value of 1e7 and the rest near 1: everything else becomes 0."""
    model = two_with_norm()
    limits = HealthLimits(patience=patience)
    fp8 = convert(model, settings(measure_every=1, limits=limits))
    return model, fp8


def bad_input(seed: int) -> torch.Tensor:
    x = normal(8, 16, seed=seed)
    x[0, 0] = 1e7
    return x


def test_a_sick_layer_falls_back_with_an_event_and_a_single_spike_does_not() -> None:
    model, fp8 = spoiled()
    plain = two_with_norm()
    x = normal(8, 16, seed=50)
    for update in (1, 2):
        run(model, bad_input(update))
        assert fp8.applied(update) == ()
    run(model, x)
    assert fp8.applied(3) == ()  # healthy again: the count starts anew
    events: tuple[LayerFellBack, ...] = ()
    for update in (4, 5, 6):
        assert events == ()
        run(model, bad_input(update))
        events = fp8.applied(update)
    (event,) = events
    assert (event.update, event.layer, event.operand, event.updates_sick) == (6, "0", "input", 3)
    assert event.measure == "underflow" and event.value > 0.9 and event.limit == 0.25
    assert "0 left FP8, because underflow of its input" in str(event)
    assert fp8.active == ("2",) and fp8.fallen == (event,)
    assert torch.equal(model[0](x), plain[0](x)) and not torch.equal(model[2](x), plain[2](x))
    with fp8.off():
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model[0](x), plain[0](x))  # off() does not bring it back


def test_a_run_with_no_layer_left_is_not_what_was_asked() -> None:
    model = chain(1)
    fp8 = convert(model, settings(measure_every=1, limits=HealthLimits(patience=1)))
    run(model, bad_input(1))
    with pytest.raises(Diverged, match="stays healthy in FP8"):
        fp8.applied(1)


def test_low_sqnr_alone_is_sick_too() -> None:
    """Saturation of few, large values: their share is small, the energy is lost."""
    model = chain()
    limits = HealthLimits(patience=1, saturation=0.5)
    fp8 = convert(model, settings(scaling="delayed", measure_every=1, limits=limits))
    run(model, normal(64, 16))
    fp8.applied(1)
    x = normal(64, 16, seed=2)
    x[3, 3] = 1e4
    run(model, x)
    events = fp8.applied(2)
    assert events and events[0].measure == "sqnr_db" and events[0].value < 1


@pytest.mark.parametrize("scaling", ["current", "delayed", "block"])
def test_a_resumed_run_is_the_same_bit_for_bit(scaling) -> None:
    def start():
        model = chain()
        limits = HealthLimits(patience=3)
        fp8 = convert(model, settings(scaling=scaling, measure_every=2, window=3, limits=limits))
        return model, fp8, torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(model, fp8, optimizer, update):
        optimizer.zero_grad()
        x = normal(8, 16, seed=update)
        run(model, x, 1e-3 * normal(8, 16, seed=update + 100))
        optimizer.step()
        return fp8.applied(update)

    model, fp8, optimizer = start()
    kept = {}
    for update in range(1, 9):
        step(model, fp8, optimizer, update)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        kept[update] = (weights, json.loads(json.dumps(fp8.state())))
    for cut in (1, 2, 5):
        model, fp8, optimizer = start()
        model.load_state_dict(kept[cut][0])
        fp8.load(kept[cut][1])
        assert fp8.state() == kept[cut][1]
        for update in range(cut + 1, 9):
            step(model, fp8, optimizer, update)
        assert all(torch.equal(v, kept[8][0][n]) for n, v in model.state_dict().items())
        assert fp8.state() == kept[8][1]


def test_fallen_layers_and_sick_counts_survive_a_resume() -> None:
    model, fp8 = spoiled(patience=2)
    run(model, bad_input(1))
    fp8.applied(1)
    between = json.loads(json.dumps(fp8.state()))
    run(model, bad_input(2))
    events = fp8.applied(2)
    again, other = spoiled(patience=2)
    other.load(between)
    run(again, bad_input(2))
    assert other.applied(2) == events != ()
    last, third = spoiled(patience=2)
    third.load(json.loads(json.dumps(fp8.state())))
    assert third.fallen == events and third.active == ("2",)
    x = normal(3, 16)
    assert torch.equal(last[0](x), two_with_norm()[0](x))


def test_the_state_of_another_run_is_refused() -> None:
    model = chain()
    fp8 = convert(model, settings())
    run(model, normal(4, 16))
    state = fp8.state()
    other = convert(chain(3), settings())
    with pytest.raises(RecipeError, match="the FP8 layers of the checkpoint"):
        other.load(state)
    delayed = convert(chain(), settings(scaling="delayed"))
    with pytest.raises(RecipeError, match="a state of delayed scaling"):
        delayed.load(state)
    bad = delayed.state()
    bad["layers"]["0"]["histories"]["input"] = {"amax": [math.nan]}
    with pytest.raises(RecipeError, match="input of 0"):
        delayed.load(bad)
