"""Whether a stage's optimizer fits what the stage will train: asked before the first stage runs.

The tensors are only described (torch's meta device): their names and shapes are all that
parameter groups, and muon's choice of matrices, depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from lehr.errors import Problem, RecipeError
from lehr.models.adapters import PEFT_PREFIX, choose_targets
from lehr.training.optimizers import make_optimizer


def require_optimizers(recipe: Any, stages: Sequence[Any], model: Any, precision: str) -> None:
    """Raise RecipeError with what the optimizers of all stages refuse."""
    problems: list[Problem] = []
    for planned in stages:
        settings = planned.settings(precision).optimizer
        half_life = planned.stage.optimizer.beta2_half_life_tokens
        if half_life is not None and settings.betas[1] >= 1:
            where = f"stages.{planned.index} optimizer.beta2_half_life_tokens"
            tokens = planned.tokens_per_update
            expected = f"a half-life that {tokens:,} tokens an update shorten: beta2 would be 1"
            problems.append(Problem(where, expected, half_life))
            continue
        try:
            make_optimizer(described(recipe, stages, planned.index, model), settings)
        except RecipeError as error:
            problems += [
                Problem(f"stages.{planned.index} {one.where}", one.expected, one.value)
                for one in error.problems
            ]
    if problems:
        raise RecipeError(problems)


def described(recipe: Any, stages: Sequence[Any], index: int, model: Any) -> dict[str, Parameter]:
    """What stage `index` will train, by name; without values."""
    network = model.network
    if stages[index].trains_all:
        return {name: _meta(*one.shape) for name, one in network.named_parameters()}
    # A stage goes on with its parent's adapter, unless that is folded or there is none.
    first = index
    while first and not stages[first].stage.fold_parent and not stages[first - 1].trains_all:
        first -= 1
    adapter = stages[first].stage.adapter or recipe.adapter
    found: dict[str, Parameter] = {}
    for name in choose_targets(network, adapter.targets):
        layer = network.get_submodule(name)
        sides = layer.weight.shape  # which side is which does not matter to a group
        found[f"{PEFT_PREFIX}{name}.lora_A.weight"] = _meta(adapter.rank, sides[-1])
        found[f"{PEFT_PREFIX}{name}.lora_B.weight"] = _meta(sides[0], adapter.rank)
    if model.new_rows:
        embedding, output = network.get_input_embeddings(), network.get_output_embeddings()
        names = {id(module): name for name, module in network.named_modules()}
        tied = output.weight is embedding.weight
        for module in [embedding] if tied else [embedding, output]:
            name = f"{PEFT_PREFIX}{names[id(module)]}.token_adapter.trainable_tokens_delta"
            found[name] = _meta(len(model.new_rows), embedding.weight.shape[1])
    return found


def _meta(*shape: int) -> Parameter:
    return Parameter(torch.empty(shape, device="meta"))
