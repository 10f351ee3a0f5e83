"""What a stage will need before it runs: bytes by component, operations, seconds.

Live tensors are counted by the phase that they live in; "slack" is what the allocator keeps
beside them. What the process shows in `top` is both and the interpreter with its libraries
(`RUNTIME_BYTES`). docs/planner.md holds the formulas beside what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lehr.diagnosis.watching_memory import NOTHING, Watching
from lehr.generation.products import FUSED_ELEMENTS
from lehr.models.head import chunk_rows
from lehr.models.head_chunks import SHARPENED
from lehr.models.precision import compute_dtype

RUNTIME_BYTES = 450 * 2**20  # interpreter, torch and transformers loaded, nothing computed
# Of what an update makes and lets go of: glibc's heap has holes where sizes vary. Measured.
SLACK_SHARE = 0.5
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


@dataclass(frozen=True)
class Load:
    """The largest micro-batch of a stage, and how many an update has at most.

    tokens  that go through the layers; pairs: predicted positions, which go through the head
    """

    tokens: int
    pairs: int
    micro_batches: int = 2


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
    *,
    load: Load | None = None,
    working_bytes: int = 0,
    cast_parameters: int | None = None,
    product_bytes: int | None = None,
    slack_share: float = 0.0,
) -> dict[str, int]:
    """Bytes of a training stage by component, and their sum as "peak".

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
    load               of the largest micro-batch (default: full packs, every token predicted)
    working_bytes      the part of activation_bytes that a block computed again needs for a while
    cast_parameters    that products cast where all weights train (default: those of the layers)
    product_bytes      of a number in the head's products (default: of the precision)
    slack_share        of what an update makes and lets go of: kept by the allocator beside it

    Trained tensors are fp32 (4 bytes, gradient 4, AdamW's two moments 8); frozen weights are in
    compute precision. Trained weights that are wider than the products have a cast copy from the
    forward to the backward pass ("casts"). pure_bf16: trained tensors and gradients are bf16,
    moments fp32; a step has fp32 weights and gradients while it lasts ("update"). "reference" is
    the frozen copy of the parent's adapter (a parent whose weights all train stays on disk).
    "decoding" and "kv_cache" are what the copy of the weights that decoding lays out for itself,
    and the keys and values of what it decodes, take beyond what an update has let go of.
    "reused" (0 or negative): what one phase takes over from another that is past.
    Raises ValueError on sizes that make no sense.
    """
    if min(parameters, pack_tokens, micro_batch, vocabulary) < 1:
        raise ValueError("parameters, pack_tokens, micro_batch and vocabulary must be positive")
    if trained_parameters < 0:
        raise ValueError("trained_parameters must not be negative")
    shape = Shape.of(config)
    b = _bytes(precision)
    all_weights = trained_parameters >= parameters
    full = pack_tokens * micro_batch
    load = load or Load(full, full)
    if activation_bytes is None:
        activation_bytes = load.tokens * activation_bytes_per_token(shape, precision, all_weights)
    pure = precision == "pure_bf16"
    wide = 2 if pure else 4  # bytes of a trained number
    casts = shape.products if cast_parameters is None else cast_parameters
    components = {
        "weights": parameters * (wide if all_weights else b),
        **({} if weight_bytes is None else {"dequantised": dequantised_bytes}),
        "adapters": 0 if all_weights else trained_parameters * wide,
        "reference": 0 if all_weights else trained_parameters * wide,
        "gradients": trained_parameters * wide,
        "optimizer": trained_parameters * 4 * moments,
        **({"update": trained_parameters * 8} if pure else {}),
        **({"casts": casts * b} if all_weights and b != wide else {}),
        "activations": activation_bytes,
        "head": head_bytes(
            min(chunk_rows(vocabulary, head_chunk), load.pairs),
            vocabulary,
            shape.width,
            weight_bytes=wide if all_weights else b,
            product_bytes=product_bytes or b,
            trained=all_weights,
            pairs=load.pairs,
        ),
    }
    several = load.micro_batches > 1
    # The layers' backward pass begins in the final norm, fp32, or in the last feed-forward part;
    # of a head that trains its first gradient remains.
    embedding = vocabulary * shape.width * 4 if all_weights else 0
    first = working_bytes + load.tokens * max(12 * shape.width, 2 * b * shape.inner)
    first += 0 if several else embedding
    components["backward"] = max(0, first - working_bytes - components["head"])
    of_forward = ("casts", "dequantised", "activations", "head", "backward")
    forward = sum(components.get(one, 0) for one in of_forward)
    one = trained_parameters * wide
    components["watching"] = watching.bytes_over(one, forward)
    if weight_bytes is not None:
        components["weights"] = weight_bytes
    # Evaluations decode between updates, from a copy of the weights at most, while what only
    # an update needs is free.
    let_go = components["gradients"] + forward + components["watching"]
    copied = parameters * b if decoding_bytes is None else decoding_bytes
    components["decoding"] = max(0, copied - let_go)
    components["kv_cache"] = max(0, kv_cache_bytes - max(0, let_go - copied))
    phases = _Phases(
        forward=components.get("casts", 0)
        + components.get("dequantised", 0)
        + components["activations"]
        - working_bytes
        + max(components["head"], first),
        gradients=components["gradients"],
        # The embedding's own gradient comes last, beside that of a head with the same weights.
        step=max(components.get("update", 0) + watching.weights * one, embedding),
        kept=watching.gradients * one,
    )
    update = phases.most(several)
    decodes = copied + kv_cache_bytes
    passing = max(update, decodes)
    lasting = sum(components[one] for one in LASTING)
    components["reused"] = lasting + passing - sum(components.values())
    # Measured for updates: what evaluations decode lies in few large blocks.
    components["slack"] = max(update + int(slack_share * update), decodes) - passing
    return {**components, "peak": sum(components.values())}


LASTING = ("weights", "adapters", "reference", "optimizer")


@dataclass(frozen=True)
class _Phases:
    """Bytes beside what lasts, by when they live."""

    forward: int  # until the backward pass lets go of it
    gradients: int  # from the first backward pass of an update to its end
    step: int  # while weights move
    kept: int  # from an update's first micro-batch to its end

    def most(self, several: bool) -> int:
        """several  micro-batches an update: gradients are there when the next begins"""
        forward = self.forward + (self.gradients + self.kept if several else 0)
        return max(forward, self.gradients + self.kept + self.step)


def head_bytes(
    rows: int,
    vocabulary: int,
    width: int,
    weight_bytes: int,
    product_bytes: int,
    trained: bool,
    pairs: int = 0,
) -> int:
    """Most bytes that the fused head takes with `rows` predicted positions in a chunk.

    A frozen head has a chunk's logits in fp32, and beside them in the products' type where that
    is narrower. One that trains has in its backward pass fp32 logits, their gradient and that in
    the products' type, with the weight's gradient in fp32, what a chunk adds to it, and that in
    fp32 again where it is narrower; or, earlier, three fp32 tensors of a chunk. A weight of
    another type than the products' has a copy in theirs. Of narrow products the likeliest logits
    are summed again: two fp32 rows for each of nine a position. All `pairs` have their hidden
    state picked, and a gradient beside it.

    >>> head_bytes(16, 5000, 64, 2, 2, False), head_bytes(16, 500, 64, 4, 2, True)
    (480000, 464000)
    """
    logits, matrix = rows * vocabulary, vocabulary * width
    narrow = product_bytes < 4
    cast = matrix * product_bytes if weight_bytes != product_bytes else 0
    cast += pairs * width * 2 * product_bytes
    again = rows * width * 4 * (2 * (SHARPENED + 1) + 1) if narrow else 0
    if not trained:
        return cast + 4 * logits + max(logits * product_bytes if narrow else 0, again)
    added = matrix * (product_bytes + (4 if narrow else 0))
    late = logits * (8 + (product_bytes if narrow else 0)) + added
    return cast + matrix * 4 + max(12 * logits, late, 4 * logits + again)


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
