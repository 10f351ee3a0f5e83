"""The admission probe: about 50 tokens that prove each fast path for the model at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lehr.data.shapes import Origin, Pack, Segments
from lehr.errors import LehrError
from lehr.models.attention import UnsupportedAttentionError, attention
from lehr.models.language_model import LanguageModel
from lehr.streams import generator_for

Path = Literal["model", "head", "packing", "prefix sharing"]

# Rotary variants whose angles depend on the longest position in the row.
_LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")
_RECURRENT = ("mamba", "ssm", "recurrent", "linear_attention", "rwkv", "conv")
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Refusal:
    """A fast path that this model must not take.

    path    model (nothing works), head, packing, prefix sharing
    name    what in the model is the reason
    reason  what was seen, with the gap where one was measured
    remedy  what to do
    """

    path: Path
    name: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name}: {self.reason}; {self.remedy}"


def probe_pack(parts: Sequence[tuple[Tensor, int]]) -> Pack:
    """A pack of (ids [t], index of the part it continues or -1), every next token a pair."""
    start, positions, sources, targets, sequence = 0, [], [], [], []
    starts: list[int] = []
    lengths: list[int] = []
    offsets: list[int] = []
    for index, (ids, prefix) in enumerate(parts):
        offset = offsets[prefix] + lengths[prefix] if prefix >= 0 else 0
        starts.append(start)
        lengths.append(ids.numel())
        offsets.append(offset)
        positions.append(torch.arange(offset, offset + ids.numel()))
        if prefix >= 0:
            sources.append(starts[prefix] + lengths[prefix] - 1)
            targets.append(int(ids[0]))
            sequence.append(index)
        sources += range(start, start + ids.numel() - 1)
        targets += ids[1:].tolist()
        sequence += [index] * (ids.numel() - 1)
        start += ids.numel()
    return Pack(
        ids=torch.cat([ids for ids, _ in parts]),
        positions=torch.cat(positions),
        segments=Segments(
            torch.tensor(starts), torch.tensor(lengths), torch.tensor([p for _, p in parts])
        ),
        predict_from=torch.tensor(sources),
        targets=torch.tensor(targets),
        sequence=torch.tensor(sequence),
        weights=torch.ones(len(sources)),
        sequence_example=torch.arange(len(parts)),
        items=tuple(range(len(parts))),
        origins=tuple(Origin("probe", "probe", 1) for _ in parts),
    )


@torch.no_grad()
def admission_probe(model: LanguageModel) -> list[Refusal]:
    """Every fast path that would give other numbers than the plain model; empty if all are exact.

    Compares, on random tokens: the fused head with the network's own logits; a packed
    sequence with itself alone; the pack before and after a neighbour changes; each of several
    branches that share a prompt with its whole row alone.
    """
    known = _named_reasons(model.config)
    if any(one.path == "model" for one in known):
        return known
    training = model.training
    model.eval()
    try:
        named = {one.path for one in known}
        return known + [one for one in _measured(model) if one.path not in named]
    except UnsupportedAttentionError as error:
        return [
            Refusal(
                "model",
                model.config.model_type,
                str(error),
                "this version trains only models whose attention is causal over segments; "
                "choose another model",
            )
        ]
    except LehrError as error:
        return [Refusal("model", model.config.model_type, str(error), "choose another model")]
    finally:
        model.train(training)


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _named_reasons(config: Any) -> list[Refusal]:
    config = _text_config(config)
    found = []
    layers = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    recurrent = [
        kind
        for kind in dict.fromkeys([*layers, str(config.model_type)])
        if any(word in kind for word in _RECURRENT)
    ]
    if recurrent:
        found.append(
            Refusal(
                "model",
                f"recurrent layers ({recurrent[0]})",
                "their state runs on from one packed sequence into the next",
                "choose a model with attention only; recurrent layers come later",
            )
        )
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    entries = [rotary, *(v for v in rotary.values() if isinstance(v, dict))]
    for entry in entries:
        kind = entry.get("rope_type", entry.get("type"))
        if kind in _LENGTH_DEPENDENT_ROTARY:
            found.append(
                Refusal(
                    "packing",
                    f"{kind} rotary positions",
                    "their angles depend on the longest position in the pack, so a short "
                    "sequence would change with its neighbours",
                    "use `packing: false`, or a model with fixed rotary positions",
                )
            )
            break
    return found


def _measured(model: LanguageModel) -> list[Refusal]:
    generator = generator_for(0, "admission probe")
    top = min(model.vocabulary_size, 30_000)

    def some(count: int) -> Tensor:
        return torch.randint(0, top, (count,), generator=generator)

    first, second, other = some(12), some(9), some(12)
    prompt, *answers = some(8), some(6), some(5), some(6), some(1)
    tail = [(prompt, -1), *((answer, 2) for answer in answers)]
    states = model.hidden(probe_pack([(first, -1), (second, -1), *tail]))
    changed = model.hidden(probe_pack([(other, -1), (second, -1), *tail]))
    head = model.head().detached()

    refusals: list[Refusal] = []
    alone, alone_logits = _plain(model, second)
    gap = _gap(head.logits(alone), alone_logits)
    if gap > _limit(model):
        refusals.append(
            Refusal(
                "head",
                model.config.model_type,
                f"the fused head differs from the model's own logits by {gap:.2g}",
                "this model's output layer is not supported; choose another model",
            )
        )
    packed = head.logits(states[12:21])
    gap = max(_gap(packed, head.logits(alone)), _gap(states[12:], changed[12:]))
    if gap > _limit(model):
        refusals.append(
            Refusal(
                "packing",
                model.config.model_type,
                f"a packed sequence differs from the same sequence alone by {gap:.2g}",
                "use `packing: false`, or another model",
            )
        )
    end = 29
    for branch in answers:
        start, end = end, end + len(branch)
        row, _ = _plain(model, torch.cat([prompt, branch]))
        gap = _gap(head.logits(states[start:end]), head.logits(row[8:]))
        if gap > _limit(model):
            refusals.append(
                Refusal(
                    "prefix sharing",
                    model.config.model_type,
                    f"an answer that shares its prompt differs from the row alone by {gap:.2g}",
                    "preference and policy stages cannot run on this model; choose another",
                )
            )
            break
    return refusals


def _plain(model: LanguageModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Final hidden states [t, d] and logits [t, V] of one row, by transformers alone."""
    ids = ids.to(model.device)[None]
    with attention(model.network), model._autocast():
        hidden = model.network.base_model(input_ids=ids, use_cache=False)[0][0]
        logits = model.network(input_ids=ids, use_cache=False).logits[0]
    return hidden, logits.float()


def _gap(one: Tensor, two: Tensor) -> float:
    """Largest difference, relative to the larger side's spread (at least 1)."""
    if not bool(torch.isfinite(one).all() and torch.isfinite(two).all()):
        return float("inf")
    scale = max(1.0, float(two.float().abs().max()))
    return float((one.float() - two.float()).abs().max()) / scale


def _limit(model: LanguageModel) -> float:
    return _TOLERANCE[model.compute_dtype]
