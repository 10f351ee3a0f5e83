"""The fused head: equal to full logits, exact gradients, deterministic, every output layer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, model_of, tree_pack

import oracle
from lehr.models.head import (
    FrozenHead,
    FusedHead,
    Head,
    OrderedGather,
    chunk_rows,
    divergence,
    token_stats,
)
from lehr.models.head_chunks import likeliest


def _some(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


HEADS = {
    "plain": {},
    "bias": {"bias": _some(17, seed=3, dtype=torch.float64)},
    "scale": {"scale": 0.3},
    "cap": {"softcap": 2.0, "scale": 1.5},
    "rows": {
        "rows": _some(3, 6, seed=4, dtype=torch.float64),
        "row_ids": torch.tensor([2, 9, 16]),
        "bias": _some(17, seed=3, dtype=torch.float64),
        "softcap": 2.0,
    },
}


@pytest.mark.parametrize("name", HEADS)
def test_gradcheck(name):
    settings = dict(HEADS[name])
    hidden = _some(7, 6, dtype=torch.float64).requires_grad_()
    weight = _some(17, 6, seed=1, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([2, 0, 16, 9, 9, 3, 11])
    bias, rows = settings.get("bias"), settings.get("rows")
    inputs = [hidden, weight]
    inputs += [x.clone().requires_grad_() for x in (bias, rows) if x is not None]

    def run(hidden, weight, *others):
        others = list(others)
        own_bias = others.pop(0) if bias is not None else None
        own_rows = others.pop(0) if rows is not None else None
        head = Head(weight, own_bias, own_rows, settings.get("row_ids"))
        head = Head(
            **{
                **head.__dict__,
                "scale": settings.get("scale", 1.0),
                "softcap": settings.get("softcap"),
            }
        )
        out = FusedHead.apply(
            hidden, weight, own_bias, own_rows, targets, head.detached(), 3, False, False
        )
        return out[0], out[1]

    assert torch.autograd.gradcheck(run, inputs)


def _frozen(name):
    """Hidden states, and the head of HEADS with a frozen matrix: (hidden, rows, head)."""
    settings = dict(HEADS[name])
    hidden = _some(7, 6, dtype=torch.float64).requires_grad_()
    rows = settings.pop("rows", None)
    rows = None if rows is None else rows.clone().requires_grad_()
    return hidden, rows, Head(_some(17, 6, seed=1, dtype=torch.float64), rows=rows, **settings)


@pytest.mark.parametrize("name", HEADS)
def test_gradcheck_of_a_frozen_head(name):
    hidden, rows, head = _frozen(name)
    targets = torch.tensor([2, 0, 16, 9, 9, 3, 11])
    inputs = [hidden] if rows is None else [hidden, rows]

    def run(hidden, rows=None):
        return FrozenHead.apply(hidden, rows, targets, replace(head, rows=rows), 3, False, False)[
            :2
        ]

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("name", HEADS)
def test_a_frozen_head_says_what_a_trained_one_says(name):
    hidden, rows, head = _frozen(name)
    index, targets = torch.arange(7), torch.tensor([2, 0, 16, 9, 9, 3, 11])
    weight = _some(7, seed=8, dtype=torch.float64)
    inputs = [hidden] if rows is None else [hidden, rows]
    found = []
    for trains in (False, True):
        one = replace(head, weight=head.weight.detach().requires_grad_(trains))
        stats = token_stats(hidden, index, targets, one, entropy=True, argmax=True, chunk=3)
        loss = (weight * stats.log_probability + stats.log_z**2).sum()
        found.append((stats, torch.autograd.grad(loss, inputs)))
    (frozen, gradients), (trained, expected) = found
    for name in ("log_probability", "log_z", "entropy", "argmax"):
        assert torch.equal(getattr(frozen, name), getattr(trained, name))
    for one, two in zip(gradients, expected, strict=True):
        assert (one - two).abs().max() < 1e-12


def test_a_sure_prediction_keeps_its_small_gradient_in_bf16():
    # p(y) over 0.99: summed together, the target's share cancels and rounding is left.
    weight = _some(200, 32, seed=1).bfloat16()
    targets = torch.tensor([5, 60, 199])
    hidden = (weight[targets].float() * 0.8).bfloat16().requires_grad_()
    stats = token_stats(hidden, torch.arange(3), targets, Head(weight))
    assert stats.log_probability.exp().min() > 0.99
    (found,) = torch.autograd.grad(stats.log_probability.sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    logs = torch.log_softmax(exact @ weight.double().T, 1)
    (expected,) = torch.autograd.grad(logs[torch.arange(3), targets].sum(), exact)
    assert oracle.relative_gap(found.double(), expected) < 0.1


@pytest.mark.parametrize("trains", [False, True])
def test_log_probabilities_in_bf16_are_not_rounded_as_logits_are(trains):
    """The fault: a logit of about 20 comes out of a bf16 product rounded by up to 0.06."""
    weight = _some(4000, 64, seed=1).bfloat16()
    targets = torch.tensor([5, 60, 199, 3999])
    near = weight[[5, 61, 200, 0]].float() * 0.3  # the first is likely, the others are not
    hidden = (near + 0.1 * _some(4, 64)).bfloat16().requires_grad_()
    exact = torch.log_softmax(hidden.detach().double() @ weight.double().T, 1)
    wanted = exact[torch.arange(4), targets]
    rounded = (hidden.detach() @ weight.T).float()
    assert (rounded.log_softmax(1)[torch.arange(4), targets] - wanted).abs().max() > 1e-2
    head = Head(weight.detach().requires_grad_(trains))
    stats = token_stats(hidden, torch.arange(4), targets, head)
    assert (stats.log_probability - wanted).abs().max() < 2e-3
    (found,) = torch.autograd.grad(stats.log_probability.sum(), hidden)
    wide = hidden.detach().double().requires_grad_()
    logs = torch.log_softmax(wide @ weight.double().T, 1)[torch.arange(4), targets]
    (expected,) = torch.autograd.grad(logs.sum(), wide)
    assert oracle.relative_gap(found.double(), expected) < 2e-2


def test_trained_rows_keep_their_own_logits_in_bf16():
    weight, rows = _some(50, 16, seed=1).bfloat16(), _some(2, 16, seed=2) * 3
    hidden = _some(6, 16).bfloat16()
    logits = Head(weight, rows=rows, row_ids=torch.tensor([4, 9])).logits(hidden)
    wanted = (hidden.float() @ weight.float().T).index_copy_(
        1, torch.tensor([4, 9]), hidden.float() @ rows.T
    )
    assert (logits - wanted).abs().max() < 4e-2
    assert torch.equal(logits[:, [4, 9]], wanted[:, [4, 9]])


def test_peak_memory_of_the_loss_is_that_of_one_chunk():
    """The fault: logits of all pairs, here 2,000 x 4,000 numbers; a chunk has 8 rows of them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else [out]:
                if isinstance(one, torch.Tensor):
                    largest.append(one.numel())
            return out

    for dtype, trains in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, False)):
        hidden = _some(2000, 16).to(dtype).requires_grad_()
        weight = _some(4000, 16, seed=1).to(dtype).requires_grad_(trains)
        targets = torch.arange(2000)
        with Watch():
            stats = token_stats(hidden, targets, targets, Head(weight), chunk=8)
            stats.log_probability.sum().backward()
        assert max(largest) == weight.numel(), (dtype, trains)  # 8 rows of logits are 32,000


def test_closed_form_of_equal_logits():
    head = Head(torch.zeros(8, 4))
    stats = token_stats(
        _some(3, 4), torch.tensor([0, 2]), torch.tensor([5, 1]), head, entropy=True, argmax=True
    )
    assert torch.allclose(stats.log_probability, torch.full((2,), -math.log(8)))
    assert torch.allclose(stats.log_z, torch.full((2,), math.log(8)))
    assert torch.allclose(stats.entropy, torch.full((2,), math.log(8)))
    assert stats.argmax.tolist() == [0, 0]


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_chunks_change_no_number(chunk):
    hidden, weight = _some(30, 6).requires_grad_(), _some(50, 6, seed=1).requires_grad_()
    index = torch.arange(30).flip(0)[:23]
    targets = torch.arange(23)
    wanted = torch.log_softmax(hidden[index] @ weight.T, 1)[torch.arange(23), targets]
    stats = token_stats(hidden, index, targets, Head(weight), chunk=chunk, entropy=True)
    assert (stats.log_probability - wanted).abs().max() < 1e-5
    found = torch.autograd.grad(stats.log_probability.sum(), (hidden, weight))
    expected = torch.autograd.grad(wanted.sum(), (hidden, weight))
    for one, two in zip(found, expected, strict=True):
        assert oracle.relative_gap(one, two) < 1e-5


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_z_loss_in_chunks_is_that_of_the_whole(chunk, frozen):
    """c log^2 Z over all positions: value, and the gradient 2 c log Z softmax, in float64."""
    hidden = _some(30, 6).double().requires_grad_()
    weight = _some(50, 6, seed=1).double().requires_grad_(not frozen)
    index, targets = torch.arange(30).flip(0)[:23], torch.arange(23)
    stats = token_stats(hidden, index, targets, Head(weight), chunk=chunk)
    logits = hidden[index] @ weight.T
    log_z = torch.logsumexp(logits, 1)
    assert (stats.log_z - log_z).abs().max() < 1e-12
    wanted = [hidden] if frozen else [hidden, weight]
    found = torch.autograd.grad(0.5 * stats.log_z.square().sum(), wanted)
    expected = torch.autograd.grad(0.5 * log_z.square().sum(), wanted, retain_graph=True)
    by_hand = (log_z[:, None] * torch.softmax(logits, 1)).detach() @ weight.detach()
    assert (found[0][index] - by_hand).abs().max() < 1e-12
    for one, two in zip(found, expected, strict=True):
        assert (one - two).abs().max() < 1e-12


def test_tied_weight_gets_both_gradients():
    weight = _some(50, 6, seed=1, dtype=torch.float64).requires_grad_()
    ids, targets = torch.tensor([3, 7, 3, 9]), torch.tensor([7, 3, 9, 1])
    index = torch.arange(4)
    hidden = torch.nn.functional.embedding(ids, weight).tanh()
    stats = token_stats(hidden, index, targets, Head(weight))
    wanted = torch.log_softmax(hidden @ weight.T, 1)[index, targets].sum()
    (found,) = torch.autograd.grad(stats.log_probability.sum(), weight, retain_graph=True)
    (expected,) = torch.autograd.grad(wanted, weight)
    assert (found - expected).abs().max() < 1e-13


def test_repeated_index_adds_in_order():
    rows = _some(5, 3).requires_grad_()
    index = torch.tensor([4, 1, 4, 4, 0, 1])
    weight = _some(6, 3, seed=2)
    (found,) = torch.autograd.grad((OrderedGather.apply(rows, index) * weight).sum(), rows)
    expected = torch.zeros(5, 3)
    for at, gradient in zip(index.tolist(), weight, strict=True):
        expected[at] = expected[at] + gradient
    assert torch.equal(found, expected)


def test_no_pairs_is_no_error():
    hidden = _some(5, 4).requires_grad_()
    none = torch.empty(0, dtype=torch.long)
    stats = token_stats(hidden, none, none, Head(_some(9, 4)))
    (gradient,) = torch.autograd.grad(stats.log_probability.sum(), hidden)
    assert not gradient.any()


def test_excluded_positions_cannot_poison_the_sum():
    hidden = _some(5, 4)
    hidden[2] = float("inf")
    hidden.requires_grad_()
    weight = _some(9, 4).requires_grad_()
    stats = token_stats(hidden, torch.tensor([0, 4]), torch.tensor([1, 2]), Head(weight))
    found = torch.autograd.grad(stats.log_probability.sum(), (hidden, weight))
    assert all(torch.isfinite(gradient).all() for gradient in found)


def test_target_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match="vocabulary of 9"):
        token_stats(_some(5, 4), torch.tensor([0]), torch.tensor([9]), Head(_some(9, 4)))


def test_divergence_is_exact_and_zero_on_itself():
    hidden, other = _some(12, 6), _some(12, 6, seed=5)
    head, head_q = Head(_some(40, 6, seed=1)), Head(_some(40, 6, seed=2), softcap=3.0)
    at = torch.tensor([0, 3, 11])
    found = divergence(hidden, other, at, head, head_q, chunk=2)
    wanted = oracle.divergence(head.logits(hidden[at]), head_q.logits(other[at]))
    assert (found - wanted).abs().max() < 1e-5
    assert not divergence(hidden, hidden, at, head, head).any()


def test_chunk_depends_on_the_vocabulary_alone():
    assert chunk_rows(49152) == 162
    assert chunk_rows(10**9) == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_output_layer_gives_the_models_own_logits(family):
    model = model_of(family)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad(), model.attention():
        hidden = model.network.base_model(input_ids=ids)[0][0]
        wanted = model.network(input_ids=ids).logits[0]
    assert (model.head().logits(hidden) - wanted).abs().max() < 1e-5


def test_a_bare_product_would_be_wrong():
    """The fault: soft cap and scale left out of the head."""
    for family in ("Gemma2", "Cohere", "Granite"):
        model = model_of(family)
        pack = tree_pack()
        with torch.no_grad():
            hidden = model.hidden(pack)
            bare = hidden @ model.head().weight.T
            assert (bare - model.head().logits(hidden)).abs().max() > 0.5


@pytest.mark.parametrize("size", [5, 8, 2048, 2049, 4100, 49_152])
def test_the_likeliest_logits_are_those_of_topk(size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(7, size, generator=generator)
    logits[0, -3:] = 9.0  # beyond the last whole block
    logits[1, : min(size, 70)] = 8.0  # more equals than are asked for, over two blocks
    logits[2] = 0.0
    logits[3, 1::2] = float("-inf")
    found = likeliest(logits, 8)
    assert found.shape == (7, min(8, size))
    assert all(len(set(row)) == len(row) for row in found.tolist())
    assert torch.equal(logits.gather(1, found), logits.topk(min(8, size), 1).values)


def test_a_row_that_is_not_finite_has_likeliest_logits_too():
    logits = torch.randn(2, 4096)
    logits[0, 77] = float("nan")
    found = likeliest(logits, 8)
    assert 77 in found[0].tolist()
    assert int(found.max()) < 4096
