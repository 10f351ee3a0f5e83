"""B34: a margin that grows while the chosen answer falls is named; identical answers are ties."""

import math

import pytest
import torch
from table_model import TableModel, pair_pack

from lehr.objectives.preference import Dpo, dpo_loss


def means(loss):
    return {name: float(total) / float(count) for name, (total, count) in loss.metrics.items()}


def test_displacement():
    """Log-ratios −2 and −6: a good margin, made of an answer that became less likely."""
    model = TableModel()
    pack = pair_pack([([1, 2], [3], [4])])
    chosen, rejected = model.log_probability(2, 3), model.log_probability(2, 4)
    objective = Dpo({0: (chosen + 2.0, rejected + 6.0)}, beta=0.1)
    loss = objective.loss(model, pack)
    seen = means(loss)
    assert seen["margin"] == pytest.approx(0.4, abs=1e-6)
    assert loss.total.item() == pytest.approx(0.513015, abs=1e-6)
    assert seen["chosen_reward"] == pytest.approx(-0.2, abs=1e-6)
    assert seen["displacement"] == 1.0 and seen["accuracy"] == 1.0 and seen["ties"] == 0.0


def test_identical_answers_teach_nothing_and_are_no_success():
    model = TableModel()
    pack = pair_pack([([1, 2], [3, 4], [3, 4])])
    # a reference that another layout rounded differently must not matter
    loss = Dpo({0: (-1.0, -1.5)}).loss(model, pack)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(math.log(2.0), abs=1e-7)
    assert torch.count_nonzero(model.table.grad) == 0
    seen = means(loss)
    assert (seen["ties"], seen["accuracy"], seen["margin"]) == (1.0, 0.0, 0.0)


def test_an_answer_cut_to_nothing_on_both_sides():
    model = TableModel()
    pack = pair_pack([([1, 2], [], []), ([1, 2], [3], [4])])
    objective = Dpo({0: (0.0, 0.0), 1: (-3.0, -3.0)})
    loss = objective.loss(model, pack)
    alone = Dpo({0: (-3.0, -3.0)}).loss(model, pair_pack([([1, 2], [3], [4])]))
    assert means(loss)["ties"] == 0.5
    assert loss.total.item() == pytest.approx(alone.total.item() + math.log(2.0), abs=1e-6)


def test_the_pure_function():
    loss = dpo_loss(torch.tensor([-2.0, 5.0]), torch.tensor([-6.0, 5.0]), beta=0.1)
    assert loss.tolist() == pytest.approx([0.513015, math.log(2.0)], abs=1e-6)
