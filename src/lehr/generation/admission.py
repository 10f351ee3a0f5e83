"""Which forward pass decodes a network: the lean one where it gives the same numbers."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lehr.generation.lean_batch import LeanBatch
from lehr.generation.lean_network import LeanNetwork
from lehr.generation.llama_shape import AnotherShape
from lehr.generation.network_batch import NetworkBatch, decoding_network
from lehr.generation.rows import Group
from lehr.models.adapters import adapter_modules
from lehr.models.attention import UnsupportedAttentionError
from lehr.streams import generator_for

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
_PROMPT_LENGTHS = (9, 5, 12)
_STEPS = 4
_NOT_FINITE = "its logits are not finite"

# A verdict is about the arithmetic of a network's modules, so it outlives their weights.
_VERDICTS: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def why_not_lean(network: Any) -> str:
    """What keeps the lean pass from this network, or "": measured once for each kind of layer.

    Three prompts of different lengths and four steps through both passes; the largest
    difference of a logit, relative to the largest logit, must be within 1e-4 (bf16: 6e-2).
    """
    if getattr(network, "decodes_in_place", False):
        return "the memory limit has no room for its layers in four bits, dequantised"
    verdicts = _VERDICTS.setdefault(network, {})
    key = _kinds(network)
    if key in verdicts:
        return verdicts[key]
    reason = _measured(network)
    if reason != _NOT_FINITE:
        verdicts[key] = reason
    return reason


def decode_in_place(network: Any, always: bool) -> None:
    """Whether decoding may lay out no weights of `network`: dense ones beside codes are large."""
    network.decodes_in_place = always


def _kinds(network: Any) -> str:
    config = network.config
    kinds = sorted({type(module).__name__ for module in network.modules()})
    adapters = sorted({f"{module.adapter_active}" for _, module in adapter_modules(network)})
    dtype = next(network.parameters()).dtype
    return f"{config.model_type} {dtype} {network.device.type} {kinds} {adapters}"


def _measured(network: Any) -> str:
    generator = generator_for(0, "decoding probe")
    size = int(network.get_input_embeddings().weight.shape[0])
    groups = [
        Group(tuple(torch.randint(0, size, (length,), generator=generator).tolist()), ((index,),))
        for index, length in enumerate(_PROMPT_LENGTHS)
    ]
    tokens = [torch.randint(0, size, (len(groups),), generator=generator) for _ in range(_STEPS)]
    with torch.no_grad(), decoding_network(network):
        try:
            lean = LeanBatch(LeanNetwork(network), len(groups))
            ours = _logits(lean, groups, tokens)
        except (AnotherShape, UnsupportedAttentionError) as error:
            return str(error)
        theirs = _logits(NetworkBatch(network, lambda _: _STEPS), groups, tokens)
    if not bool(torch.isfinite(theirs).all()):
        return _NOT_FINITE
    spread = max(1.0, float(theirs.abs().max()))
    gap = float((ours - theirs).abs().max()) / spread
    if gap <= _TOLERANCE[network.get_input_embeddings().weight.dtype]:
        return ""
    return f"its logits differ from the network's own by {gap:.2g} of the largest"


def _logits(batch: Any, groups: list[Group], tokens: list[Tensor]) -> Tensor:
    found = [batch.admit(groups)]
    found += [batch.step(one.to(found[0].device)).clone() for one in tokens]
    return torch.stack(found)
