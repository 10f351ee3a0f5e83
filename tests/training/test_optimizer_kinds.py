"""SGD, the kinds of Adam, and Muon: closed forms, and how they behave in a run."""

import math

import pytest
import torch
from small_runs import Small, lines_of, make_engine, weights_hash
from torch.nn import Parameter

from lehr.errors import RecipeError
from lehr.streams import generator_for
from lehr.training import events
from lehr.training.muon import MuonAndAdamW
from lehr.training.optimizers import (
    GroupRule,
    OptimizerSettings,
    beta2_of_half_life,
    is_hidden_matrix,
    make_optimizer,
    optimizer_problems,
    set_rate,
)
from lehr.training.state import load_optimizer, optimizer_tensors
from lehr.training.steps import effective_steps


def move(optimizer, weights, gradients, rate):
    for name, gradient in gradients.items():
        weights[name].grad = gradient.clone()
    set_rate(optimizer, rate)
    optimizer.step()


def one(shape=(2, 2), value=1.0, dtype=torch.float64):
    return {"layer.weight": Parameter(torch.full(shape, value, dtype=dtype))}


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_on_a_quadratic_is_a_matrix_power(nesterov):
    """(w, m) <- A (w, m) with f = h w^2 / 2, momentum b without dampening, rate r."""
    h, b, r, steps = 3.0, 0.9, 0.05, 30
    weights = one((1, 1), 2.0)
    settings = OptimizerSettings("sgd", momentum=b, nesterov=nesterov or None)
    optimizer = make_optimizer(weights, settings)
    for _ in range(steps):
        gradient = {"layer.weight": h * weights["layer.weight"].detach()}
        move(optimizer, weights, gradient, r)
    look = b if nesterov else 1.0
    direct = h if nesterov else 0.0
    # m' = b m + h w;  w' = w - r (direct w + look m')
    a = torch.tensor([[1 - r * (direct + look * h), -r * look * b], [h, b]], dtype=torch.float64)
    expected = torch.linalg.matrix_power(a, steps) @ torch.tensor([2.0, 0.0], dtype=torch.float64)
    assert weights["layer.weight"].item() == pytest.approx(expected[0].item(), abs=1e-13)


def test_decoupled_decay_does_not_depend_on_the_gradient_and_l2_does():
    """A constant gradient of 100: adamw shrinks by 1 - rate x decay, adam_l2 hardly sees it."""
    moved = {}
    for kind in ("adamw", "adam_l2"):
        for decay in (0.0, 0.5):
            weights = one()
            optimizer = make_optimizer(weights, OptimizerSettings(kind, weight_decay=decay))
            for _ in range(20):
                move(optimizer, weights, {"layer.weight": torch.full((2, 2), 100.0).double()}, 1e-2)
            moved[kind, decay] = weights["layer.weight"][0, 0].item()
    steps = sum(0.995**k for k in range(20))
    assert moved["adamw", 0.0] == pytest.approx(1 - 0.2, abs=1e-6)
    assert moved["adamw", 0.5] == pytest.approx(0.995**20 - 0.01 * steps, abs=1e-6)
    assert moved["adam_l2", 0.5] == pytest.approx(moved["adam_l2", 0.0], abs=1e-4)


def test_with_a_zero_gradient_l2_moves_by_the_rate_whatever_the_decay():
    """Adam divides the decay by its own size: 0.01 and 10 give the same step."""
    for decay in (0.01, 10.0):
        weights = one()
        optimizer = make_optimizer(weights, OptimizerSettings("adam_l2", weight_decay=decay))
        move(optimizer, weights, {"layer.weight": torch.zeros(2, 2).double()}, 1e-2)
        assert weights["layer.weight"][0, 0].item() == pytest.approx(0.99, abs=1e-7)


def test_adam_is_adamw_without_decay():
    stream = generator_for("adam")
    gradients = [torch.randn(2, 2, generator=stream, dtype=torch.float64) for _ in range(9)]
    ends = []
    for kind in ("adam", "adamw"):
        weights = one()
        optimizer = make_optimizer(weights, OptimizerSettings(kind))
        for gradient in gradients:
            move(optimizer, weights, {"layer.weight": gradient}, 1e-2)
        ends.append(weights["layer.weight"].detach())
    assert torch.equal(*ends)


# --- muon -----------------------------------------------------------------------------

NAMES = {
    "model.embed_tokens.weight": (5, 4),
    "layers.0.up.weight": (6, 4),
    "layers.0.up.bias": (6,),
    "layers.0.norm.weight": (4,),
    "lm_head.weight": (5, 4),
}


def network():
    stream = generator_for("network")
    return {name: Parameter(torch.randn(s, generator=stream)) for name, s in NAMES.items()}


def gradients_of(weights, name="g"):
    stream = generator_for(name)
    return {key: torch.randn(value.shape, generator=stream) for key, value in weights.items()}


def test_muon_trains_hidden_matrices_and_adamw_the_rest():
    weights, twin = network(), network()
    muon = make_optimizer(weights, OptimizerSettings("muon", weight_decay=0.1))
    adamw = make_optimizer(twin, OptimizerSettings("adamw", weight_decay=0.1))
    hidden = [name for name, value in weights.items() if is_hidden_matrix(name, value)]
    assert isinstance(muon, MuonAndAdamW) and hidden == ["layers.0.up.weight"]
    for index in range(3):
        move(muon, weights, gradients_of(weights, index), 1e-2)
        move(adamw, twin, gradients_of(twin, index), 1e-2)
    for name in NAMES:
        assert torch.equal(weights[name], twin[name]) is (name not in hidden)


def test_muon_is_the_one_of_torch():
    weights = network()
    name = "layers.0.up.weight"
    plain = Parameter(weights[name].detach().clone())
    ours = make_optimizer(weights, OptimizerSettings("muon", weight_decay=0.1))
    theirs = torch.optim.Muon([plain], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for index in range(5):
        gradients = gradients_of(weights, index)
        move(ours, weights, gradients, 1e-2)
        plain.grad = gradients[name]
        theirs.step()
    start = network()[name]
    moved = (plain - start).norm()
    assert (weights[name] - plain).norm() < 0.02 * moved  # bf16 there, fp32 here


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (5, 5)])
def test_muon_keeps_directions_and_evens_out_sizes(shape):
    """Singular values of the update within 0.68 to 1.14; nearly U V^T; its RMS as adamw's."""
    generator = generator_for("svd", *shape)
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    sizes = torch.logspace(0, -1.5, min(shape))
    for match in (True, False):
        weights = one(shape, 0.0, torch.float32)
        settings = OptimizerSettings("muon", match_rms=match, momentum=0.0)
        optimizer = make_optimizer(weights, settings)
        move(optimizer, weights, {"layer.weight": u @ torch.diag(sizes) @ vh}, 1.0)
        scale = 0.2 * math.sqrt(max(shape)) if match else math.sqrt(max(1, shape[0] / shape[1]))
        update = -weights["layer.weight"].detach() / scale
        inner = u.T @ update @ vh.T
        values = torch.linalg.svdvals(update)
        assert values.min() > 0.66 and values.max() < 1.16
        assert (inner - torch.diag(inner.diagonal())).abs().max() < 0.05
        if match:
            rms = weights["layer.weight"].detach().square().mean().sqrt()
            assert 0.12 < rms < 0.24  # adamw: about 0.2 to 0.4, times the rate


def test_muon_with_a_zero_gradient_only_decays():
    weights = one((3, 2), 1.0, torch.float32)
    optimizer = make_optimizer(weights, OptimizerSettings("muon", weight_decay=0.5))
    for _ in range(3):
        move(optimizer, weights, {"layer.weight": torch.zeros(3, 2)}, 0.1)
    torch.testing.assert_close(weights["layer.weight"].detach(), torch.full((3, 2), 0.95**3))


def test_muon_needs_a_hidden_matrix():
    weights = {
        "norm.weight": Parameter(torch.ones(3)),
        "lm_head.weight": Parameter(torch.ones(2, 2)),
    }
    with pytest.raises(RecipeError, match="no hidden matrix is trained"):
        make_optimizer(weights, OptimizerSettings("muon"))
    only_hidden = make_optimizer(one(), OptimizerSettings("muon"))
    assert len(only_hidden.param_groups) == 1


def test_state_of_muon_goes_to_another_and_back():
    first, second = network(), network()
    one_optimizer = make_optimizer(first, OptimizerSettings("muon"))
    other = make_optimizer(second, OptimizerSettings("muon"))
    for index in range(3):
        move(one_optimizer, first, gradients_of(first, index), 1e-2)
    load_optimizer(other, {k: v.clone() for k, v in optimizer_tensors(one_optimizer).items()})
    for name in NAMES:
        second[name].data.copy_(first[name].data)
    for weights, optimizer in ((first, one_optimizer), (second, other)):
        move(optimizer, weights, gradients_of(weights, "next"), 1e-2)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_rates_and_decays_of_groups_hold_in_both_parts():
    rules = (
        GroupRule("layers.0.up.*", learning_rate_scale=4.0),
        GroupRule("*embed*", weight_decay=0.3),
    )
    optimizer = make_optimizer(network(), OptimizerSettings("muon", groups=rules))
    set_rate(optimizer, 0.5)
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["names"]
    }
    assert found["layers.0.up.weight"] == found["layers.0.up.bias"] == (2.0, 0.0)
    assert found["model.embed_tokens.weight"] == (0.5, 0.3)
    assert found["lm_head.weight"] == (0.5, 0.0)
    assert sorted(found) == sorted(NAMES)


# --- values ---------------------------------------------------------------------------


def test_half_life_of_the_second_moment():
    assert beta2_of_half_life(1000, 1000) == 0.5
    large, small = beta2_of_half_life(10**6, 4096), beta2_of_half_life(10**6, 512)
    assert small**8 == pytest.approx(large)  # b' = b^(B'/B)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "adamw", "momentum": 0.9},
        {"kind": "adam", "nesterov": True},
        {"kind": "adam", "weight_decay": 0.1},
        {"kind": "adam", "groups": (GroupRule("*", weight_decay=0.1),)},
        {"kind": "sgd", "momentum": 1.0},
        {"kind": "sgd", "nesterov": True},
        {"kind": "sgd", "nesterov": True, "momentum": 0.0},
        {"kind": "muon", "nesterov": True, "momentum": 0.0},
        {"groups": (GroupRule("*", weight_decay=-0.1),)},
        {"groups": (GroupRule("*", learning_rate_scale=math.nan),)},
        {"watch_every": 0},
        {"watch_every": True},
    ],
)
def test_contradictions_are_refused(changes):
    assert len(optimizer_problems(OptimizerSettings(**changes))) == 1


def test_what_is_right_is_not_refused():
    for kind in ("adamw", "adam", "adam_l2", "sgd", "muon"):
        assert optimizer_problems(OptimizerSettings(kind)) == []
    assert optimizer_problems(OptimizerSettings("sgd", momentum=0.9, nesterov=True)) == []
    assert optimizer_problems(OptimizerSettings("muon", nesterov=True)) == []


# --- the step that was really made ----------------------------------------------------


def test_the_effective_step_shows_what_adapts():
    gradient = {"layer.weight": torch.tensor([[1e-3, 1e-1], [1.0, 10.0]]).double()}
    found = {}
    for kind in ("sgd", "adamw"):
        weights = one()
        optimizer = make_optimizer(weights, OptimizerSettings(kind, eps=1e-12))
        before = {name: value.detach().clone() for name, value in weights.items()}
        move(optimizer, weights, gradient, 0.01)
        (found[kind],) = effective_steps(optimizer, before)
    sgd, adamw = found["sgd"], found["adamw"]
    assert sgd.low == pytest.approx(0.01) and sgd.high == pytest.approx(0.01)
    assert adamw.step == adamw.relative == pytest.approx(0.01)  # every weight moved by the rate
    assert [adamw.low, adamw.middle, adamw.high] == pytest.approx([0.001, 0.01, 0.1], rel=1e-6)
    assert sgd.names == ("layer.weight",) and sgd.rate == 0.01


def test_it_is_a_column_and_an_event_where_it_is_asked(tmp_path):
    seen = []
    rules = (GroupRule("head.*", learning_rate_scale=2.0),)
    settings = OptimizerSettings(groups=rules, watch_every=2)
    engine = make_engine(tmp_path / "watched", 4, optimizer=settings, observers=[seen.append])
    engine.run()
    plain = make_engine(tmp_path / "plain", 4, optimizer=OptimizerSettings(groups=rules))
    plain.run()
    assert weights_hash(engine.model) == weights_hash(plain.model)
    measured = [event for event in seen if isinstance(event, events.StepsMeasured)]
    assert [event.update for event in measured] == [2, 4]
    lines = lines_of(tmp_path / "watched")
    assert [any(key.startswith("step.") for key in line) for line in lines] == [False, True] * 2
    rates = {lines[1][f"step.{i}.rate"] / lines[1]["learning_rate"] for i in range(2)}
    assert rates == {1.0, 2.0} and lines[1]["step.0.step"] > 0


def test_a_group_that_matches_nothing_is_refused_before_anything_is_written(tmp_path):
    settings = OptimizerSettings(groups=(GroupRule("*experts*"),))
    with pytest.raises(RecipeError, match="matches a trained tensor, such as embed"):
        make_engine(tmp_path / "run", 4, optimizer=settings)
    assert not (tmp_path / "run").exists()


def test_a_tensor_whose_first_gradient_comes_late(tmp_path):
    for kind in ("adamw", "sgd", "muon"):
        weights = network()
        momentum = 0.9 if kind == "sgd" else None
        optimizer = make_optimizer(weights, OptimizerSettings(kind, momentum=momentum))
        gradients = gradients_of(weights)
        late = {k: v for k, v in gradients.items() if "bias" not in k and "head" not in k}
        move(optimizer, weights, late, 1e-2)
        move(optimizer, weights, gradients, 1e-2)
        assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_a_small_run_learns_with_each(tmp_path):
    rates = {"adamw": 0.05, "adam": 0.05, "adam_l2": 0.05, "sgd": 0.3, "muon": 0.05}
    for kind, rate in rates.items():
        values = {"learning_rate": rate, "evaluate": None, "checkpoint_every": 30}
        if kind == "sgd":
            settings = OptimizerSettings(kind, momentum=0.9, nesterov=True)
        else:
            settings = OptimizerSettings(kind)
        model = Small(dropout=0.0)
        make_engine(tmp_path / kind, 30, model=model, optimizer=settings, **values).run()
        losses = [line["loss"] for line in lines_of(tmp_path / kind)]
        assert min(losses[-3:]) < losses[0] - 0.3, (kind, losses)
