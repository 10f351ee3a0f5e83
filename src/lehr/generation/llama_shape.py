"""Is a network what decoding has a lean forward pass for, and which module does what?

The shape: RMSNorm, rotary positions, grouped heads (with or without norms and biases),
a gated feed-forward layer, residuals around both: Llama, Mistral, Qwen2, Qwen3. Every
parameter must have its known place; what parameters cannot show, `lean_probe` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lehr.models.adapter_layers import LoraLinear, LoraNf4, RowEmbedding, RowLinear
from lehr.models.nf4 import Nf4Linear

# A window is longer than any probe, so that its meaning must be known.
_WINDOWED = frozenset(["mistral", "qwen2", "qwen3"])
_ANGLES_BY_LENGTH = frozenset(["dynamic", "longrope"])
_LINEAR = (nn.Linear, LoraLinear, RowLinear, Nf4Linear, LoraNf4)


class AnotherShape(ValueError):
    """The network has something that the lean pass does not compute (named)."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: weight [d] and epsilon."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class Layer:
    """One block's modules; `window`: how many positions a query sees, itself included."""

    before_attention: Norm
    query_key_value: tuple[Any, Any, Any]
    norms_of_heads: tuple[Norm, Norm] | None
    output: Any
    before_feed_forward: Norm
    gate_up: tuple[Any, Any]
    down: Any
    activation: Any
    window: int | None
    scale: float


@dataclass(frozen=True)
class Shape:
    """A whole network: embedding, blocks, final norm, rotary angles, head sizes."""

    embedding: Any
    layers: tuple[Layer, ...]
    norm: Norm
    rotary: Any
    heads: int
    groups: int
    head_size: int
    dtype: torch.dtype


def llama_shape(network: Any) -> Shape:
    """The parts of `network`. Raises AnotherShape with the first thing that is different."""
    config = network.config
    base = network.base_model
    for name in ("layers", "norm", "rotary_emb"):
        _need(hasattr(base, name), f"no {name}")
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    _need(type(embedding) in (nn.Embedding, RowEmbedding), type(embedding).__name__)
    _need(getattr(embedding, "multiplier", None) is None, "a scaled embedding")
    _need(type(head) in _LINEAR, type(head).__name__)
    _refuse_rotary(config)
    layers = tuple(_layer(block, _window(config, index)) for index, block in enumerate(base.layers))
    _need(bool(layers), "no layers")
    attention = base.layers[0].self_attn
    size = int(attention.head_dim)
    query, key, _ = layers[0].query_key_value
    dtypes = {p.dtype for name, p in network.named_parameters() if not _of_adapter(name)}
    _need(len(dtypes) == 1, "weights of several types")
    dtype = dtypes.pop()
    _need(dtype in (torch.float32, torch.bfloat16), f"weights in {dtype}")
    _need(network.device.type == "cpu", f"a {network.device.type} device")
    shape = Shape(
        embedding=embedding,
        layers=layers,
        norm=_norm(base.norm),
        rotary=base.rotary_emb,
        heads=int(query.weight.shape[0]) // size,
        groups=int(key.weight.shape[0]) // size,
        head_size=size,
        dtype=dtype,
    )
    _every_parameter_known(network, shape, head)
    return shape


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AnotherShape(otherwise)


def _of_adapter(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "rows")


def _norm(module: Any) -> Norm:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    _need(isinstance(epsilon, float), f"{type(module).__name__} without an epsilon")
    assert epsilon is not None
    return Norm(module.weight.detach(), epsilon)


def _layer(block: Any, window: int | None) -> Layer:
    for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
        _need(hasattr(block, name), f"a block without {name}")
    attention, feed = block.self_attn, block.mlp
    for owner, names in ((attention, "q_proj k_proj v_proj o_proj"), (feed, "down_proj act_fn")):
        for name in names.split():
            _need(hasattr(owner, name), f"{type(owner).__name__} without {name}")
    _need(hasattr(feed, "gate_proj") and hasattr(feed, "up_proj"), "no gated feed-forward layer")
    triple = (attention.q_proj, attention.k_proj, attention.v_proj)
    pair = (feed.gate_proj, feed.up_proj)
    for module in (*triple, attention.o_proj, *pair, feed.down_proj):
        _need(type(module) in _LINEAR, f"a {type(module).__name__}")
    heads = None
    if hasattr(attention, "q_norm"):
        heads = (_norm(attention.q_norm), _norm(attention.k_norm))
        _need(heads[0].weight.numel() == attention.head_dim, "a norm over all heads")
    return Layer(
        before_attention=_norm(block.input_layernorm),
        query_key_value=triple,
        norms_of_heads=heads,
        output=attention.o_proj,
        before_feed_forward=_norm(block.post_attention_layernorm),
        gate_up=pair,
        down=feed.down_proj,
        activation=feed.act_fn,
        window=window,
        scale=float(attention.scaling),
    )


def _window(config: Any, index: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds:
        _need(kinds[index] in ("full_attention", "sliding_attention"), f"{kinds[index]} layers")
        window = window if kinds[index] == "sliding_attention" else None
    if window is None:
        return None
    _need(config.model_type in _WINDOWED, f"a window in {config.model_type}")
    return int(window)


def _refuse_rotary(config: Any) -> None:
    rotary = getattr(config, "rope_parameters", None) or {}
    kind = rotary.get("rope_type", "default")
    _need(kind not in _ANGLES_BY_LENGTH, f"{kind} rotary positions")
    _need(float(rotary.get("partial_rotary_factor", 1.0)) == 1.0, "partly rotated heads")


def _every_parameter_known(network: Any, shape: Shape, head: Any) -> None:
    """A parameter without a place is arithmetic that the lean pass would leave out."""
    modules = [shape.embedding, head]
    norms = [shape.norm]
    for layer in shape.layers:
        modules += [*layer.query_key_value, layer.output, *layer.gate_up, layer.down]
        norms += [layer.before_attention, layer.before_feed_forward, *(layer.norms_of_heads or ())]
    known = {id(p) for module in modules for p in module.parameters()}
    known_data = {norm.weight.data_ptr() for norm in norms}
    for name, parameter in network.named_parameters():
        if id(parameter) not in known and parameter.data_ptr() not in known_data:
            raise AnotherShape(f"the parameter {name}")
