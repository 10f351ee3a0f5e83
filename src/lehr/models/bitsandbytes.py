"""The optional library that holds and reads codes in four bits, imported without side effects.

Its import asks the package `kernels`, where that is installed, for compiled code from a hub,
and warns on the terminal where it is not. Nothing that lehr computes needs that code.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

from lehr.errors import Problem, RecipeError

REMEDY = "pip install 'lehr[quant]'"


def is_there() -> bool:
    """Whether bitsandbytes is installed."""
    return find_spec("bitsandbytes") is not None


def require_bitsandbytes() -> None:
    """Raise RecipeError where NF4 cannot be made here."""
    if not is_there():
        expected = f"bitsandbytes for a base in four bits: {REMEDY}, or say kind: lora"
        raise RecipeError(Problem("adapter.kind", expected, "qlora"))
    functional()


@cache
def functional() -> Any:
    """bitsandbytes.functional. Raises RecipeError where its import fails."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    missing = object()
    before = sys.modules.get("kernels", missing)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        import bitsandbytes.functional as found
    except (ImportError, OSError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        expected = f"a bitsandbytes that can be imported ({reason}): {REMEDY}, or say kind: lora"
        raise RecipeError(Problem("adapter.kind", expected, "qlora")) from error
    finally:
        if before is missing:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = before  # type: ignore[assignment]
    return found


def before_peft() -> None:
    """peft imports bitsandbytes where it is installed: let it find it imported."""
    if is_there():
        functional()
