"""A part of the settings of another class is refused by name, not by an AttributeError."""

import pytest
import torch

from lehr.errors import RecipeError
from lehr.training.float8_recipe import LARGEST_MARGIN, Float8Settings
from lehr.training.optimizers import OptimizerSettings, make_optimizer
from lehr.training.settings import EngineSettings


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("schedule", "cosine", "Schedule(...)"),
        ("optimizer", "adamw", "OptimizerSettings(...)"),
        ("ema", 0.9, "AverageSettings(...) or None"),
        ("loss_scale", 1024, "LossScaleSettings(...) or None"),
        ("guard", "rewind", "GuardSettings(...) or None"),
    ],
)
def test_another_class_is_refused(name, value, expected):
    with pytest.raises(RecipeError) as caught:
        EngineSettings(updates=1, learning_rate=0.1, **{name: value}).check()
    (problem,) = caught.value.problems
    assert (problem.where, problem.expected) == (name, expected)


def test_betas_may_be_whole_numbers_and_nothing_else():
    parameter = torch.nn.Parameter(torch.ones(2))
    made = make_optimizer({"w": parameter}, OptimizerSettings("adam", betas=(0, 0)))
    assert made.param_groups[0]["betas"] == (0.0, 0.0)
    for wrong in (0.9, None):
        with pytest.raises(RecipeError, match=r"optimizer\.betas: expected two numbers"):
            make_optimizer({"w": parameter}, OptimizerSettings(betas=wrong))


def test_a_margin_that_leaves_no_bits_is_refused():
    assert not Float8Settings(margin=LARGEST_MARGIN).problems()
    (problem,) = Float8Settings(margin=LARGEST_MARGIN + 1).problems()
    assert problem.where == "fp8.margin" and "at most 14" in problem.expected
