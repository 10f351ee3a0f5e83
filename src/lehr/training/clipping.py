"""Clipping that follows the run: per tensor, or by how unusual the whole norm is.

`tensor` (AdaGC, arXiv 2502.11034, algorithm 1), for each tensor i with γ_i the average of its
clipped norms:      g_i ← g_i min(1, limit γ_i / ‖g_i‖),   γ_i ← β γ_i + (1 − β) ‖g_i‖
`z_score` (ZClip, arXiv 2504.02507, equations 2 to 6), with mean μ and spread σ of past norms:
    z = (‖g‖ − μ) / σ > limit:   ‖g‖ ← μ + (limit² / z) σ
In the first `warmup` updates nothing is clipped here: γ_i is the smallest norm seen, μ and σ are
those of the norms so far. Both come after the global `clip` and see what it left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import Parameter

from lehr.errors import Problem
from lehr.training.schedules import is_number

KINDS = ("tensor", "z_score")
USUAL = {"tensor": (1.05, 0.98, 100), "z_score": (2.5, 0.97, 25)}  # limit, decay, warmup: papers


@dataclass(frozen=True)
class AdaptiveClipSettings:
    """None stands for the paper's value of the kind.

    limit   tensor: factor on the average; z_score: spreads above the mean
    decay   of the averages
    warmup  applied updates that are only watched
    """

    kind: str
    limit: float | None = None
    decay: float | None = None
    warmup: int | None = None

    def problems(self) -> list[Problem]:
        """Everything that is wrong with these values."""
        if self.kind not in KINDS:
            return [Problem("adaptive_clip.kind", " or ".join(KINDS), self.kind)]
        found = []
        limit, decay, warmup = self.values
        if not is_number(limit) or limit < 1:
            found.append(Problem("adaptive_clip.limit", "a number, at least 1", limit))
        if not is_number(decay) or not 0 <= decay < 1:
            found.append(Problem("adaptive_clip.decay", "at least 0 and below 1", decay))
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 2:
            expected = "a whole number of updates, at least 2"
            found.append(Problem("adaptive_clip.warmup", expected, warmup))
        return found

    @property
    def values(self) -> tuple[float, float, int]:
        """limit, decay, warmup."""
        limit, decay, warmup = USUAL[self.kind]
        return (
            limit if self.limit is None else self.limit,
            decay if self.decay is None else self.decay,
            warmup if self.warmup is None else self.warmup,
        )


class AdaptiveClip:
    """The averages of one run; its state belongs into a checkpoint."""

    def __init__(self, settings: AdaptiveClipSettings) -> None:
        self.settings = settings
        self._count = 0
        self._averages: dict[str, float] = {}
        self._mean, self._variance = 0.0, 0.0

    def factors(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Factor for each tensor's gradient, from its finite norm; the averages move on."""
        if self.settings.kind == "tensor":
            found = {name: self._of_tensor(name, norm) for name, norm in norms.items()}
        else:
            found = dict.fromkeys(norms, self._of_all(math.hypot(*norms.values())))
        self._count += 1
        return found

    def apply(self, trained: Mapping[str, Parameter], norms: Mapping[str, float]) -> dict[str, Any]:
        """Clip the gradients; a column of metrics.jsonl with the share of tensors that were."""
        factors = self.factors(norms)
        for name, factor in factors.items():
            gradient = trained[name].grad
            if factor < 1 and gradient is not None:
                gradient.mul_(factor)
        clipped = sum(factor < 1 for factor in factors.values())
        return {"clipped": clipped / max(1, len(factors))}

    def _of_tensor(self, name: str, norm: float) -> float:
        limit, decay, warmup = self.settings.values
        average = self._averages.get(name, norm)
        if self._count < warmup:
            # A gradient of 0 (an adapter's first one) is no size to hold later ones to.
            self._averages[name] = min(average, norm) if average and norm else max(average, norm)
            return 1.0
        factor = min(1.0, limit * average / norm) if norm and average else 1.0
        self._averages[name] = decay * average + (1 - decay) * factor * norm
        return factor

    def _of_all(self, norm: float) -> float:
        limit, decay, warmup = self.settings.values
        if self._count < warmup:  # mean and variance of all norms so far (Welford)
            before = norm - self._mean
            self._mean += before / (self._count + 1)
            added = before * (norm - self._mean)
            self._variance = (self._variance * self._count + added) / (self._count + 1)
            return 1.0
        spread = math.sqrt(self._variance)
        z = (norm - self._mean) / spread if spread else 0.0
        kept = self._mean + limit**2 / z * spread if z > limit else norm
        self._mean = decay * self._mean + (1 - decay) * kept
        self._variance = decay * self._variance + (1 - decay) * (kept - self._mean) ** 2
        return kept / norm if kept < norm else 1.0

    def state(self) -> dict[str, Any]:
        """Everything that a resume needs, as JSON."""
        return {
            "count": self._count,
            "averages": self._averages,
            "mean": self._mean,
            "variance": self._variance,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where `state()` was; nothing: to the start."""
        self._count = int(state.get("count", 0))
        self._averages = dict(state.get("averages", {}))
        self._mean = float(state.get("mean", 0.0))
        self._variance = float(state.get("variance", 0.0))
