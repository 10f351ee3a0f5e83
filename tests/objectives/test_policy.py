"""Policy updates: advantages and losses by hand, length bias, flat groups, a ratio of 1."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from table_model import TableModel, pair_pack

from lehr.errors import RecipeError
from lehr.objectives.policy import (
    Policy,
    Samples,
    clipped_loss,
    group_advantages,
    k3,
    pair_weights,
    weighted,
)

# Two groups of two samples: of 3 tokens and 1, of 2 and 2.
GROUPS = [([1, 2], [3, 4, 5], [5]), ([0], [6, 1], [2, 3])]
SAMPLES = {0: Samples([1.0, -1.0]), 1: Samples([0.5, -0.5])}


def gradient(objective, pack, model):
    loss = objective.loss(model, pack)
    (found,) = torch.autograd.grad(loss.total, model.table)
    return found / objective.weight(pack)


def test_advantages_by_hand():
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 6.0]]))
    std = math.sqrt(4 * 0.25 / 3)
    expected = 0.5 / (std + 1e-4)
    assert found.values[0].tolist() == pytest.approx([expected, -expected, -expected, expected])
    assert found.values[1].tolist() == pytest.approx([-1 / 2.0001] * 3 + [3 / 2.0001])
    assert found.flat.tolist() == [False, False]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7, 1e9])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_flat_group_teaches_nothing_and_is_counted(reward, scale):
    """The fault: 0.1 - mean(0.1, ...) is 1e-9 and more, and over a std of 0 it is anything."""
    found = group_advantages(torch.tensor([[reward] * 7, [0.0] * 6 + [1.0]]), scale)
    assert found.flat.tolist() == [True, False]
    assert not found.values[0].any()
    assert found.values[1].any()


@pytest.mark.parametrize("bad", [[[1.0]], [[1.0, math.nan]], [[math.inf, 0.0]]])
def test_rewards_that_compare_nothing_are_refused(bad):
    with pytest.raises(ValueError, match=r"at least 2 samples|not finite"):
        group_advantages(torch.tensor(bad))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # good and already likelier by more than 20 %
        (0.5, 2.0, -1.0, -2.0),  # good and less likely: nothing holds it back
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely
        (1.5, -2.0, 3.0, 2.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, slope):
    moved = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    found = clipped_loss(moved, torch.tensor(advantage, dtype=torch.float64), 0.2, 0.2)
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found, moved)[0].item() == pytest.approx(slope)


def test_k3_by_hand_is_unbiased_and_0_on_itself():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    estimate = k3(p.log(), q.log())
    assert estimate[0].item() == pytest.approx(0.4 - 1 - math.log(0.4))
    assert (estimate >= 0).all()
    assert (p * estimate).sum().item() == pytest.approx(float((p * (p / q).log()).sum()))
    assert not k3(p.log(), p.log()).any()


def test_the_first_update_is_the_policy_gradient_with_a_ratio_of_exactly_1():
    model, pack = TableModel(), pair_pack(GROUPS)
    objective = Policy(SAMPLES)
    loss = objective.loss(model, pack)
    assert loss.metrics["ratio"] == (8.0, 8.0)
    assert loss.metrics["clipped"][0] == 0
    assert loss.metrics["kl_old"][0] == 0
    log_p = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets).log_probability
    advantage = torch.tensor([1.0, 1, 1, -1, 0.5, 0.5, -0.5, -0.5])
    (expected,) = torch.autograd.grad(-(advantage * log_p).sum() / 8, model.table)
    torch.testing.assert_close(gradient(objective, pack, model), expected)


def test_old_and_reference_by_hand():
    model, pack = TableModel(), pair_pack(GROUPS)
    now = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets).log_probability
    lengths = [3, 1, 2, 2]
    old = list((now.detach() - math.log(1.5)).split(lengths))  # every token is likelier by half
    reference = list((now.detach() + 0.1).split(lengths))
    samples = {
        0: Samples([1.0, -1.0], old[:2], reference[:2]),
        1: Samples([0.5, -0.5], old[2:], reference[2:]),
    }
    loss = Policy(samples, beta=0.3).loss(model, pack)
    estimate = math.exp(0.1) - 1 - 0.1
    by_hand = -1.2 * 3 + 1.5 - 0.5 * 1.2 * 2 + 0.5 * 1.5 * 2 + 0.3 * 8 * estimate
    assert loss.total.item() == pytest.approx(by_hand, rel=1e-5)
    assert int(loss.metrics["clipped"][0]) == 5
    assert float(loss.metrics["kl_reference"][0]) / 8 == pytest.approx(estimate, rel=1e-4)


@pytest.mark.parametrize(
    ("normalisation", "expected", "weight"),
    [
        ("token", [1.0] * 8, 8.0),
        ("group", [0.25] * 8, 2.0),
        ("sequence", [1 / 3] * 3 + [1.0] + [0.5] * 4, 4.0),
        ("constant", [0.1] * 8, 4.0),
    ],
)
def test_normalisations_by_hand(normalisation, expected, weight):
    pack = pair_pack(GROUPS)
    assert pair_weights(pack, normalisation, 10).tolist() == pytest.approx(expected)
    objective = Policy(SAMPLES, normalisation=normalisation)
    assert objective.weight(weighted(pack, normalisation, 10)) == pytest.approx(weight)


def test_length_bias_of_the_sequence_mean_is_there_and_nowhere_else():
    """One token 3 -> 3, in a bad sample of 1 token and in one of 4: what does it pay?"""
    pays = {}
    for normalisation in ("token", "group", "sequence", "constant"):
        slopes = []
        for bad in ([3], [3, 3, 3, 3]):
            pack = pair_pack([([3], bad, [5, 5, 5, 5])])
            now = torch.zeros(len(pack.targets), requires_grad=True)
            advantage = torch.tensor([-1.0] * len(bad) + [0.0] * 4)
            weights = pair_weights(pack, normalisation, 4)
            one = clipped_loss(now.exp(), advantage, 0.2, 0.2)
            (found,) = torch.autograd.grad((weights * one).sum(), now)
            slopes.append(found[0].item())
        pays[normalisation] = slopes[0] / slopes[1]
    assert pays == pytest.approx({"token": 1, "constant": 1, "sequence": 4, "group": 8 / 5})


@pytest.mark.parametrize("normalisation", ["token", "group", "sequence", "constant"])
def test_any_cut_into_micro_batches_gives_the_same_gradient(normalisation):
    model = TableModel()
    objective = Policy(SAMPLES, normalisation=normalisation)
    whole = weighted(pair_pack(GROUPS), normalisation, 10)
    parts = [
        dataclasses.replace(weighted(pair_pack([one]), normalisation, 10), items=(item,))
        for item, one in enumerate(GROUPS)
    ]
    denominator = sum(objective.weight(part) for part in parts)
    assert objective.weight(whole) == pytest.approx(denominator)
    added = sum(objective.weight(p) / denominator * gradient(objective, p, model) for p in parts)
    torch.testing.assert_close(added, gradient(objective, whole, model))


def test_what_is_missing_is_named():
    model, pack = TableModel(), pair_pack(GROUPS)
    with pytest.raises(RecipeError, match=r"rows\.jsonl:2: expected advantages.* item 1"):
        Policy({0: Samples([1.0, -1.0])}).loss(model, pack)
    with pytest.raises(RecipeError, match=r"each of 2 samples \(found 3\)"):
        Policy({**SAMPLES, 1: Samples([1.0, 0.0, -1.0])}).loss(model, pack)
    with pytest.raises(RecipeError, match=r"beta is 0\.1"):
        Policy(SAMPLES, beta=0.1).loss(model, pack)
    old = Samples([1.0, -1.0], [torch.zeros(3), torch.zeros(2)])
    with pytest.raises(RecipeError, match=r"sample's 1 tokens \(found 2\)"):
        Policy({**SAMPLES, 0: old}).loss(model, pack)
    old = Samples([1.0, -1.0], [torch.zeros(3), torch.zeros(1)])
    with pytest.raises(RecipeError, match="or for none"):
        Policy({**SAMPLES, 0: old}).loss(model, pack)
    with pytest.raises(RecipeError, match="normalisation constant"):
        pair_weights(pack, "constant")


@pytest.mark.parametrize(
    "values",
    [{"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": math.inf}, {"beta": -1.0}],
)
def test_bad_values(values):
    with pytest.raises(RecipeError):
        Policy({}, **values)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(RecipeError, match="one of token, group, sequence, constant"):
        Policy({}, normalisation="mean")
