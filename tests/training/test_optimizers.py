import pytest
import torch
from torch.nn import Parameter

from lehr.errors import RecipeError
from lehr.training.optimizers import (
    GroupRule,
    OptimizerSettings,
    make_optimizer,
    optimizer_problems,
    parameter_groups,
    set_rate,
)


def tensors():
    shapes = {
        "model.embed_tokens.weight": (5, 2),
        "layers.0.q.weight": (2, 2),
        "layers.0.q.bias": (2,),
        "layers.0.norm.weight": (2,),
        "transformer.wte.weight": (4, 2),
        "layers.0.q.lora_A.weight": (2, 2),
    }
    return {name: Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def step(optimizer, rate):
    set_rate(optimizer, rate)
    optimizer.step()


def test_no_decay_on_norms_biases_and_embeddings():
    groups = {group["weight_decay"]: group["names"] for group in parameter_groups(tensors(), 0.1)}
    assert groups[0.1] == ["layers.0.q.weight", "layers.0.q.lora_A.weight"]
    assert set(groups[0.0]) == set(tensors()) - set(groups[0.1])


def test_every_tensor_is_in_one_group():
    rules = [GroupRule("*lora*", learning_rate_scale=16.0), GroupRule("*norm*", weight_decay=0.3)]
    groups = parameter_groups(tensors(), 0.1, rules)
    assert sorted(name for group in groups for name in group["names"]) == sorted(tensors())
    assert {group["learning_rate_scale"] for group in groups} == {1.0, 16.0}


def test_a_pattern_that_matches_nothing_and_one_that_meets_another():
    with pytest.raises(RecipeError, match="matches a trained tensor"):
        parameter_groups(tensors(), 0.1, [GroupRule("*.experts.*")])
    with pytest.raises(RecipeError, match="one group only"):
        parameter_groups(tensors(), 0.1, [GroupRule("*lora*"), GroupRule("layers.0.q.*")])


def test_first_step_of_adamw_is_the_sign_of_the_gradient():
    weight = {"w.weight": Parameter(torch.tensor([[1.0, -2.0, 3.0]]))}
    optimizer = make_optimizer(weight, OptimizerSettings(eps=1e-12, weight_decay=0.5))
    weight["w.weight"].grad = torch.tensor([[0.3, -7.0, 1e-3]])
    step(optimizer, 0.1)
    expected = torch.tensor([[1.0, -2.0, 3.0]]) * (1 - 0.05) - 0.1 * torch.tensor(
        [[1.0, -1.0, 1.0]]
    )
    torch.testing.assert_close(weight["w.weight"].detach(), expected)


def test_no_gradient_means_exponential_decay():
    weight = {"w.weight": Parameter(torch.full((2, 2), 8.0))}
    optimizer = make_optimizer(weight, OptimizerSettings(weight_decay=0.5))
    for _ in range(10):
        weight["w.weight"].grad = torch.zeros(2, 2)
        step(optimizer, 0.1)
    torch.testing.assert_close(weight["w.weight"].detach(), torch.full((2, 2), 8.0 * 0.95**10))


def test_fifty_steps_equal_the_formula():
    stream = torch.Generator().manual_seed(1)
    start = torch.randn(3, 4, generator=stream, dtype=torch.float64)
    weight = {"w.weight": Parameter(start.clone())}
    settings = OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = make_optimizer(weight, settings)
    mean, square, expected = torch.zeros_like(start), torch.zeros_like(start), start.clone()
    for index in range(1, 51):
        gradient = torch.randn(3, 4, generator=stream, dtype=torch.float64)
        weight["w.weight"].grad = gradient.clone()
        step(optimizer, 1e-2)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        expected *= 1 - 1e-2 * 0.1
        corrected = (square / (1 - 0.95**index)).sqrt() + 1e-8
        expected -= 1e-2 * mean / (1 - 0.9**index) / corrected
    torch.testing.assert_close(weight["w.weight"].detach(), expected, rtol=0, atol=1e-12)


def test_scaled_rate():
    trained = tensors()
    optimizer = make_optimizer(
        trained, OptimizerSettings(), [GroupRule("*lora*", learning_rate_scale=4.0)]
    )
    set_rate(optimizer, 0.5)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.5, 2.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "lion"},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"eps": 0.0},
        {"weight_decay": -1.0},
        {"weight_decay": float("nan")},
    ],
)
def test_bad_values(changes):
    assert len(optimizer_problems(OptimizerSettings(**changes))) == 1
