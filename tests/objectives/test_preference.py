import dataclasses
import math

import pytest
import torch
from table_model import TableModel, pair_pack

from lehr.errors import RecipeError
from lehr.objectives.preference import (
    Dpo,
    check_starts_at_reference,
    dpo_loss,
    identical_answers,
    pair_sequences,
)

PAIRS = [([1, 2], [3, 4], [5]), ([0], [6], [6, 1]), ([3, 3], [2], [4, 4, 4])]


def reference_of(model, pairs):
    def answer(prompt, tokens):
        before = [prompt[-1], *tokens[:-1]]
        return sum(model.log_probability(a, b) for a, b in zip(before, tokens, strict=True))

    return {
        item: (answer(prompt, chosen), answer(prompt, rejected))
        for item, (prompt, chosen, rejected) in enumerate(pairs)
    }


def mean(loss, name):
    total, count = loss.metrics[name]
    return float(total) / float(count)


def test_at_the_reference_the_loss_is_ln_2_and_all_are_ties_or_rounding():
    model = TableModel()
    objective = Dpo(reference_of(model, PAIRS))
    pack = pair_pack(PAIRS)
    loss = objective.loss(model, pack)
    assert objective.weight(pack) == 3.0
    assert loss.total.item() / 3 == pytest.approx(math.log(2), abs=1e-6)
    check_starts_at_reference(loss.total.item() / 3, "fp32")


@pytest.mark.parametrize(
    ("precision", "loss"), [("fp32", 0.6935), ("bf16", 0.71), ("fp32", math.nan)]
)
def test_another_start_is_refused(precision, loss):
    with pytest.raises(RecipeError, match="not the state that the stage began from"):
        check_starts_at_reference(loss, precision)


def test_gradient_in_closed_form():
    """∂loss/∂chosen = −β σ(−margin); the rejected side is its negative."""
    chosen = torch.tensor([-2.0, 1.0], requires_grad=True)
    rejected = torch.tensor([-6.0, 4.0], requires_grad=True)
    dpo_loss(chosen, rejected, beta=0.3).sum().backward()
    margin = 0.3 * (chosen.detach() - rejected.detach())
    torch.testing.assert_close(chosen.grad, -0.3 * torch.sigmoid(-margin))
    torch.testing.assert_close(rejected.grad, -chosen.grad)


def test_label_smoothing_mixes_both_labels():
    chosen, rejected = torch.tensor([0.5]), torch.tensor([-1.0])
    plain, flipped = dpo_loss(chosen, rejected, 0.2), dpo_loss(rejected, chosen, 0.2)
    mixed = dpo_loss(chosen, rejected, 0.2, label_smoothing=0.1)
    torch.testing.assert_close(mixed, 0.9 * plain + 0.1 * flipped)


def test_large_margins_stay_finite():
    loss = dpo_loss(torch.tensor([1e4, -1e4]), torch.tensor([0.0, 0.0]), beta=1.0)
    assert loss.tolist() == [0.0, 1e4]


def test_any_cut_adds_up_and_items_find_their_reference():
    model = TableModel()
    reference = {item: (-1.0 * item, -0.3) for item in range(3)}
    objective = Dpo(reference, beta=0.5)
    whole = objective.loss(model, pair_pack(PAIRS))
    parts = []
    for item, pair in enumerate(PAIRS):
        pack = dataclasses.replace(pair_pack([pair]), items=(item,))
        parts.append(objective.loss(model, pack))
    assert whole.total.item() == pytest.approx(sum(p.total.item() for p in parts), rel=1e-6)
    for name in whole.metrics:
        total = sum(float(part.metrics[name][0]) for part in parts)
        assert float(whole.metrics[name][0]) == pytest.approx(total, rel=1e-5, abs=1e-6), name


def test_weights_of_zero_take_tokens_out():
    model = TableModel()
    pack = pair_pack([([1, 2], [3, 4], [5])])
    weighted = dataclasses.replace(pack, weights=torch.tensor([1.0, 0.0, 1.0]))
    short = pair_pack([([1, 2], [3], [5])])
    objective = Dpo({0: (-1.0, -2.0)})
    assert objective.loss(model, weighted).total.item() == pytest.approx(
        objective.loss(model, short).total.item()
    )


def test_order_of_sequences_and_identical_pairs():
    pack = pair_pack([*PAIRS, ([1], [2, 3], [2, 3])])
    chosen, rejected = pair_sequences(pack)
    assert chosen.tolist() == [0, 2, 4, 6] and rejected.tolist() == [1, 3, 5, 7]
    assert identical_answers(pack, chosen, rejected).tolist() == [False, False, False, True]


def test_what_is_no_pair_is_refused_by_name():
    pack = pair_pack(PAIRS)
    broken = dataclasses.replace(pack, sequence_example=torch.tensor([0, 0, 1, 2, 2, 2]))
    with pytest.raises(RecipeError, match=r"rows\.jsonl:2: expected two answers"):
        pair_sequences(broken)


def test_a_missing_reference_is_named():
    with pytest.raises(RecipeError, match=r"rows\.jsonl:3: expected a reference.*item 2"):
        Dpo({0: (0, 0), 1: (0, 0)}).loss(TableModel(), pair_pack(PAIRS))


@pytest.mark.parametrize(
    "values",
    [{"beta": 0.0}, {"beta": math.nan}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}],
)
def test_bad_values(values):
    with pytest.raises(RecipeError):
        Dpo({}, **values)
