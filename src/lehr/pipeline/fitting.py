"""Whether a stage fits its model and its data: refused, or said, before update 1."""

from __future__ import annotations

from typing import Any

from torch import nn

from lehr.errors import Problem


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


def batch_finding(name: str, batch_size: int, rows: int) -> str:
    """A line where an update asks for more examples than there are, or ""."""
    if batch_size <= rows:
        return ""
    return (
        f"{name}: batch_size {batch_size:,} is more than the {rows:,} examples that there are: "
        f"an update has at most {rows:,}"
    )
