"""What a stage will need before it runs: bytes by component, operations, seconds.

Only live tensors are forecast. What the process shows in `top` is that, plus the
interpreter and libraries (`RUNTIME_BYTES`), plus what the allocator keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lehr.diagnosis.watching_memory import NOTHING, Watching
from lehr.generation.products import FUSED_ELEMENTS
from lehr.models.head import chunk_rows
from lehr.models.precision import compute_dtype

RUNTIME_BYTES = 450 * 2**20  # interpreter, torch and transformers loaded, nothing computed
EFFICIENCY = 0.55  # of the measured product rate: norms, attention, adapters, loss, optimizer


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that decide its cost."""

    layers: int
    width: int  # d
    inner: int  # f, of the MLP
    query: int  # heads x head size
    key_value: int  # key/value heads x head size

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers config or a mapping with the same names.

        Raises ValueError naming the first size that is missing.
        """
        width = _size(config, "hidden_size", "n_embd", "d_model")
        heads = _size(config, "num_attention_heads", "n_head")
        head = _size(config, "head_dim", default=width // heads)
        return cls(
            layers=_size(config, "num_hidden_layers", "n_layer"),
            width=width,
            inner=_size(config, "intermediate_size", "n_inner", default=4 * width),
            query=heads * head,
            key_value=_size(config, "num_key_value_heads", default=heads) * head,
        )

    @property
    def products(self) -> int:
        """Weights that a token is multiplied with in the layers (without head and embedding)."""
        attention = self.width * (2 * self.query + 2 * self.key_value)
        return self.layers * (attention + 3 * self.width * self.inner)


def _size(config: Any, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return int(value)
    if default is None:
        raise ValueError(f"the model's config has no {names[0]}: its cost cannot be forecast")
    return default


def activation_bytes_per_token(shape: Shape, precision: str, all_weights: bool) -> int:
    """Bytes that one token leaves for the backward pass, all layers.

    A layer keeps, in compute precision of b bytes: the two normed inputs (2 d), queries, keys,
    values and the attention's answer (2 q + 2 k), the gate before and after its nonlinearity,
    the other branch and their product (4 f). Each norm keeps its input (2 b d; fp32 where all
    weights train). Attention over short segments keeps its shares beside: measured, not here.
    """
    b = _bytes(precision)
    kept = 2 * shape.width + 2 * shape.query + 2 * shape.key_value + 4 * shape.inner
    norms = 2 * (4 if all_weights else b) * shape.width
    return shape.layers * (b * kept + norms)


def forecast(
    config: Any,
    parameters: int,
    trained_parameters: int,
    precision: str,
    pack_tokens: int,
    micro_batch: int,
    vocabulary: int,
    head_chunk: int | None = None,
    moments: int = 2,
    activation_bytes: int | None = None,
    watching: Watching = NOTHING,
    weight_bytes: int | None = None,
    dequantised_bytes: int = 0,
    decoding_bytes: int | None = None,
    kv_cache_bytes: int = 0,
) -> dict[str, int]:
    """Live bytes of a training stage by component, and their sum as "peak".

    config             transformers config or mapping
    parameters         of the base model
    trained_parameters of the adapter; or as many as `parameters`: then all weights train
    pack_tokens        tokens of one pack; micro_batch packs are computed at once
    moments            tensors that the optimizer (and a moving average) keeps beside each weight
    activation_bytes   of a micro-batch, where they have been measured; else nothing is recomputed
    weight_bytes       of a frozen base that is not held in compute precision (NF4); a layer of
                       `dequantised_bytes` exists beside it while it multiplies
    decoding_bytes     of the weights that decoding lays out for itself (default: all of them)
    kv_cache_bytes     of the sequences that an evaluation decodes together
    head_chunk         predicted positions whose logits exist at once (default: the head's own)
    watching           copies that the stage's measurements keep

    Trained tensors are fp32 (4 bytes, gradient 4, AdamW's two moments 8); frozen weights are in
    compute precision. Trained weights that are wider than the products also have a cast copy for
    the backward pass. pure_bf16: trained tensors and gradients are bf16, moments fp32; a step
    has fp32 weights and gradients while it lasts ("update"). "reference" is the frozen copy of the
    parent's adapter (a parent whose weights all train stays on disk). "decoding" and "kv_cache"
    are what the copy of the weights that decoding lays out for itself, and the keys and values
    of what it decodes, take beyond what an update has let go of.
    Raises ValueError on sizes that make no sense.
    """
    if min(parameters, pack_tokens, micro_batch, vocabulary) < 1:
        raise ValueError("parameters, pack_tokens, micro_batch and vocabulary must be positive")
    if trained_parameters < 0:
        raise ValueError("trained_parameters must not be negative")
    shape = Shape.of(config)
    b = _bytes(precision)
    all_weights = trained_parameters >= parameters
    tokens = pack_tokens * micro_batch
    per_token = activation_bytes_per_token(shape, precision, all_weights)
    rows = min(chunk_rows(vocabulary, head_chunk), tokens)
    pure = precision == "pure_bf16"
    wide = 2 if pure else 4  # bytes of a trained number
    components = {
        "weights": parameters * ((wide if b == wide else wide + b) if all_weights else b),
        **({} if weight_bytes is None else {"dequantised": dequantised_bytes}),
        "adapters": 0 if all_weights else trained_parameters * wide,
        "reference": 0 if all_weights else trained_parameters * wide,
        "gradients": trained_parameters * wide,
        "optimizer": trained_parameters * 4 * moments,
        **({"update": trained_parameters * 8} if pure else {}),
        "activations": tokens * per_token if activation_bytes is None else activation_bytes,
        # Logits as the product gives them, in fp32, and their gradient.
        "head": rows * vocabulary * (b + 8),
    }
    forward = components["activations"] + components["head"]
    components["watching"] = watching.bytes_over(trained_parameters * wide, forward)
    if weight_bytes is not None:
        components["weights"] = weight_bytes
    # Evaluations decode between updates, from a copy of the weights at most, while what only
    # an update needs is free.
    let_go = components["gradients"] + forward + components["watching"]
    copied = parameters * b if decoding_bytes is None else decoding_bytes
    components["decoding"] = max(0, copied - let_go)
    components["kv_cache"] = max(0, kv_cache_bytes - max(0, let_go - copied))
    return {**components, "peak": sum(components.values())}


def kv_cache_bytes(config: Any, sequences: int, tokens: int, precision: str) -> int:
    """Keys and values of `sequences` sequences of `tokens` tokens, all layers."""
    shape = Shape.of(config)
    return 2 * shape.layers * shape.key_value * _bytes(precision) * sequences * tokens


def decoding_bytes(config: Any, precision: str, packed: bool) -> int:
    """What decoding copies of the layers' weights (generation/products).

    packed  the processor wants bf16 weights in an order of its own: all are copied. Else only
            layers that are small enough to be joined into one product.
    """
    shape = Shape.of(config)
    query_key_value = shape.width * (shape.query + 2 * shape.key_value)
    output, gate_up = shape.query * shape.width, 2 * shape.width * shape.inner
    products = (query_key_value, output, gate_up, gate_up // 2)
    copied = sum(one for one in products if packed or one <= FUSED_ELEMENTS)
    return shape.layers * copied * _bytes(precision)


def resident_bytes(components: Mapping[str, int]) -> int:
    """What the process will show as resident, roughly: live bytes and the libraries."""
    return components["peak"] + RUNTIME_BYTES


def operations_per_update(
    config: Any,
    *,
    tokens: int,
    supervised_tokens: int,
    vocabulary: int,
    all_weights: bool,
    segment_tokens: int = 0,
) -> float:
    """Floating-point operations of one update over `tokens` tokens.

    A weight costs 2 operations a token forward, 2 backward for the input's gradient, and 2 more
    for its own gradient where it is trained: 4 with a frozen base, 6 with all weights; what is
    computed again is measured (models/recompute_costs). The head sees supervised positions only:
    two products where it is frozen, four where it trains (the logits twice). Attention over
    segments of `segment_tokens`: 2 t q a token and layer forward, 2.5 times that backward.
    """
    shape = Shape.of(config)
    layers = (6.0 if all_weights else 4.0) * shape.products * tokens
    head = (8.0 if all_weights else 4.0) * shape.width * vocabulary * supervised_tokens
    attention = 3.5 * 2.0 * segment_tokens * shape.query * shape.layers * tokens
    return layers + head + attention


def seconds_per_update(
    operations: float, gemm_gflops: float, efficiency: float = EFFICIENCY
) -> float:
    """Seconds of one update from its operations and the measured product rate.

    >>> round(seconds_per_update(1.1e12, 100.0, 0.55), 3)
    20.0
    """
    if gemm_gflops <= 0 or not 0 < efficiency <= 1:
        raise ValueError("the product rate must be positive, the efficiency in (0, 1]")
    return operations / (gemm_gflops * 1e9 * efficiency)


def _bytes(precision: str) -> int:
    return compute_dtype(precision).itemsize
