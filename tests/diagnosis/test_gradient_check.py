"""The engine's gradient against a tape of our own, float64 and finite differences."""

import json

import pytest
import torch
from families import model_of, tree_pack
from small_runs import NextToken, Small, merge_packs, rows, weights_hash
from tests.tape import Tape
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lehr.diagnosis.gradient_check import check_gradient
from lehr.objectives.base import Loss
from lehr.objectives.language import Language
from lehr.training.update import accumulate


def engine_gradient(model, packs, micro_batch, precision="fp32"):
    objective = NextToken()
    cut = [merge_packs(packs[i : i + micro_batch]) for i in range(0, len(packs), micro_batch)]
    weights = [objective.weight(pack) for pack in cut]
    accumulate(model, objective, cut, weights, sum(weights), ("test",), precision)
    return {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_the_engine_and_the_tape_agree(micro_batch):
    """The whole of Small, by hand on the tape, against eight packs however they are cut."""
    model, packs = Small(dropout=0.0).double(), rows(8)
    tape, whole = Tape(), merge_packs(packs)
    w = {name: tape.variable(one.detach().numpy()) for name, one in model.named_parameters()}
    up, head = tape.variable(w["up.weight"].value.T), tape.variable(w["head.weight"].value.T)
    embedded = w["embed.weight"].rows(whole.ids.numpy())
    normed = embedded.normalised(model.norm.eps) * w["norm.weight"] + w["norm.bias"]
    logits = (normed @ up + w["up.bias"]).tanh() @ head + w["head.bias"]
    total = logits.rows(whole.predict_from.numpy()).cross_entropy(whole.targets.numpy())
    tape.backward(total)
    w["up.weight"].gradient, w["head.weight"].gradient = up.gradient.T, head.gradient.T
    found = engine_gradient(model, packs, micro_batch)
    count = float(sum(pack.weights.sum() for pack in packs))
    assert found.keys() == w.keys()
    for name, gradient in found.items():
        expected = torch.from_numpy(w[name].gradient / count)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_the_tape_agrees_with_differences():
    """The oracle itself: d/dx of a sum of products, a broadcast and a repeated row."""

    def value(x, wanted=False):
        tape = Tape()
        table = tape.variable(x)
        h = (table.rows([0, 2, 0]) @ tape.variable([[0.3, -1.0], [0.7, 0.2]])).tanh()
        one = (h + table.rows([1])).normalised().cross_entropy([1, 0, 0])
        tape.backward(one)
        return table.gradient if wanted else float(one.value)

    start = torch.randn(3, 2, generator=torch.Generator().manual_seed(1)).double().numpy()
    gradient = value(start, wanted=True)
    for place in [(0, 0), (0, 1), (1, 0), (2, 1)]:
        moved = [start.copy(), start.copy()]
        moved[0][place] += 1e-5
        moved[1][place] -= 1e-5
        slope = (value(moved[0]) - value(moved[1])) / 2e-5
        assert gradient[place] == pytest.approx(slope, rel=1e-7, abs=1e-9)


# --- the check that users run ---------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2", "Qwen3"])
def test_families_agree_in_float64_through_their_own_casts(family):
    """Norms and rotary embeddings cast to float32; unseen, differences would be noise."""
    model = model_of(family)
    model.train_all()
    found = check_gradient(model, Language(), [tree_pack(0), tree_pack(1)])
    assert found.ok, str(found)
    assert found.worst.error < 1e-4 and not found.missing
    assert max(slope.error for slope in found.slopes) < 1e-6
    assert len(found.slopes) == 7 and found.slopes[0].along == "all tensors"


def test_the_model_is_left_as_it_was():
    for precision in ("fp32", "bf16"):
        model = model_of("Llama", precision=precision)
        model.add_adapter(rank=2)
        model.train()
        dtype = model.compute_dtype
        before = {k: v.clone() for k, v in model.network.state_dict().items()}
        random_state = torch.get_rng_state()
        found = check_gradient(model, Language(), [tree_pack(0)], precision)
        assert found.ok, str(found)
        after = model.network.state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before)
        assert all(before[k].dtype == after[k].dtype for k in before)
        assert model.training and model.compute_dtype == dtype
        assert torch.equal(random_state, torch.get_rng_state())
        assert all(one.grad is None for one in model.parameters())
        # An adapter's B is 0 at the start; A is seen all the same.
        assert all(tensor.norm > 0 for tensor in found.tensors)


class WrongBackward(torch.autograd.Function):
    """The identity, with a gradient that is 2 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 1.02 * g


class Faulty(Small):
    def __init__(self, fault):
        super().__init__(dropout=0.0)
        self.fault = fault

    def forward(self, ids):
        h = self.norm(self.embed(ids))
        if self.fault == "backward":
            h = WrongBackward.apply(h)
        if self.fault == "detached":
            h = h + self.norm(self.embed(ids)).detach()
        return self.head(torch.tanh(self.up(h)))


@pytest.mark.parametrize("fault", ["backward", "detached"])
def test_a_backward_pass_that_is_no_derivative_is_found(fault):
    assert check_gradient(Faulty(""), NextToken(), rows(3)).ok
    found = check_gradient(Faulty(fault), NextToken(), rows(3))
    assert not found.ok and "DISAGREES" in str(found)
    wrong = {slope.along for slope in found.slopes if not slope.ok}
    assert "embed.weight" in wrong and "head.weight" not in wrong
    assert found.worst.error < found.limit  # the engine agrees with float64: both are wrong


class Narrow(Small):
    """One product in bfloat16 inside a float32 run."""

    def forward(self, ids):
        h = self.norm(self.embed(ids))
        h = (h.to(torch.bfloat16) @ self.up.weight.to(torch.bfloat16).T).float()
        return self.head(torch.tanh(h + self.up.bias))


def test_a_narrow_product_is_found_by_float64():
    found = check_gradient(Narrow(dropout=0.0), NextToken(), rows(3))
    assert not found.ok and found.worst.error > found.limit
    assert all(slope.ok for slope in found.slopes)


def test_tensors_without_a_gradient_are_named():
    model = Small(dropout=0.0)
    model.unused = nn.Linear(2, 2)
    found = check_gradient(model, NextToken(), rows(2))
    assert found.ok and found.missing == ("unused.weight", "unused.bias")
    assert "no gradient at all: unused.weight" in str(found)


def test_dropout_is_off_while_checking():
    model = Small(dropout=0.5)
    before = weights_hash(model)
    found = check_gradient(model, NextToken(), rows(3))
    assert found.ok and weights_hash(model) == before and model.training


def test_a_kink_nearby_makes_differences_unsure_instead_of_wrong():
    """w + relu(w - 1.0007) at w = 1: the kink lies between w + h / 2 and w + h."""

    class Kinked:
        def weight(self, pack):
            return 1.0

        def loss(self, model, pack):
            return Loss(model.weight + torch.relu(model.weight - 1.0007), {})

    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(1.0))
    found = check_gradient(model, Kinked(), rows(1))
    slope = found.slopes[0]
    # (4 x 1 - (1 + 0.0003 / 0.002)) / 3
    assert abs(slope.by_differences) == pytest.approx(0.95, abs=1e-4)
    assert slope.error == pytest.approx(0.05, abs=1e-4) == slope.unsure and found.ok


def test_as_json_is_plain():
    found = check_gradient(Small(dropout=0.0), NextToken(), rows(2)).as_json()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["ok"] is True and again["worst"]["name"] in {t["name"] for t in again["tensors"]}


# --- what a gradient costs ----------------------------------------------------------------


def operations(layers, width):
    """(forward, backward) operations of a stack of products, by torch's counter."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    batch = torch.randn(16, width)
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        loss = model(batch).sum()
    with backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("layers", [2, 8, 32])
def test_a_backward_pass_costs_two_forward_passes_whatever_the_number_of_parameters(layers):
    """Each product gives two: one for its weight, one for its input (the data needs none).
    Differences take one forward pass for each parameter."""
    for width in (8, 64):
        forward, backward = operations(layers, width)
        assert backward / forward == pytest.approx(2 - 1 / layers)


def test_objectives_may_be_anything_that_adds_up():
    class Square:
        def weight(self, pack):
            return 1.0

        def loss(self, model, pack):
            return Loss(model(pack.ids).square().sum(), {})

    assert check_gradient(Small(dropout=0.0), Square(), rows(2)).ok
