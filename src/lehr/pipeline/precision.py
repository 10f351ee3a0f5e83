"""The precision of a run: from recipe to engine settings, and what a device cannot do."""

from __future__ import annotations

from typing import Any

from torch import nn

from lehr.errors import Problem, RecipeError
from lehr.models.adapters import linear_layers
from lehr.training.float8_recipe import Float8Settings, LayerChoice, select
from lehr.training.loss_scale import LossScaleSettings
from lehr.training.precision import capability_of, hardware_problems


def loss_scale_of(stage: Any) -> LossScaleSettings | None:
    """The engine's view of the stage's loss scale."""
    if stage.loss_scale is None:
        return None
    return LossScaleSettings(
        init=stage.loss_scale.init,
        growth_interval=stage.loss_scale.growth_interval,
        floor=stage.loss_scale.floor,
        ceiling=stage.loss_scale.ceiling,
    )


def float8_of(stage: Any) -> Float8Settings | None:
    """The engine's view of the stage's FP8 settings."""
    if stage.fp8 is None:
        return None
    return Float8Settings(
        scaling=stage.fp8.scaling,
        window=stage.fp8.window,
        margin=stage.fp8.margin,
        convert=tuple(stage.fp8.convert),
        keep=tuple(stage.fp8.keep),
        keep_first_blocks=stage.fp8.keep_first_blocks,
        keep_last_blocks=stage.fp8.keep_last_blocks,
        smallest_features=stage.fp8.smallest_features,
        backend=stage.fp8.backend,
        measure_every=stage.fp8.measure_every,
    )


def require_precision(recipe: Any, model: Any, precision: str) -> list[list[LayerChoice]]:
    """Per stage, the verdict of FP8 for every linear layer; [] in other precisions.

    Raises RecipeError, with the problems of all stages, where the device of the model cannot do
    what is asked: no units for it, shapes that its FP8 products cannot take, idle patterns.
    """
    device, capability = model.device, capability_of(model.device)
    problems: list[Problem] = []
    choices: list[list[LayerChoice]] = []
    for index, stage in enumerate(recipe.stages):
        fp8 = float8_of(stage)
        found = hardware_problems(precision, fp8, device.type, capability)
        choices.append([])
        if fp8 is not None and not found:
            try:
                choices[-1] = select(
                    model.network, fp8.on(device.type), _plain_layers(model), device.type
                )
            except RecipeError as error:
                found = error.problems
        problems += [Problem(f"stages.{index} {p.where}", p.expected, p.value) for p in found]
    if problems:
        raise RecipeError(problems)
    return choices


def _plain_layers(model: Any) -> dict[str, nn.Linear]:
    """What `convert` will find: plain linear layers, adapted or not; the head too."""
    head = model.network.get_output_embeddings()
    inner = linear_layers(model.network).items()
    found = {name: layer for name, layer in inner if isinstance(layer, nn.Linear)}
    if isinstance(head, nn.Linear):
        names = {id(module): name for name, module in model.network.named_modules()}
        found[names[id(head)]] = head
    return found
