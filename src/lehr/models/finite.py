"""Weights that are no numbers: refused by name, before a probe finds them by their effects."""

from __future__ import annotations

from typing import Any

import torch

from lehr.errors import Problem, RecipeError


def refuse_nonfinite(origin: str, network: Any) -> None:
    """Raise RecipeError where a weight is NaN or infinite; the tensors are named."""
    bad = [
        name
        for name, weight in network.named_parameters()
        if weight.is_floating_point()
        and weight.element_size() > 1
        and not bool(torch.isfinite(weight.detach()).all())
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        expected = f"weights that are finite numbers; NaN or infinite: {', '.join(bad[:3])}{more}"
        raise RecipeError(Problem(origin, expected, f"{len(bad)} tensors"))
