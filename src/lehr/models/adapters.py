"""Putting an adapter around a network's layers, taking it off, adding it to the weights."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lehr.errors import Problem, RecipeError
from lehr.models.adapter_layers import (
    AdapterSpec,
    LoraConv1D,
    LoraLinear,
    LoraMixin,
    LoraNf4,
    RowEmbedding,
    RowLinear,
)
from lehr.models.nf4 import Nf4Linear
from lehr.streams import generator_for

PEFT_PREFIX = "base_model.model."
_LINEAR = (nn.Linear, Conv1D, LoraLinear, LoraConv1D, Nf4Linear, LoraNf4)


def linear_layers(network: Any) -> dict[str, nn.Module]:
    """Every linear layer but the output layer, by module name."""
    output = network.get_output_embeddings()
    return {
        name: module
        for name, module in network.named_modules()
        if type(module) in _LINEAR and module is not output
    }


def choose_targets(network: Any, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Full names of the layers to adapt: "all-linear", or name endings such as "q_proj".

    Raises RecipeError for an ending that matches no layer, naming close ones.
    """
    layers = linear_layers(network)
    if targets == "all-linear":
        if not layers:
            raise RecipeError(Problem("adapter.targets", "a model with linear layers", targets))
        return tuple(layers)
    endings = [targets] if isinstance(targets, str) else list(targets)
    if not endings:
        raise RecipeError(Problem("adapter.targets", "at least one layer name, or all-linear", []))
    chosen: set[str] = set()
    problems = []
    for ending in endings:
        found = [name for name in layers if name == ending or name.endswith(f".{ending}")]
        if not found:
            known = sorted({name.rsplit(".", 1)[-1] for name in layers})
            close = difflib.get_close_matches(ending, known, n=3, cutoff=0.4) or known
            problems.append(
                Problem("adapter.targets", f"the end of a layer's name: {', '.join(close)}", ending)
            )
        chosen.update(found)
    if problems:
        raise RecipeError(problems)
    return tuple(name for name in layers if name in chosen)


def attach_adapter(network: Any, spec: AdapterSpec, seed: int) -> None:
    """Put the adapter of `spec` around its layers; each begins from its own random stream."""
    for name in spec.targets:
        base = network.get_submodule(name)
        generator = generator_for(seed, "adapter", name)
        around: Any = LoraConv1D if isinstance(base, Conv1D) else LoraLinear
        if isinstance(base, Nf4Linear):
            around = LoraNf4
        adapted = around(base, spec, generator)
        adapted.train(base.training)
        _replace(network, name, adapted)
    if spec.rows:
        _attach_vocabulary_rows(network, spec.rows)


def _attach_vocabulary_rows(network: Any, ids: Sequence[int]) -> None:
    embedding, output = network.get_input_embeddings(), network.get_output_embeddings()
    if max(ids) >= embedding.num_embeddings:
        raise RecipeError(
            Problem(
                "adapter rows",
                f"token ids below the embedding's {embedding.num_embeddings} rows",
                max(ids),
            )
        )
    names = {id(module): name for name, module in network.named_modules()}
    inner = RowEmbedding(embedding, ids)
    _replace(network, names[id(embedding)], inner)
    shared = inner.rows if output.weight is embedding.weight else None
    _replace(network, names[id(output)], RowLinear(output, ids, shared))


def _replace(network: Any, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(parent) if parent else network, leaf, module)


def detach_adapter(network: Any) -> None:
    """Plain layers again, around the weights as they are now."""
    modules: list[tuple[str, Any]] = list(network.named_modules())
    for name, module in modules:
        plain: Any
        if isinstance(module, LoraConv1D):
            plain = Conv1D.__new__(Conv1D)
            nn.Module.__init__(plain)
            plain.nf, plain.nx = module.nf, module.nx
        elif isinstance(module, LoraNf4):
            plain = Nf4Linear(module.quantised, module.bias, module.dtype)
            plain.train(module.training)
            _replace(network, name, plain)
            continue
        elif isinstance(module, LoraLinear | RowLinear):
            plain = nn.Linear.__new__(nn.Linear)
            nn.Module.__init__(plain)
            plain.in_features, plain.out_features = module.in_features, module.out_features
        elif isinstance(module, RowEmbedding):
            # Stays as a plain embedding: Gemma's has a multiplier.
            set_active(module, False)
            del module.rows
            continue
        else:
            continue
        plain.weight, plain.bias = module.weight, module.bias
        plain.train(module.training)
        _replace(network, name, plain)


def adapter_modules(network: Any) -> Iterator[tuple[str, Any]]:
    """Modules that hold trained tensors of an adapter, with their names."""
    for name, module in network.named_modules():
        if isinstance(module, LoraMixin) or (
            isinstance(module, RowEmbedding | RowLinear) and hasattr(module, "rows")
        ):
            yield name, module


def trained_tensors(network: Any) -> dict[str, nn.Parameter]:
    """Trained tensors of the adapter under the names that `peft` gives them in its file."""
    tensors: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, module in adapter_modules(network):
        if isinstance(module, LoraMixin):
            tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = module.lora_a
            tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = module.lora_b
        elif id(module.rows) not in seen:
            seen.add(id(module.rows))
            tensors[f"{PEFT_PREFIX}{name}.token_adapter.trainable_tokens_delta"] = module.rows
    return tensors


def set_active(network: Any, active: bool) -> None:
    """Adapter on or off, everywhere."""
    for _, module in adapter_modules(network):
        module.adapter_active = active


def merged_weights(
    network: Any, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """`weights` with the adapter added in fp32, then cast to `dtype`; the live weights stay.

    Layers in four bits stand among them dequantised, one at a time in fp32.
    """
    merged = {
        name: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    for name, module in network.named_modules():
        if isinstance(module, Nf4Linear):
            full = module.quantised.dense(torch.float32)
            if isinstance(module, LoraMixin):
                full += module.delta()
            merged[f"{name}.weight"] = full.to(dtype)
    for name, module in adapter_modules(network):
        if isinstance(module, Nf4Linear):
            continue
        key = f"{name}.weight"
        if key not in merged:
            continue  # a tied output layer: its rows are the embedding's
        full = module.weight.detach().float()
        if isinstance(module, LoraMixin):
            full = full + module.delta()
        else:
            full = full.index_copy(0, module.row_ids, module.rows.detach().float())
        merged[key] = full.to(dtype)
    return merged
