"""What fits a memory limit: room for activations, the size of the head's chunks, what would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lehr.diagnosis.planner import LASTING, SLACK_SHARE
from lehr.errors import OutOfResources, Problem
from lehr.models.head import bf16_products_pay, chunk_rows
from lehr.models.precision import compute_dtype

SMALLEST_CHUNK = 16  # rows; fewer no longer fill a product


def slack_share(model: Any) -> float:
    """Measured for the heap of a CPU; an accelerator's allocator is not forecast."""
    return SLACK_SHARE if model.device.type == "cpu" else 0.0


def cast_parameters(model: Any) -> int:
    """Weights that products cast where all weights train in fp32 and products do not."""
    head = model.network.get_output_embeddings()
    return sum(
        module.weight.numel()
        for module in model.network.modules()
        if module is not head
        and getattr(module, "weight", None) is not None
        and module.weight.dim() == 2
        and not isinstance(module, torch.nn.Embedding)
    )


def product_bytes(model: Any, precision: str) -> int:
    """Of a number in the head's products: a CPU widens what it cannot multiply."""
    dtype = compute_dtype(precision)
    widened = dtype == torch.float16 or not bf16_products_pay()
    return 4 if model.device.type == "cpu" and widened else dtype.itemsize


def room_for_activations(memory: Mapping[str, int], limit: int, share: float, several: bool) -> int:
    """Bytes that activations may take so that the forecast's peak is the limit.

    memory   a forecast of the same stage, whatever its activations
    several  micro-batches an update: their gradients lie beside activations

    >>> parts = {"weights": 300, "gradients": 40, "head": 60, "activations": 7}
    >>> room_for_activations(parts, 600, 0.5, several=True)
    100
    """
    lasting = sum(memory.get(one, 0) for one in LASTING)
    copies = memory.get("casts", 0) + memory.get("dequantised", 0)
    beside = copies + memory["head"] + memory.get("backward", 0)
    beside += memory["gradients"] + memory.get("watching", 0) if several else 0
    return int((limit - lasting) / (1 + share)) - beside


def settle_chunk(
    vocabulary: int, pairs: int, peak: Callable[[int | None], int], limit: int
) -> int | None:
    """Rows of the head's chunks: the head's own (None), or halved until the limit holds.

    peak  rows -> bytes. A chunk that nothing fits with is the smallest.
    """
    rows = min(chunk_rows(vocabulary), pairs)
    if peak(None) <= limit or rows <= SMALLEST_CHUNK:
        return None
    while rows > SMALLEST_CHUNK:
        rows = max(SMALLEST_CHUNK, rows // 2)
        if peak(rows) <= limit:
            break
    return rows


def require_fit(planned: Any, needed: int, limit: int) -> None:
    """Raise OutOfResources where a planned stage needs more than the limit."""
    if needed > limit:
        expected = (
            f"{needed / 2**30:.2f} GiB at micro_batch {planned.micro_batch}, "
            f"{limit / 2**30:.2f} GiB allowed; memory_limit: {limit_that_would_do(needed)} would "
            "do; or free some, lower max_length or pack_length, turn recompute on, or say "
            "micro_batch: auto and --fresh"
        )
        raise OutOfResources(Problem(f"memory of {planned.folder_name}", expected))


def limit_that_would_do(needed: int) -> str:
    """A limit as a person would write it, rounded up.

    >>> limit_that_would_do(900_000_000)
    '0.84'
    """
    return f"{math.ceil(needed / 2**30 * 100) / 100:.2f}"
