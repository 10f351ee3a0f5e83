"""Policy updates on groups of samples: GRPO's advantages, PPO's clipped ratio, a KL estimate.

A group is one prompt with n samples, each with a reward R (Shao et al. 2024, arXiv:2402.03300,
section 4.1):

    A_i = (R_i - mean R) / (std R + ε)        the same for every token of sample i
    ρ_t = exp(log π(t) - log π_old(t))
    l_t = -min(ρ_t A_i, clip(ρ_t, 1 - low, 1 + high) A_i) + β k3_t

Everything here is a sum; the engine divides by the weight of the whole update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lehr.data.shapes import Pack
from lehr.device import moved
from lehr.errors import Problem, RecipeError
from lehr.objectives.base import Loss, Number

# What one token's loss is divided by, beside the weight of the update.
#   token     nothing: Σ over all tokens ÷ all tokens (DAPO, arXiv 2503.14476, eq. 8)
#   group     tokens of its group: every prompt counts the same, whatever its samples' lengths
#   sequence  tokens of its sample (GRPO's own): a long bad sample is punished less a token than
#             a short one, so answers grow long where they are wrong
#   constant  the longest that a sample may be (Dr. GRPO, arXiv 2503.20783): no length bias either
Normalisation = Literal["token", "group", "sequence", "constant"]
NORMALISATIONS: tuple[Normalisation, ...] = ("token", "group", "sequence", "constant")
Scale = Literal["std", "none"]

STD_EPSILON = 1e-4
FLAT = 1e-6  # a spread of rewards below this share of the largest is rounding, not a signal


@dataclass(frozen=True)
class Advantages:
    """What a batch of groups says: advantages [G, n]; which groups are flat, bool [G].

    A flat group (all rewards equal) prefers nothing: its advantages are exactly 0.
    """

    values: Tensor
    flat: Tensor


def group_advantages(rewards: Tensor, scale: Scale = "std") -> Advantages:
    """Advantages of `rewards` [G, n] within each group of n samples.

    scale  std: divided by the group's standard deviation (over n - 1) + 1e-4; none: mean
           subtracted only (Dr. GRPO), so that groups weigh as their rewards are spread
    Raises ValueError for fewer than two samples, or a reward that is not finite.

    >>> group_advantages(torch.tensor([[1.0, 0.0], [3.0, 3.0]]), "none").values.tolist()
    [[0.5, -0.5], [0.0, 0.0]]
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards are [groups, at least 2 samples], not {tuple(rewards.shape)}")
    if not bool(torch.isfinite(rewards).all()):
        group, sample = (~torch.isfinite(rewards)).nonzero()[0].tolist()
        raise ValueError(f"the reward of sample {sample} of group {group} is not finite")
    wide = rewards.double()
    spread = wide.amax(1) - wide.amin(1)
    flat = spread <= FLAT * wide.abs().amax(1)
    centred = wide - wide.mean(1, keepdim=True)
    if scale == "std":
        centred = centred / (wide.std(1, keepdim=True) + STD_EPSILON)
    # Rounding of the mean would be divided by ε: 1e-17 / 1e-4 is small, 1e-7 / 1e-4 is not.
    return Advantages(centred.masked_fill(flat[:, None], 0.0).float(), flat)


def clipped_loss(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """-min(ρ A, clip(ρ, 1 - low, 1 + high) A) (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Nothing holds back a step that undoes harm: with A > 0 only ρ > 1 + high is cut off, with
    A < 0 only ρ < 1 - low.
    """
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage)


def k3(log_probability: Tensor, reference: Tensor) -> Tensor:
    """Unbiased and never negative estimate of KL(π || π_ref) from samples of π, in nats.

    r = π_ref / π;  k3 = r - 1 - log r        (Schulman 2020, "Approximating KL divergence")
    """
    log_ratio = reference - log_probability
    return torch.expm1(log_ratio) - log_ratio


def pair_weights(pack: Pack, normalisation: Normalisation, longest: int | None = None) -> Tensor:
    """float32 [R]: what each pair's loss is multiplied by (see `Normalisation`).

    longest  tokens that a sample may have at most: needed for constant
    The weights of an update add up to what it is divided by, but for constant: there it is the
    number of samples (`Policy.weight`).
    """
    if normalisation == "token":
        return torch.ones(len(pack.targets))
    if normalisation == "constant":
        if longest is None or longest < 1:
            expected = "the most tokens that a sample may have, for normalisation constant"
            raise RecipeError(Problem("longest", expected, longest))
        return torch.full((len(pack.targets),), 1.0 / longest)
    owner = pack.sequence
    if normalisation == "group":
        owner = pack.sequence_example[pack.sequence]
    return 1.0 / torch.bincount(owner)[owner].float()


def weighted(pack: Pack, normalisation: Normalisation, longest: int | None = None) -> Pack:
    """The pack with the weights of its pairs. A group must stand in one pack for `group`."""
    return replace(pack, weights=pair_weights(pack, normalisation, longest))


@dataclass(frozen=True)
class Samples:
    """What an update knows of one item's samples, in the order of its branches.

    advantages  one a sample
    old         log-probabilities of each sample's tokens under the policy that wrote it, or None:
                this is the first update after sampling, old = the policy itself
    reference   the same under the frozen reference; needed where β > 0
    """

    advantages: Sequence[float]
    old: Sequence[Tensor] | None = None
    reference: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Policy:
    """One update's loss over packs of groups; `samples` by dataset item.

    clip_low, clip_high  how far the ratio may move before it teaches nothing more
    beta                 of the KL term, 0 = none
    normalisation        how the packs were weighted (`weighted`)

    Where a sample has no `old`, its ratio is exactly 1 with the gradient of log π: no pass more
    than the update's own, and no gap between what decoding and training compute.
    """

    samples: Mapping[int, Samples]
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    normalisation: Normalisation = "token"

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.clip_low < 1:
            problems.append(Problem("clip_low", "above 0 and below 1", self.clip_low))
        if not (math.isfinite(self.clip_high) and self.clip_high > 0):
            problems.append(Problem("clip_high", "a finite number above 0", self.clip_high))
        if not (math.isfinite(self.beta) and self.beta >= 0):
            problems.append(Problem("beta", "a finite number, at least 0", self.beta))
        if self.normalisation not in NORMALISATIONS:
            expected = "one of " + ", ".join(NORMALISATIONS)
            problems.append(Problem("normalisation", expected, self.normalisation))
        if problems:
            raise RecipeError(problems)

    def weight(self, pack: Pack) -> float:
        """Σ w_r: tokens, groups or samples, flat groups too: else the others would weigh more."""
        if self.normalisation == "constant":
            return float(pack.sequences)
        return float(pack.weights.sum(dtype=torch.float64))

    def loss(self, model: Any, pack: Pack) -> Loss:
        stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
        now = stats.log_probability
        advantage = self._by_pair(pack, "advantages", now)
        assert advantage is not None
        old = self._by_pair(pack, "old", now)
        log_ratio = now - (now.detach() if old is None else old)
        ratio = log_ratio.exp()
        weights = moved(pack.weights, now.device)
        losses = clipped_loss(ratio, advantage, self.clip_low, self.clip_high)
        total = (weights * losses).sum()
        pairs = float(len(pack.targets))
        with torch.no_grad():
            held = ((advantage > 0) & (ratio > 1.0 + self.clip_high)) | (
                (advantage < 0) & (ratio < 1.0 - self.clip_low)
            )
            metrics: dict[str, tuple[Number, Number]] = {
                "loss": (total.detach(), self.weight(pack)),
                "ratio": (ratio.sum(), pairs),
                "clipped": (held.sum(), pairs),
                "kl_old": (k3(now, now - log_ratio).sum(), pairs),
                "surprise": (-now.sum(), pairs),  # of the sampled tokens: estimates the entropy
                "sample_tokens": (pairs, float(pack.sequences)),
            }
        if self.beta:
            reference = self._by_pair(pack, "reference", now)
            if reference is None:
                expected = f"the reference's log-probabilities: beta is {self.beta:g}"
                raise RecipeError(Problem(str(pack.origins[0]), expected))
            estimate = k3(now, reference)
            total = total + self.beta * (weights * estimate).sum()
            metrics["kl_reference"] = (estimate.detach().sum(), pairs)
            metrics["loss"] = (total.detach(), self.weight(pack))
        return Loss(total=total, metrics=metrics)

    def _by_pair(self, pack: Pack, name: str, like: Tensor) -> Tensor | None:
        """One number a pair [R] from the samples' `advantages`, `old` or `reference`."""
        lengths = torch.bincount(pack.sequence, minlength=pack.sequences).tolist()
        branches = torch.bincount(pack.sequence_example, minlength=len(pack.items)).tolist()
        values: list[Tensor] = []
        known = sequence = 0
        for place, (item, count) in enumerate(zip(pack.items, branches, strict=True)):
            where, own = str(pack.origins[place]), lengths[sequence : sequence + count]
            sequence += count
            if item not in self.samples:
                raise RecipeError(Problem(where, f"advantages for the samples of item {item}"))
            found = getattr(self.samples[item], name)
            known += found is not None
            if found is None:
                continue
            if len(found) != count:
                expected = f"{name} for each of {count} samples"
                raise RecipeError(Problem(where, expected, len(found)))
            for number, length in zip(found, own, strict=True):
                if name == "advantages":
                    values.append(torch.full((length,), float(number)))
                elif len(number) != length:
                    expected = f"{name} log-probabilities of a sample's {length} tokens"
                    raise RecipeError(Problem(where, expected, len(number)))
                else:
                    values.append(torch.as_tensor(number))
        if not known:
            return None
        if known != len(pack.items):
            expected = f"{name} log-probabilities for all items of an update, or for none"
            raise RecipeError(Problem(str(pack.origins[0]), expected, f"{known} items"))
        return moved(torch.cat(values).to(like.dtype), like.device)
