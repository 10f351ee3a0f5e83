"""What one attempt at an update is made of, and what its backward passes gave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lehr.data.shapes import Pack
from lehr.training.guard import Alarm


@dataclass(frozen=True)
class Taken:
    """One attempt's micro-batches of this rank, what they weigh, and their size on all ranks."""

    number: int
    micro_batches: list[Pack]
    weights: list[float]
    denominator: float
    tokens: int
    supervised_tokens: int

    @property
    def origins(self) -> tuple[str, ...]:
        """file:line of every row of this rank's packs."""
        return tuple(str(origin) for pack in self.micro_batches for origin in pack.origins)


@dataclass(frozen=True)
class Verdict:
    """What the backward passes gave.

    bad       names what is not finite, `suspects` the micro-batches where
    alarm     of the guard, where everything is finite
    overflow  gradients that only the loss scale made infinite
    norms     of each tensor's gradient
    """

    loss: float
    norm: float
    bad: tuple[str, ...]
    suspects: tuple[int, ...]
    metrics: Mapping[str, float]
    overflow: tuple[str, ...] = ()
    alarm: Alarm | None = None
    norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def fine(self) -> bool:
        return not self.bad and self.alarm is None

    def origins(self, taken: Taken) -> tuple[str, ...]:
        """file:line of every row that is concerned."""
        packs = [taken.micro_batches[i] for i in self.suspects] or taken.micro_batches
        return tuple(str(origin) for pack in packs for origin in pack.origins)


QUARANTINED = Verdict(math.nan, math.nan, ("in quarantine",), (), {})
