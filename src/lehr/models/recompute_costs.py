"""What each choice of recomputation keeps and repeats, measured; what a budget buys.

A choice is measured on a forward pass of the model as it will train: bytes by counting the
storages that live until the backward pass (`replay.measuring`), operations by computing every
block again and counting the products that are repeated. A budget is spent where a byte saves
most operations; only then are whole blocks left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lehr.data.shapes import Pack
from lehr.models.recompute import ATTENTION, Keeps, Kind, Recomputation
from lehr.models.replay import Meter, address, measuring

BUDGET_TOLERANCE = 0.05


@dataclass(frozen=True)
class Cost:
    """Of one choice, on `tokens` tokens.

    kept_bytes     live between the forward and the backward pass, without fixed_bytes
    fixed_bytes    the same for any number of tokens (random states)
    working_bytes  of the largest block, while its backward pass has it computed again
    operations     floating-point operations of products that are repeated
    attention_operations  of attention cores, over segments of `segment_tokens` tokens
    """

    tokens: int
    kept_bytes: int
    fixed_bytes: int
    working_bytes: int
    operations: float
    attention_operations: float
    segment_tokens: int = 0  # 0: one segment of all tokens

    def bytes_of(self, tokens: int) -> int:
        """Peak of the activations of a micro-batch of `tokens` tokens."""
        growing = (self.kept_bytes + self.working_bytes) * tokens / self.tokens
        return int(growing) + self.fixed_bytes

    def operations_per_token(self, segment_tokens: int) -> float:
        """Of a token in a segment of that many: an attention core's grow with it."""
        longer = segment_tokens / (self.segment_tokens or self.tokens)
        return (self.operations + self.attention_operations * longer) / self.tokens


@dataclass(frozen=True)
class BlockCosts:
    """Of one block: bytes where it is left alone, where it keeps nothing, and what each unit adds.

    units  name: (bytes that keeping its output takes, operations that this saves)
    """

    none_bytes: int
    full_bytes: int
    units: Mapping[str, tuple[int, float]] = field(default_factory=dict)


class BudgetTooSmall(ValueError):
    """Even with every block computed again more is kept than the budget allows."""

    def __init__(self, smallest: float) -> None:
        super().__init__(f"a budget of at least {smallest:.2f}")
        self.smallest = smallest


class Costs:
    """Measures choices for a model that is ready to train; `stop()` ends it.

    pack            a few dozen tokens say what thousands cost; what attention keeps of a token
                    depends on its segment, so segments are as long as they will be, where they
                    can be
    segment_tokens  how long segments will be (default: as the pack's longest)
    Raises ValueError where the model has no blocks that can be computed again.
    """

    def __init__(self, model: Any, pack: Pack, segment_tokens: int | None = None) -> None:
        self._model, self._pack = model, pack
        self._segment_tokens = int(pack.segments.length.max())
        self._longer = (segment_tokens or self._segment_tokens) / self._segment_tokens
        self._own = [*model.network.parameters(), *model.network.buffers()]
        self.recomputation = Recomputation(model.network, "selective")
        self._forward()  # finds the product that ends each block
        self._found: dict[str, tuple[Cost, Meter]] = {}

    def stop(self) -> None:
        self.recomputation.stop()

    def of(self, choice: Kind | Keeps) -> Cost:
        """Measure a choice."""
        return self._measured(choice)[0]

    def keeps_within(self, share: float) -> tuple[Keeps, Cost]:
        """What to keep within `share` of the bytes of `none`, and what that costs.

        Raises BudgetTooSmall.
        """
        none, _ = self._measured("none")
        full, full_meter = self._measured("full")
        allowed = int(share * none.kept_bytes)
        if full.kept_bytes > allowed:
            raise BudgetTooSmall(full.kept_bytes / none.kept_bytes)
        everything = [[*products, ATTENTION] for products in self.recomputation.products]
        _, meter = self._measured(everything)
        units: list[dict[str, tuple[int, float]]] = [{} for _ in everything]
        for block, name, size, operations in meter.units:
            if name != self.recomputation.blocks[block].last:  # that one is never repeated
                operations *= self._longer if name == ATTENTION else 1.0
                before = units[block].get(name, (0, 0.0))
                units[block][name] = (before[0] + size, before[1] + operations)
        alone = self._measured("none")[1].blocks
        blocks = [
            BlockCosts(none_bytes, full_bytes, names)
            for none_bytes, full_bytes, names in zip(alone, full_meter.blocks, units, strict=True)
        ]
        keeps = spend(blocks, allowed - full.kept_bytes)
        cost = self.of(keeps)
        if cost.kept_bytes > allowed * (1 + BUDGET_TOLERANCE):
            raise AssertionError(f"{cost.kept_bytes} bytes are kept where {allowed} are allowed")
        return keeps, cost

    def _measured(self, choice: Kind | Keeps) -> tuple[Cost, Meter]:
        key = repr(choice)
        if key not in self._found:
            self.recomputation.choose(choice)
            with measuring(self._own) as meter:
                hidden = self._forward()
                kept, fixed = meter.kept_bytes, meter.fixed_bytes
                working = [_new_bytes(meter, replay.again()) for replay in meter.replays]
            del hidden
            attention = meter.operations.pop(ATTENTION, 0.0)
            products = sum(meter.operations.values())
            largest = max(working, default=0)
            cost = Cost(
                self._pack.tokens, kept, fixed, largest, products, attention, self._segment_tokens
            )
            meter.replays.clear()
            self._found[key] = cost, meter
        return self._found[key]

    def _forward(self) -> torch.Tensor:
        with torch.enable_grad():
            hidden: torch.Tensor = self._model.hidden(self._pack)
        return hidden


def _new_bytes(meter: Meter, values: Mapping[Any, torch.Tensor]) -> int:
    storages = {}
    for tensor in values.values():
        at = address(tensor)
        if at not in meter.storages and at not in meter.own:
            storages[at] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def spend(blocks: Sequence[BlockCosts], allowed: int) -> Keeps:
    """What each block keeps for at most `allowed` bytes more than with nothing kept.

    Units go by the operations that a byte saves; a block of which every unit is kept may
    be left alone (None), which saves the work between its products.

    >>> one = BlockCosts(100, 10, {"up": (20, 400.0), "core": (20, 100.0)})
    >>> spend([one, one], 40)
    [('up',), ('up',)]
    >>> spend([one, one], 130)
    [None, ('core', 'up')]
    """
    kept: list[set[str]] = [set() for _ in blocks]
    left = allowed
    order = sorted(
        (-operations / max(size, 1), number, name, size)
        for number, block in enumerate(blocks)
        for name, (size, operations) in block.units.items()
    )
    for _, number, name, size in order:
        if size <= left:
            kept[number].add(name)
            left -= size
    keeps: list[Collection[str] | None] = [tuple(sorted(names)) for names in kept]
    for number, block in enumerate(blocks):
        more = block.none_bytes - block.full_bytes - sum(size for size, _ in block.units.values())
        if len(kept[number]) == len(block.units) and more <= left:
            keeps[number] = None
            left -= max(more, 0)
    return keeps
