"""Whether a stage fits its model and its data: refused, or said, before update 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lehr.errors import Problem, RecipeError
from lehr.models.adapters import choose_targets


def learned_positions(network: Any) -> int | None:
    """Rows of a table of learned positions (GPT-2's), or None where positions are computed."""
    vocabulary = network.get_input_embeddings()
    longest = int(getattr(network.config, "max_position_embeddings", 0) or 0)
    tables = [
        module.num_embeddings
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not vocabulary
        and (name.rsplit(".", 1)[-1] == "wpe" or "position" in name.rsplit(".", 1)[-1])
    ]
    return min([*tables, *([longest] if longest and tables else [])], default=None)


def position_problems(recipe: Any, network: Any) -> list[Problem]:
    """Stages whose examples may be longer than the model has learned positions."""
    rows = learned_positions(network)
    if rows is None:
        return []
    return [
        Problem(
            f"stages.{index} max_length",
            f"at most {rows}: the model learned that many positions and has no other",
            stage.max_length,
        )
        for index, stage in enumerate(recipe.stages)
        if stage.max_length > rows
    ]


def target_problems(recipe: Any, stages: Sequence[Any], network: Any) -> list[Problem]:
    """Names of layers that the model does not have, of every stage that trains an adapter."""
    problems: list[Problem] = []
    for planned in stages:
        if planned.trains_all:
            continue
        try:
            choose_targets(network, (planned.stage.adapter or recipe.adapter).targets)
        except RecipeError as error:
            problems += [one for one in error.problems if one not in problems]
    return problems


def batch_finding(name: str, batch_size: int, rows: int) -> str:
    """A line where an update asks for more examples than there are, or ""."""
    if batch_size <= rows:
        return ""
    return (
        f"{name}: batch_size {batch_size:,} is more than the {rows:,} examples that there are: "
        f"an update has at most {rows:,}"
    )
