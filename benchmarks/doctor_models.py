"""What the doctor's tiny trainings train: tokens, set-up and weights of a group of runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lehr.data.docstrings import docstring_rows

VOCABULARY = 64
CONTEXT = 32
HELDOUT_ROWS = 96


@dataclass(frozen=True)
class Setup:
    """What a group trains. `fault` is a key of `FAULTS`, or "" for a healthy run."""

    fault: str = ""
    width: int = 32
    layers: int = 2
    optimizer: str = "adamw"  # a key of `RATES`
    schedule: str = "cosine"  # cosine | linear | constant | wsd
    warmup: int = 20
    updates: int = 240
    batch: int = 8
    clip: float = 1.0
    dropout: float = 0.0
    rows: int = 6000  # of CONTEXT + 1 tokens; fewer rows are more epochs
    source: str = "docstrings"  # docstrings | chain
    evaluate_every: int = 20
    kind: str = "language"  # language | lora | preference
    resumes: bool = False
    speed: float = 1.0  # of the optimizer's usual rate


@lru_cache
def corpus(source: str) -> np.ndarray:
    """Tokens below VOCABULARY: characters of docstrings, or a random chain of first order."""
    if source == "docstrings":
        text = "\n".join(row.value["text"] for row in docstring_rows()[0])[:1_200_000].lower()
        names, counts = np.unique(list(text), return_counts=True)
        kept = names[np.argsort(-counts)][: VOCABULARY - 1]
        place = {name: number for number, name in enumerate(kept)}
        return np.array([place.get(one, VOCABULARY - 1) for one in text], dtype=np.int64)
    draw = np.random.default_rng(7)
    chain = draw.dirichlet(np.full(VOCABULARY, 0.06), size=VOCABULARY)
    cumulative = np.cumsum(chain, axis=1)
    tokens = np.zeros(300_000, dtype=np.int64)
    uniform = draw.random(len(tokens))
    for index in range(1, len(tokens)):
        tokens[index] = min(
            VOCABULARY - 1, np.searchsorted(cumulative[tokens[index - 1]], uniform[index])
        )
    return tokens


@lru_cache
def unigram_entropy(source: str) -> float:
    """Of the corpus, in nats."""
    shares = np.bincount(corpus(source), minlength=VOCABULARY) / len(corpus(source))
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


class Weights:
    """The weights of a group, in the order in which they are used."""

    def __init__(self, runs: int, setup: Setup, generator: torch.Generator) -> None:
        width = setup.width

        def normal(*shape: int, spread: float) -> Tensor:
            made = torch.randn(runs, *shape, generator=generator) * spread
            return made.requires_grad_()

        self.tensors = {
            "embed": normal(VOCABULARY, width, spread=0.3),
            "place": normal(CONTEXT + 1, width, spread=0.1),
            "head": normal(width, VOCABULARY, spread=0.02),
        }
        for layer in range(setup.layers):
            for name, shape in (
                ("qkv", (width, 3 * width)),
                ("out", (width, width)),
                ("up", (width, 4 * width)),
                ("down", (4 * width, width)),
            ):
                self.tensors[f"{layer}.{name}"] = normal(*shape, spread=shape[0] ** -0.5)
        self.heads = max(1, width // 16)
        self.layers = setup.layers

    def add_adapters(self, runs: int, rank: int, generator: torch.Generator) -> None:
        """Freeze all weights and put a LoRA pair beside each matrix of a layer."""
        for name, tensor in list(self.tensors.items()):
            tensor.requires_grad_(False)
            if "." in name:
                into, out = tensor.shape[1:]
                a = torch.randn(runs, into, rank, generator=generator) * into**-0.5
                self.tensors[f"{name}.a"] = a.requires_grad_()
                self.tensors[f"{name}.b"] = torch.zeros(runs, rank, out).requires_grad_()

    def trained(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.tensors.items() if one.requires_grad}

    def product(self, hidden: Tensor, name: str) -> Tensor:
        """hidden [runs, n, in] times a matrix, with its adapter."""
        result = torch.bmm(hidden, self.tensors[name])
        if f"{name}.a" in self.tensors:
            low = torch.bmm(hidden, self.tensors[f"{name}.a"])
            result = result + 2.0 * torch.bmm(low, self.tensors[f"{name}.b"])
        return result

    def logits(self, ids: Tensor, causal: bool = True, dropout: float = 0.0) -> Tensor:
        """ids [runs, rows, t] to logits [runs, rows, t, vocabulary]."""
        runs, rows, length = ids.shape
        width = self.tensors["embed"].shape[-1]
        offset = torch.arange(runs)[:, None, None] * VOCABULARY
        hidden = functional.embedding(ids + offset, self.tensors["embed"].reshape(-1, width))
        hidden = hidden + self.tensors["place"][:, None, :length]
        hidden = hidden.reshape(runs, rows * length, width)
        for layer in range(self.layers):
            qkv = self.product(_normed(hidden), f"{layer}.qkv")
            qkv = qkv.reshape(runs * rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*qkv, is_causal=causal)
            mixed = mixed.transpose(1, 2).reshape(runs, rows * length, width)
            hidden = hidden + functional.dropout(self.product(mixed, f"{layer}.out"), dropout)
            inner = functional.gelu(self.product(_normed(hidden), f"{layer}.up"))
            hidden = hidden + functional.dropout(self.product(inner, f"{layer}.down"), dropout)
        hidden = functional.dropout(_normed(hidden), dropout)
        return torch.bmm(hidden, self.tensors["head"]).reshape(runs, rows, length, -1)


def _normed(hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
