"""The precisions of a run, and which floating type each part of a model has in them.

    precision   products   frozen weights   trained tensors
    fp32        fp32       fp32             fp32
    bf16        bf16       bf16             fp32
    fp16        fp16       fp16             fp32, under a dynamic loss scale
    fp8         FP8, and bf16 around them   bf16             fp32
    pure_bf16   bf16       bf16             bf16, each update made in fp32 and rounded once

Norms, softmax, losses and the sums of products are fp32 in all of them.
"""

from __future__ import annotations

import torch

COMPUTE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "pure_bf16": torch.bfloat16,
}
PRECISIONS = tuple(COMPUTE_DTYPES)


def compute_dtype(precision: str) -> torch.dtype:
    """Of activations, and of the products (but for those in FP8). ValueError for another word."""
    if precision not in COMPUTE_DTYPES:
        known = ", ".join(PRECISIONS)
        raise ValueError(f"precision is one of {known}, not {precision!r} (resolve auto first)")
    return COMPUTE_DTYPES[precision]


def trained_dtype(precision: str) -> torch.dtype:
    """Of the tensors that an optimizer moves.

    >>> trained_dtype("fp16"), trained_dtype("pure_bf16")
    (torch.float32, torch.bfloat16)
    """
    return torch.bfloat16 if precision == "pure_bf16" else torch.float32


def loaded_dtype(precision: str, all_weights: bool) -> torch.dtype:
    """Of the weights as they are loaded; `all_weights`: all of them will train."""
    return trained_dtype(precision) if all_weights else compute_dtype(precision)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Type of the products where trained weights are wider; None where nothing is cast.

    >>> autocast_dtype("fp8"), autocast_dtype("pure_bf16"), autocast_dtype("fp32")
    (torch.bfloat16, None, None)
    """
    dtype = compute_dtype(precision)
    return None if dtype == trained_dtype(precision) else dtype
