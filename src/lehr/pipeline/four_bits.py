"""What a base in four bits changes in a plan: its bytes, and how an evaluation decodes from it."""

from __future__ import annotations

from typing import Any

from lehr.diagnosis.planner import decoding_bytes
from lehr.generation.products import packing_possible
from lehr.models.nf4 import dense_bytes, stored_bytes
from lehr.models.precision import compute_dtype

OF_A_TRAINED_NUMBER = 4 * (1 + 1 + 1 + 2)  # itself, its reference, gradient, two moments: fp32


def settle_decoding(
    model: Any, precision: str, trained: int, kv_cache: int, limit: int, earlier: Any = None
) -> bool:
    """Whether decoding dequantises each layer anew at every token.

    From a dense copy of the layers it is several times faster: made where it fits `limit` bytes
    beside all that lasts. earlier  what an earlier plan of this run settled: it stays.
    """
    size = compute_dtype(precision).itemsize
    weights = stored_bytes(model.network, size)
    if weights is None:
        return False
    if isinstance(earlier, bool):
        return earlier
    lasting = weights + trained * OF_A_TRAINED_NUMBER + kv_cache
    return lasting + dense_bytes(model.network, size)[1] > limit


def forecast_keys(model: Any, precision: str, in_place: bool) -> dict[str, int]:
    """What diagnosis.planner.forecast takes of how the weights lie, in training and decoding."""
    dtype = compute_dtype(precision)
    weights = stored_bytes(model.network, dtype.itemsize)
    if weights is None:
        # Weights are laid out for decoding on a CPU only.
        packed = model.device.type == "cpu" and packing_possible(dtype)
        return {"decoding_bytes": decoding_bytes(model.config, precision, packed)}
    largest, every = dense_bytes(model.network, dtype.itemsize)
    return {
        "weight_bytes": weights,
        "dequantised_bytes": largest,
        "decoding_bytes": 0 if in_place else every,
    }


def model_keys(model: Any, precision: str, in_place: bool) -> dict[str, Any]:
    """What plan.json says of a model whose base is in four bits; {} for another."""
    weights = stored_bytes(model.network, compute_dtype(precision).itemsize)
    if weights is None:
        return {}
    return {"four_bits": "nf4", "weight_bytes": weights, "decodes_in_place": in_place}
