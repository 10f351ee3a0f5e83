"""Loader: which examples make the next update; resumable at any update, equal on all ranks.

Examples are assigned to updates first and packed within the update afterwards, so packing,
micro-batches and ranks can not change what an update is made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from lehr import ranks
from lehr.data.mixture import checked_shares, next_source
from lehr.data.packing import best_fit_decreasing, pack
from lehr.data.shapes import Encoded, Pack
from lehr.errors import Problem, RecipeError
from lehr.streams import content_hash, generator_for

Draw = tuple[str, int]  # (source, index within it)


class Loader:
    """Draws the examples of one update after the other.

    sizes       tokens of every example, by source
    shares      share of tokens by source; None: one joint list of all sources
    batch_size  examples an update
    seed        every pass over a source has its own order, of (seed, source, pass)

    *One source, or a joint list*: an epoch holds every example once; its last update is smaller
    where the batch size does not divide it. *Shares of two or more sources*: updates are always
    full, a source that is used up starts its next pass, and an epoch is as many updates as
    the primary source (largest share; the first of equals) needs to be seen once.

    Raises RecipeError for an impossible batch size, share or source.
    """

    def __init__(
        self,
        sizes: Mapping[str, Sequence[int]],
        shares: Mapping[str, float] | None,
        batch_size: int,
        seed: int,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise RecipeError(Problem("batch_size", "a whole number of at least 1", batch_size))
        if shares is None:
            _check_joint(sizes)
            drawn = list(sizes)
            self._shares: dict[str, float] = {}
        else:
            self._shares = checked_shares(shares, sizes)
            drawn = list(self._shares)
        self._sizes = {name: list(sizes[name]) for name in drawn}
        self._batch_size = batch_size
        self._seed = seed
        self._mixed = len(self._shares) > 1
        self._orders: dict[str, tuple[int, list[int]]] = {}
        self._joint: list[Draw] = [
            (name, i) for name, tokens in self._sizes.items() for i in range(len(tokens))
        ]
        # The state: an update count, and by source how many examples and tokens were drawn.
        self._updates = 0
        self._drawn = dict.fromkeys(drawn, 0)
        self._drawn_tokens = dict.fromkeys(drawn, 0)
        # The next example of every mixed source and its tokens; empty: to be looked up.
        self._upcoming: dict[str, int] = {}
        self._upcoming_tokens: dict[str, int] = {}
        self.updates_per_epoch = self._count_updates_per_epoch()

    def next(self) -> list[Draw]:
        """The examples of the next update, in the order of their draw."""
        if self._mixed:
            draws = [self._draw_mixed() for _ in range(self._batch_size)]
        else:
            draws = self._next_joint()
        self._updates += 1
        return draws

    @property
    def updates(self) -> int:
        """Updates given so far."""
        return self._updates

    @property
    def epoch(self) -> float:
        """Epochs given so far, with fractions."""
        return self._updates / self.updates_per_epoch

    @property
    def passes(self) -> dict[str, float]:
        """How often each source was gone through so far: above 1, its examples repeat."""
        return {name: n / len(self._sizes[name]) for name, n in self._drawn.items()}

    @property
    def drawn_tokens(self) -> dict[str, int]:
        """Tokens drawn from each source so far."""
        return dict(self._drawn_tokens)

    def state(self) -> dict[str, Any]:
        """What a resume needs; JSON."""
        return {
            "updates": self._updates,
            "drawn": dict(self._drawn),
            "drawn_tokens": dict(self._drawn_tokens),
            "fingerprint": self.fingerprint,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues behind the update at which `state` was taken.

        Raises RecipeError where the state belongs to other data, shares, batch size or seed.
        """
        if state.get("fingerprint") != self.fingerprint:
            raise RecipeError(
                Problem(
                    "loader state",
                    "the data, shares, batch size and seed that the checkpoint was made with",
                )
            )
        self._updates = int(state["updates"])
        self._drawn = {name: int(state["drawn"][name]) for name in self._drawn}
        self._drawn_tokens = {name: int(state["drawn_tokens"][name]) for name in self._drawn}
        self._upcoming = {}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides the draws."""
        return content_hash([self._sizes, list(self._shares.items()), self._batch_size, self._seed])

    def _next_joint(self) -> list[Draw]:
        epoch, update = divmod(self._updates, self.updates_per_epoch)
        start = update * self._batch_size
        order = self._order("+".join(self._sizes), epoch, len(self._joint))
        draws = [self._joint[place] for place in order[start : start + self._batch_size]]
        for name, index in draws:
            self._drawn[name] += 1
            self._drawn_tokens[name] += self._sizes[name][index]
        return draws

    def _draw_mixed(self) -> Draw:
        if not self._upcoming:
            self._upcoming = {name: self._next_of(name) for name in self._shares}
            self._upcoming_tokens = {n: self._sizes[n][i] for n, i in self._upcoming.items()}
        name = next_source(self._shares, self._drawn_tokens, self._upcoming_tokens)
        index = self._upcoming[name]
        self._drawn[name] += 1
        self._drawn_tokens[name] += self._upcoming_tokens[name]
        self._upcoming[name] = self._next_of(name)
        self._upcoming_tokens[name] = self._sizes[name][self._upcoming[name]]
        return name, index

    def _next_of(self, name: str) -> int:
        passes, place = divmod(self._drawn[name], len(self._sizes[name]))
        return self._order(name, passes, len(self._sizes[name]))[place]

    def _order(self, name: str, passes: int, length: int) -> list[int]:
        known = self._orders.get(name)
        if known is None or known[0] != passes:
            generator = generator_for(self._seed, "shuffle", name, passes)
            known = (passes, torch.randperm(length, generator=generator).tolist())
            self._orders[name] = known
        return known[1]

    def _count_updates_per_epoch(self) -> int:
        if not self._mixed:
            return math.ceil(len(self._joint) / self._batch_size)
        primary = max(self._shares, key=lambda name: self._shares[name])
        draws = 0
        while self._drawn[primary] < len(self._sizes[primary]):
            self._draw_mixed()
            draws += 1
        self._drawn = dict.fromkeys(self._drawn, 0)
        self._drawn_tokens = dict.fromkeys(self._drawn_tokens, 0)
        self._upcoming = {}
        return math.ceil(draws / self._batch_size)


class UpdateBatches:
    """The packs of one update after the other: a Loader's draws, packed within the update.

    encoded      examples by source
    shares       as for Loader
    pack_length  tokens of a pack
    packing      False: one pack an example
    rank, world  this process among all; None: as lehr.ranks says

    A dataset item is numbered over all sources, in the order of `encoded`. Each rank takes every
    world-th pack of the same update: none twice, together all (a rank may get none).
    """

    def __init__(
        self,
        encoded: Mapping[str, Sequence[Encoded]],
        shares: Mapping[str, float] | None,
        batch_size: int,
        seed: int,
        pack_length: int,
        packing: bool = True,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if pack_length < 1:
            raise RecipeError(Problem("pack_length", "at least 1", pack_length))
        sizes = {name: [one.tokens for one in part] for name, part in encoded.items()}
        self.loader = Loader(sizes, shares, batch_size, seed)
        self._encoded = dict(encoded)
        self._offsets: dict[str, int] = {}
        self.size = 0
        for name, part in encoded.items():
            self._offsets[name] = self.size
            self.size += len(part)
        self._pack_length = pack_length
        self._packing = packing
        self._rank = ranks.rank() if rank is None else rank
        self._world = ranks.world_size() if world is None else world
        self._tokens = sizes
        self._shares = shares
        self._batch_size = batch_size

    def next(self) -> list[Pack]:
        """This rank's packs of the next update."""
        items = [
            (self._offsets[name] + index, self._encoded[name][index])
            for name, index in self.loader.next()
        ]
        packs = pack(items, self._pack_length, self._packing)
        return packs[self._rank :: self._world]

    def next_sizes(self) -> list[tuple[int, int]]:
        """(tokens, predicted positions) of the packs that `next` would give; makes none."""
        draws = self.loader.next()
        tokens = [self._tokens[name][index] for name, index in draws]
        pairs = [self._supervised[name][index] for name, index in draws]
        bins = [[place] for place in range(len(draws))]
        if self._packing:
            bins = best_fit_decreasing(tokens, self._pack_length)
        sizes = [
            (sum(tokens[place] for place in places), sum(pairs[place] for place in places))
            for places in bins
        ]
        return sizes[self._rank :: self._world]

    @cached_property
    def _supervised(self) -> dict[str, list[int]]:
        return {
            name: [one.supervised_tokens for one in part] for name, part in self._encoded.items()
        }

    def items(self) -> list[tuple[int, Encoded]]:
        """All (dataset item, example) of all sources, in order: what reference caches walk."""
        return [
            (self._offsets[name] + index, one)
            for name, part in self._encoded.items()
            for index, one in enumerate(part)
        ]

    def source_of(self, item: int) -> str:
        """Name of the source that a dataset item belongs to. Raises IndexError outside of them."""
        if 0 <= item < self.size:
            for name, part in self._encoded.items():
                if item < self._offsets[name] + len(part):
                    return name
        raise IndexError(f"dataset item {item} of {self.size}")

    @property
    def updates_per_epoch(self) -> int:
        return self.loader.updates_per_epoch

    @property
    def epoch(self) -> float:
        """Epochs given so far, with fractions."""
        return self.loader.epoch

    @property
    def tokens_per_update(self) -> float:
        """Expected tokens of a full update, by the mean length of each source's examples."""
        means = {n: sum(t) / len(t) for n, t in self._tokens.items() if t}
        if self._shares is None:
            count = sum(len(tokens) for tokens in self._tokens.values())
            total = sum(sum(tokens) for tokens in self._tokens.values())
            return min(self._batch_size, count) * total / count
        # Shares are of tokens: an example of the mix has the harmonic mean of the means.
        examples_per_token = sum(s / means[name] for name, s in self._shares.items() if s > 0)
        return self._batch_size / examples_per_token

    def state(self) -> dict[str, Any]:
        return self.loader.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.loader.load(state)


def _check_joint(sizes: Mapping[str, Sequence[int]]) -> None:
    """Everything once: a source without examples is a mistake, not a smaller epoch."""
    problems = [
        Problem(f"source {name}", "at least one example", 0)
        for name, tokens in sizes.items()
        if not tokens
    ]
    if not sizes:
        problems.append(Problem("data", "at least one source"))
    if problems:
        raise RecipeError(problems)
