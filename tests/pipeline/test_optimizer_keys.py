"""An optimizer that a later stage cannot have is refused before the first one trains."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pipeline.small import lora_recipe, weights_recipe, write_recipe

from lehr.errors import RecipeError
from lehr.pipeline.optimizing import described
from lehr.pipeline.plan import plan
from lehr.pipeline.planning import prepare
from lehr.recipe.loading import load_recipe

pytestmark = pytest.mark.usefixtures("lean")


def with_optimizer(recipe: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """The recipe, whose last stage has this optimizer."""
    next(iter(recipe["stages"][-1].values()))["optimizer"] = optimizer
    return recipe


@pytest.mark.parametrize(
    "optimizer, said",
    [
        ({"groups": [{"pattern": "*nothing*"}]}, "a pattern that matches a trained tensor"),
        ({"groups": [{"pattern": "*q_proj*"}, {"pattern": "*lora_A*"}]}, "in one group only"),
        ({"beta2_half_life_tokens": 1e20}, "beta2_half_life_tokens: expected a half-life that"),
    ],
)
def test_the_plan_refuses_what_the_last_stage_would(work, optimizer, said):
    recipe = with_optimizer(lora_recipe(), optimizer)
    number = len(recipe["stages"]) - 1
    with pytest.raises(RecipeError) as caught:
        plan(load_recipe(write_recipe(work, recipe)))
    assert number >= 1 and all(
        p.where.startswith(f"stages.{number} ") for p in caught.value.problems
    )
    assert said in str(caught.value)


@pytest.mark.parametrize("made", [lora_recipe, weights_recipe])
def test_what_is_described_is_what_will_train(work, made):
    from lehr.pipeline.events import Events

    recipe = load_recipe(write_recipe(work, made()))
    prepared = prepare(recipe, work / "planned", Events(None, []))
    model, stages = prepared.bench.model, prepared.stages
    found = described(recipe, stages, 0, model)
    if stages[0].trains_all:
        model.train_all()
    else:
        adapter = stages[0].stage.adapter or recipe.adapter
        model.add_adapter(adapter.rank, adapter.alpha, adapter.targets)
    trained = model.trained()
    assert {name: one.shape for name, one in found.items()} == {
        name: one.shape for name, one in trained.items()
    }
