"""lehr: make for post-training. Each verb of the command line is a function here.

import lehr
recipe = lehr.load_recipe("examples/demo.yaml")
ledger = lehr.run(recipe)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lehr.errors import (
    Diverged,
    GateRefused,
    Interrupted,
    LehrError,
    OutOfResources,
    Problem,
    RecipeError,
)

if TYPE_CHECKING:
    from lehr.diagnosis.doctor import doctor
    from lehr.pipeline.auditing import audit
    from lehr.pipeline.comparing import evaluate
    from lehr.pipeline.plan import plan
    from lehr.pipeline.run import run
    from lehr.recipe.loading import load_recipe

_WHERE = {
    "audit": "lehr.pipeline.auditing",
    "doctor": "lehr.diagnosis.doctor",
    "evaluate": "lehr.pipeline.comparing",
    "load_recipe": "lehr.recipe.loading",
    "plan": "lehr.pipeline.plan",
    "run": "lehr.pipeline.run",
}

__all__ = [
    "Diverged",
    "GateRefused",
    "Interrupted",
    "LehrError",
    "OutOfResources",
    "Problem",
    "RecipeError",
    "audit",
    "doctor",
    "evaluate",
    "load_recipe",
    "plan",
    "run",
]


def __getattr__(name: str) -> Any:
    # Torch and transformers take seconds to import: only what is asked for is loaded.
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("lehr")
    raise AttributeError(f"module 'lehr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
