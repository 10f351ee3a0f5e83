"""Decoding: prompts in, new tokens and their log-probabilities out.

Distinct prompts are prefilled once, a finished sequence leaves the batch and a waiting one
takes its place. Greedy results do not depend on batch size or order; samples draw random
numbers keyed by item and position. The lean pass computes where it was seen to give the
network's own numbers (`admission`), else the network does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from lehr.errors import LehrError, Problem
from lehr.generation.admission import why_not_lean
from lehr.generation.lean_batch import LeanBatch
from lehr.generation.lean_network import LeanNetwork
from lehr.generation.network_batch import NetworkBatch, decoding_network
from lehr.generation.products import Kind, packing_possible
from lehr.generation.rows import Batch, Ending, Group, decode_rows
from lehr.generation.sampling import Sampling, item_keys, uniform_table
from lehr.generation.stops import Decode, StopStrings, before_stop

DEFAULT_BATCH_SIZE = 32
# Laying weights out takes as long as some eight steps gain by it.
_STEPS_THAT_PACK = 16

Pass = Literal["auto", "lean", "network"]


class HasNetwork(Protocol):
    """What the decode loop needs of a model: `network`, a transformers causal model."""

    @property
    def network(self) -> Any: ...


@dataclass(frozen=True)
class Generated:
    """What a model wrote after one prompt.

    ids                the new tokens; where `stopped`, the last one is the stop id
    stopped            a stop id was written (else a stop string was, or the token budget or
                       the context ended)
    log_probabilities  natural log-probability of each of `ids` under the model itself, at
                       temperature 1 and without a nucleus, whatever was used for sampling
    stop_string        the stop string that the last token completed, or None
    """

    ids: list[int]
    stopped: bool
    log_probabilities: list[float] = field(default_factory=list)
    stop_string: str | None = None

    @property
    def answer_ids(self) -> list[int]:
        """The new tokens without the stop id."""
        return self.ids[:-1] if self.stopped else list(self.ids)

    def text(self, decode: Decode) -> str:
        """The answer without its stop id or stop string."""
        return before_stop(decode(self.answer_ids), self.stop_string)


def generate(
    model: HasNetwork,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Set[int],
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    row_seeds: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    decode: Decode | None = None,
    batch_size: int | None = None,
    through: Pass = "auto",
    merge_adapter: bool = False,
    int8: bool = False,
) -> list[Generated]:
    """Continue each prompt until a stop id, a stop string or `max_new_tokens`.

    prompts        token ids as `Encoder.prompt_ids` makes them; results come in this order
    temperature    0 is greedy; else samples from softmax(logits / temperature), cut by top_k,
                   top_p and min_p (see Sampling)
    row_seeds      what names a prompt's random numbers beside `seed` (default: its index)
    stop_strings   end an answer where its text, by `decode`, holds one of them
    batch_size     sequences decoded together (default 32); in fp32 it changes no answer, in bf16
                   it may move last bits, and a rare answer with them
    through        auto; network: its own forward pass; lean: refused where it is not exact
    merge_adapter  add the adapter to a copy of the weights: faster by a few percent, and in
                   bf16 another model by the rounding of that sum
    int8           weights in 8 bits by row, the adapter merged: half the memory, other numbers
    Raises LehrError for an empty prompt, one that fills the context, or bad settings;
    Diverged where the model's logits are not finite.
    """
    sampling = Sampling(temperature, top_p, top_k, min_p)
    _check(model, prompts, max_new_tokens, sampling, batch_size)
    _check_rows(prompts, row_seeds, stop_strings, decode)
    if not prompts or max_new_tokens == 0:
        return [Generated([], False) for _ in prompts]
    groups = _groups(prompts, share_answers=sampling.greedy)
    network = model.network
    ending = Ending(
        frozenset(stop_ids),
        _budget(network, max_new_tokens),
        StopStrings(stop_strings, decode) if stop_strings and decode else None,
    )
    uniform = None
    if not sampling.greedy:
        names = range(len(prompts)) if row_seeds is None else row_seeds
        uniform = uniform_table(item_keys(seed, names), max_new_tokens)
    answers = sum(len(group.answers) for group in groups)
    rows = min(answers, batch_size or DEFAULT_BATCH_SIZE)
    with torch.no_grad(), decoding_network(network):
        batch: Batch
        if _takes_lean_pass(network, through, merge_adapter or int8):
            steps = max_new_tokens * -(-answers // rows)
            kind = _kind(network, rows, steps, int8)
            batch = LeanBatch(LeanNetwork(network, kind, merge_adapter), rows)
        else:
            batch = NetworkBatch(network, ending.budget)
        done = decode_rows(batch, groups, rows, sampling, uniform, ending)
    results: dict[int, Generated] = {}
    for row in done:
        one = Generated(row.ids, row.stopped, row.log_probabilities, row.stop_string)
        results.update((item, one) for item in row.items)
    return [results[item] for item in range(len(prompts))]


def _takes_lean_pass(network: Any, through: Pass, needed: bool) -> bool:
    if through == "network" and not needed:
        return False
    reason = "through: network" if through == "network" else why_not_lean(network)
    if reason and (needed or through == "lean"):
        asked = "merge_adapter and int8 need" if needed else "through='lean' needs"
        raise LehrError(Problem("generate", f"a network for the lean pass, which {asked}", reason))
    return not reason


def _kind(network: Any, rows: int, steps: int, int8: bool) -> Kind:
    """How the weights lie; but for int8 this changes speed and memory only."""
    if int8:
        return "int8"
    dtype = network.get_input_embeddings().weight.dtype
    worth = rows > 1 and steps >= _STEPS_THAT_PACK
    return "packed" if worth and packing_possible(dtype) else "plain"


def _budget(network: Any, max_new_tokens: int) -> Callable[[int], int]:
    limit = context_length(network.config)

    def budget(prompt_length: int) -> int:
        room = max_new_tokens if limit is None else limit - prompt_length
        return min(max_new_tokens, room)

    return budget


def _groups(prompts: Sequence[Sequence[int]], share_answers: bool) -> list[Group]:
    """Distinct prompts, shortest first; a greedy answer is shared by all equal prompts."""
    items: dict[tuple[int, ...], list[int]] = {}
    for item, prompt in enumerate(prompts):
        items.setdefault(tuple(int(token) for token in prompt), []).append(item)
    groups = [
        Group(prompt, (tuple(same),) if share_answers else tuple((item,) for item in same))
        for prompt, same in items.items()
    ]
    return sorted(groups, key=lambda group: len(group.prompt))


def context_length(config: Any) -> int | None:
    """Tokens that a model of this config can look at, or None where it names no limit."""
    text_config = config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    return int(limit) if limit else None


def _check(
    model: HasNetwork,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    batch_size: int | None,
) -> None:
    problems = []
    if max_new_tokens < 0:
        problems.append(Problem("max_new_tokens", "a number of tokens >= 0", max_new_tokens))
    temperature = sampling.temperature
    if not (np.isfinite(temperature) and temperature >= 0.0):
        problems.append(Problem("temperature", "a finite number >= 0 (0 is greedy)", temperature))
    if not 0.0 < sampling.top_p <= 1.0:
        problems.append(Problem("top_p", "a share in (0, 1]", sampling.top_p))
    if sampling.top_k < 0:
        problems.append(Problem("top_k", "a number of tokens, or 0 for all", sampling.top_k))
    if not 0.0 <= sampling.min_p < 1.0:
        problems.append(Problem("min_p", "a share in [0, 1)", sampling.min_p))
    if batch_size is not None and batch_size < 1:
        problems.append(Problem("batch_size", "at least 1", batch_size))
    limit = context_length(model.network.config)
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            problems.append(Problem(f"prompt {index}", "at least one token"))
        elif limit is not None and len(prompt) >= limit:
            expected = f"fewer tokens than the model's context of {limit}"
            problems.append(Problem(f"prompt {index}", expected, len(prompt)))
    if problems:
        raise LehrError(problems)


def _check_rows(
    prompts: Sequence[Sequence[int]],
    row_seeds: Sequence[int] | None,
    stop_strings: Sequence[str],
    decode: Decode | None,
) -> None:
    problems = []
    if row_seeds is not None and len(row_seeds) != len(prompts):
        problems.append(Problem("row_seeds", f"one for each of {len(prompts)} prompts", row_seeds))
    if isinstance(stop_strings, str) or any(not one for one in stop_strings):
        problems.append(Problem("stop_strings", "a list of texts, none empty", stop_strings))
    if stop_strings and decode is None:
        problems.append(Problem("decode", "what turns ids into text, for stop_strings"))
    if problems:
        raise LehrError(problems)
