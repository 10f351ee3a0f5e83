"""What gpu_check trains: a Llama of random weights on random rows, and the table's line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lehr.data.shapes import Encoded, Origin
from lehr.streams import generator_for


@dataclass(frozen=True)
class Size:
    """What is trained: a Llama of random weights on random tokens.

    rows     of an update; length: tokens of the longest row; pack: tokens of a pack
    updates  of SFT and DPO; long_updates: of bf16 and FP8
    """

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    keys: int
    vocabulary: int
    rows: int
    length: int
    pack: int
    updates: int
    long_updates: int
    prompts: int
    samples: int
    new_tokens: int
    gemm: tuple[int, int, int]

    @property
    def body(self) -> int:
        """Parameters in products of every token."""
        head = self.hidden // self.heads
        attention = self.hidden * head * 2 * (self.heads + self.keys)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head(self) -> int:
        """Parameters in products of supervised tokens."""
        return self.vocabulary * self.hidden


FULL = Size(
    "1b", 2048, 8192, 16, 32, 8, 32_768,
    rows=16, length=1024, pack=4096, updates=6, long_updates=50,
    prompts=8, samples=8, new_tokens=64, gemm=(4096, 2048, 8192),
)  # fmt: skip
TOY = Size(
    "toy", 32, 64, 2, 4, 2, 512,
    rows=4, length=24, pack=64, updates=3, long_updates=3,
    prompts=2, samples=2, new_tokens=4, gemm=(64, 32, 64),
)  # fmt: skip


@dataclass
class Row:
    """One line of the table; numbers that do not apply are None.

    rate   tokens/s that are no padding; mfu: of the matrix-product rate measured here
    first  what another system's first update is compared by
    wrong  something that should be equal is not
    """

    part: str
    system: str
    rate: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    note: str = ""
    wrong: bool = False
    first: float | None = None
    losses: list[float] = field(default_factory=list)


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows])


def from_json(text: str) -> list[Row]:
    return [Row(**one) for one in json.loads(text)]


def make_network(size: Size, device: str, dtype: torch.dtype) -> Any:
    """The same weights whenever it is asked on the same kind of device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.keys,
        max_position_embeddings=4 * size.length,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    devices = [torch.device(device)] if device != "cpu" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).eval()


def some_ids(size: Size, count: int, generator: torch.Generator) -> torch.Tensor:
    """Of 254 ids of the vocabulary: which ones they are is soon learned, and the loss falls."""
    return torch.randint(2, min(256, size.vocabulary), (count,), generator=generator)


def sft_rows(size: Size, rows: int) -> list[Encoded]:
    """Rows of an eighth of the longest length up to it, the second half supervised."""
    found = []
    for number in range(rows):
        generator = generator_for(0, "gpu check", "sft", number)
        longest, shortest = size.length, size.length // 8
        length = shortest + (number * 7919) % (longest - shortest + 1)
        supervised = torch.arange(length) >= length // 2
        ids = some_ids(size, length, generator)
        found.append(Encoded(ids, supervised, Origin("random", "random", number + 1)))
    return found


def pair_rows(size: Size, rows: int) -> list[Encoded]:
    """Prompts of a quarter to half of the longest row, two answers of an eighth each."""
    found = []
    for number in range(rows):
        generator = generator_for(0, "gpu check", "dpo", number)
        origin = Origin("random", "random", number + 1)
        prompt = size.length // 4 + (number * 7919) % (size.length // 4)
        answers = [some_ids(size, size.length // 8, generator) for _ in range(2)]
        branches = tuple(Encoded(a, torch.ones(len(a), dtype=torch.bool), origin) for a in answers)
        ids = some_ids(size, prompt, generator)
        found.append(Encoded(ids, torch.zeros(prompt, dtype=torch.bool), origin, branches))
    return found


@torch.no_grad()
def plain_sum(network: Any, ids: torch.Tensor, supervised: torch.Tensor) -> float:
    """Σ -log p of the supervised tokens of one row, by transformers' forward with labels."""
    ids = ids.to(network.device)[None]
    labels = ids.masked_fill(~supervised.to(network.device)[None], -100)
    count = int(supervised[1:].sum())
    return float(network(input_ids=ids, labels=labels, use_cache=False).loss) * count


def plain_loss(network: Any, rows: Sequence[Encoded]) -> float:
    """Mean of -log p over the supervised tokens of all rows."""
    total = sum(plain_sum(network, one.ids, one.supervised) for one in rows)
    return total / sum(one.supervised_tokens for one in rows)
