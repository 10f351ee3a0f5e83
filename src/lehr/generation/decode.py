"""The decode loop: prompts in, new tokens and their log-probabilities out.

Distinct prompts are prefilled once, prompts of like length share a batch (left padded,
masked, with explicit positions), and a finished sequence leaves the batch. Greedy results
do not depend on batch size or order; samples draw random numbers keyed by item and position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lehr.errors import Diverged, LehrError, Problem
from lehr.generation.cache import growing_cache, select_rows
from lehr.generation.sampling import item_keys, sample_rows, uniforms
from lehr.models.attention import attention

DEFAULT_BATCH_SIZE = 32


class HasNetwork(Protocol):
    """What the decode loop needs of a model: `network`, a transformers causal model."""

    @property
    def network(self) -> Any: ...


@dataclass(frozen=True)
class Generated:
    """What a model wrote after one prompt.

    ids                the new tokens; where `stopped`, the last one is the stop id
    stopped            a stop id was written (else the token budget or the context ended)
    log_probabilities  natural log-probability of each of `ids` under the model itself, at
                       temperature 1 and without a nucleus, whatever was used for sampling
    """

    ids: list[int]
    stopped: bool
    log_probabilities: list[float] = field(default_factory=list)

    @property
    def answer_ids(self) -> list[int]:
        """The new tokens without the stop id."""
        return self.ids[:-1] if self.stopped else list(self.ids)


def generate(
    model: HasNetwork,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Set[int],
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int | None = None,
) -> list[Generated]:
    """Continue each prompt until a stop id or `max_new_tokens`.

    prompts      token ids as `Encoder.prompt_ids` makes them; results come in this order
    temperature  0 is greedy; else samples from softmax(logits / temperature)
    batch_size   sequences decoded together (default 32); changes speed and memory only
    Raises LehrError for an empty prompt, one that fills the context, or bad settings;
    Diverged where the model's logits are not finite.
    """
    _check(model, prompts, max_new_tokens, temperature, top_p, batch_size)
    if not prompts or max_new_tokens == 0:
        return [Generated([], False) for _ in prompts]
    groups = _groups(prompts, share_answers=temperature == 0.0)
    results: list[Generated | None] = [None] * len(prompts)
    decoder = _Decoder(model.network, max_new_tokens, frozenset(stop_ids), temperature, top_p, seed)
    with torch.no_grad(), decoding_network(model.network):
        for batch in _batches(groups, batch_size or DEFAULT_BATCH_SIZE):
            for items, generated in decoder.run(batch):
                for item in items:
                    results[item] = generated
    return [result for result in results if result is not None]


@contextmanager
def decoding_network(network: Any) -> Iterator[None]:
    """`network` in evaluation mode under an attention that knows padding and a cache.

    Training packs run under lehr's attention over segments, which refuses both. Soft-capped
    attention runs under transformers' eager code: its sdpa function refuses the cap.
    """
    capped = getattr(network.config, "attn_logit_softcapping", None) is not None
    training = [module for module in network.modules() if module.training]
    if training:
        network.eval()
    try:
        with attention(network, "eager" if capped else None):
            yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class _Group:
    """One distinct prompt and the answers wanted for it: each answer serves some items."""

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


def _groups(prompts: Sequence[Sequence[int]], share_answers: bool) -> list[_Group]:
    """Distinct prompts, shortest first; a greedy answer is shared by all equal prompts."""
    items: dict[tuple[int, ...], list[int]] = {}
    for item, prompt in enumerate(prompts):
        items.setdefault(tuple(int(token) for token in prompt), []).append(item)
    groups = [
        _Group(prompt, (tuple(same),) if share_answers else tuple((item,) for item in same))
        for prompt, same in items.items()
    ]
    return sorted(groups, key=lambda group: len(group.prompt))


def _batches(groups: Sequence[_Group], batch_size: int) -> Iterator[list[_Group]]:
    """Batches of at most `batch_size` sequences; only an over-large group is divided."""
    batch: list[_Group] = []
    room = batch_size
    for group in groups:
        parts = [
            _Group(group.prompt, group.answers[start : start + batch_size])
            for start in range(0, len(group.answers), batch_size)
        ]
        for part in parts:
            if len(part.answers) > room:
                yield batch
                batch, room = [], batch_size
            batch.append(part)
            room -= len(part.answers)
    if batch:
        yield batch


@dataclass
class _Decoder:
    network: Any
    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    top_p: float
    seed: int

    def run(self, batch: Sequence[_Group]) -> list[tuple[tuple[int, ...], Generated]]:
        """Decode one batch of groups to its end."""
        answers = [answer for group in batch for answer in group.answers]
        lengths = [len(group.prompt) for group in batch for _ in group.answers]
        budgets = [self._budget(length) for length in lengths]
        longest = max(lengths)
        device = self.network.device
        cache = growing_cache(self.network.config, longest + max(budgets))
        logits, mask = self._prefill(batch, cache, longest + max(budgets))
        owner = [row for row, group in enumerate(batch) for _ in group.answers]
        if len(owner) != len(batch):
            select_rows(cache, owner, device)
            logits = logits[owner]
            mask = None if mask is None else mask[owner]

        keys = None
        if self.temperature > 0.0:
            keys = item_keys(self.seed, [answer[0] for answer in answers])
        new_ids: list[list[int]] = [[] for _ in answers]
        log_probabilities: list[list[float]] = [[] for _ in answers]
        stopped = [False] * len(answers)
        alive = list(range(len(answers)))
        position = torch.tensor(lengths, device=device)
        for step in range(max(budgets)):
            chosen, chosen_log_probability = self._choose(logits, keys, alive, step)
            remaining = []
            for row, (token, value) in enumerate(
                zip(chosen.tolist(), chosen_log_probability.tolist(), strict=True)
            ):
                index = alive[row]
                new_ids[index].append(token)
                log_probabilities[index].append(value)
                stopped[index] = token in self.stop_ids
                if not stopped[index] and len(new_ids[index]) < budgets[index]:
                    remaining.append(row)
            if not remaining:
                break
            if len(remaining) < len(alive):
                select_rows(cache, remaining, device)
                chosen, position = chosen[remaining], position[remaining]
                mask = None if mask is None else mask[remaining]
                alive = [alive[row] for row in remaining]
            seen = None if mask is None else mask[:, : longest + step + 1]
            logits = self._logits(chosen[:, None], seen, position[:, None], cache)
            position = position + 1
        self._refuse_nonfinite(answers, log_probabilities)
        return [
            (items, Generated(ids, stop, values))
            for items, ids, stop, values in zip(
                answers, new_ids, stopped, log_probabilities, strict=True
            )
        ]

    def _prefill(
        self, batch: Sequence[_Group], cache: Any, capacity: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run the prompts once -> logits [B, V] of their last tokens, mask [B, capacity]."""
        device = self.network.device
        longest = max(len(group.prompt) for group in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.ones(len(batch), capacity, dtype=torch.long)
        positions = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, group in enumerate(batch):
            padding = longest - len(group.prompt)
            ids[row, padding:] = torch.tensor(group.prompt)
            mask[row, :padding] = 0
            positions[row, padding:] = torch.arange(len(group.prompt))
        # Without padding there is nothing to mask, and attention takes its fast path.
        padded = bool((mask == 0).any())
        kept_mask = mask.to(device) if padded else None
        seen = None if kept_mask is None else kept_mask[:, :longest]
        logits = self._logits(ids.to(device), seen, positions.to(device), cache)
        return logits, kept_mask

    def _logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        """One forward pass -> fp32 logits [B, V] of the last position."""
        output = self.network(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _choose(
        self, logits: Tensor, keys: Any, alive: Sequence[int], step: int
    ) -> tuple[Tensor, Tensor]:
        """Next token [B] of each row, and its log-probability under the model [B]."""
        if keys is None:
            chosen = logits.argmax(dim=-1)
        else:
            numbers = uniforms(keys[list(alive)], step)
            chosen = sample_rows(logits, self.temperature, self.top_p, torch.from_numpy(numbers))
        picked = logits.gather(-1, chosen[:, None]).squeeze(-1)
        return chosen, picked - torch.logsumexp(logits, dim=-1)

    def _budget(self, prompt_length: int) -> int:
        limit = context_length(self.network.config)
        room = self.max_new_tokens if limit is None else limit - prompt_length
        return min(self.max_new_tokens, room)

    def _refuse_nonfinite(
        self, answers: Sequence[tuple[int, ...]], log_probabilities: Sequence[Sequence[float]]
    ) -> None:
        for items, values in zip(answers, log_probabilities, strict=True):
            if not np.isfinite(values).all():
                raise Diverged(
                    Problem(f"generation, prompt {items[0]}", "finite logits from the model")
                )


def context_length(config: Any) -> int | None:
    """Tokens that a model of this config can look at, or None where it names no limit."""
    text_config = config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    return int(limit) if limit else None


def _check(
    model: HasNetwork,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    batch_size: int | None,
) -> None:
    problems = []
    if max_new_tokens < 0:
        problems.append(Problem("max_new_tokens", "a number of tokens >= 0", max_new_tokens))
    if not (np.isfinite(temperature) and temperature >= 0.0):
        problems.append(Problem("temperature", "a finite number >= 0 (0 is greedy)", temperature))
    if not 0.0 < top_p <= 1.0:
        problems.append(Problem("top_p", "a share in (0, 1]", top_p))
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
