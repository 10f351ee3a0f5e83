"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lehr.data.shapes import Pack
from lehr.device import moved
from lehr.errors import Problem, RecipeError
from lehr.objectives.base import Loss, Number

LOSS_AT_REFERENCE = math.log(2.0)
TIE_NATS = 1e-4  # closer than log-probabilities are reproducible: neither answer is preferred


def dpo_loss(
    chosen_logratio: Tensor,
    rejected_logratio: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of each pair [E] from log(policy / reference) of both answers [E].

        margin = β (chosen − rejected)
        loss   = −(1 − ε) log σ(margin) − ε log σ(−margin)

    ε is the share of labels believed to be flipped (conservative DPO).

    >>> loss = dpo_loss(torch.tensor([-2.0]), torch.tensor([-6.0]), beta=0.1)
    >>> round(loss.item(), 6)
    0.513015
    """
    margin = beta * (chosen_logratio - rejected_logratio)
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


@dataclass(frozen=True)
class Dpo:
    """DPO over packs whose examples have two sequences: chosen, then rejected.

    reference  dataset item -> log-probability of (chosen, rejected) under the frozen
               state the stage began from, each a sum over the answer's tokens, in nats

    A pair whose two answers are the same tokens teaches nothing: its loss is ln 2, its
    gradient is exactly 0, and it is counted as a tie, never as correct.
    """

    reference: Mapping[int, tuple[float, float]]
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.beta) and self.beta > 0):
            problems.append(Problem("beta", "a finite number above 0", self.beta))
        if not 0 <= self.label_smoothing < 0.5:
            expected = "a share of flipped labels, at least 0 and below 0.5"
            problems.append(Problem("label_smoothing", expected, self.label_smoothing))
        if problems:
            raise RecipeError(problems)

    def weight(self, pack: Pack) -> float:
        """Number of pairs."""
        return float(len(pack.items))

    def loss(self, model: Any, pack: Pack) -> Loss:
        chosen_rows, rejected_rows = pair_sequences(pack)
        stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
        log_probability = stats.log_probability
        device = log_probability.device
        sums = pack.sequence_sum(log_probability * moved(pack.weights, device))
        reference = moved(self._reference_of(pack).to(sums.dtype), device)
        chosen = sums[moved(chosen_rows, device)] - reference[:, 0]
        rejected = sums[moved(rejected_rows, device)] - reference[:, 1]
        identical = moved(identical_answers(pack, chosen_rows, rejected_rows), device)
        # The two copies of one answer may differ in rounding: cut the graph, so that
        # the gradient is 0 and not a rounding error.
        zero = torch.zeros_like(chosen)
        losses = dpo_loss(
            torch.where(identical, zero, chosen),
            torch.where(identical, zero, rejected),
            self.beta,
            self.label_smoothing,
        )
        total = losses.sum()
        return Loss(total=total, metrics=self._metrics(losses, chosen, rejected, identical))

    def _reference_of(self, pack: Pack) -> Tensor:
        """Reference log-probabilities [E, 2] of the pack's examples."""
        missing = [item for item in pack.items if item not in self.reference]
        if missing:
            where = str(pack.origins[pack.items.index(missing[0])])
            expected = f"a reference log-probability for item {missing[0]}, computed at the start"
            raise RecipeError(Problem(where, expected))
        return torch.tensor([self.reference[item] for item in pack.items], dtype=torch.float64)

    def _metrics(
        self, losses: Tensor, chosen: Tensor, rejected: Tensor, identical: Tensor
    ) -> dict[str, tuple[Number, Number]]:
        losses, chosen, rejected = losses.detach(), chosen.detach(), rejected.detach()
        pairs = float(losses.numel())
        margin = torch.where(identical, torch.zeros_like(chosen), self.beta * (chosen - rejected))
        tie = self.beta * TIE_NATS
        return {
            "loss": (losses.sum(), pairs),
            "margin": (margin.sum(), pairs),
            "accuracy": ((margin > tie).sum(), pairs),
            "ties": ((margin.abs() <= tie).sum(), pairs),
            "chosen_logratio": (chosen.sum(), pairs),
            "rejected_logratio": (rejected.sum(), pairs),
            "chosen_reward": (self.beta * chosen.sum(), pairs),
            "rejected_reward": (self.beta * rejected.sum(), pairs),
            # The margin can grow while the better answer becomes less likely: say so.
            "displacement": ((chosen < 0).sum(), pairs),
        }


def pair_sequences(pack: Pack) -> tuple[Tensor, Tensor]:
    """Sequence indices of the chosen and of the rejected answers, int64 [E] each.

    Raises RecipeError where an example has not exactly two sequences.
    """
    examples = len(pack.items)
    counts = torch.bincount(pack.sequence_example, minlength=examples)
    if counts.numel() != examples or bool((counts != 2).any()):
        wrong = int((counts[:examples] != 2).nonzero()[0]) if examples else 0
        where = str(pack.origins[wrong]) if pack.origins else "pack"
        expected = "two answers for each prompt: chosen, then rejected"
        raise RecipeError(Problem(where, expected, int(counts[wrong]) if examples else 0))
    order = torch.argsort(pack.sequence_example, stable=True).reshape(examples, 2)
    return order[:, 0], order[:, 1]


def identical_answers(pack: Pack, chosen_rows: Tensor, rejected_rows: Tensor) -> Tensor:
    """Which examples have the same supervised tokens in both answers: bool [E]."""
    lengths = torch.bincount(pack.sequence, minlength=pack.sequences)
    ends = torch.cumsum(lengths, 0).tolist()
    sizes = lengths.tolist()

    def answer(row: int) -> Tensor:
        return pack.targets[ends[row] - sizes[row] : ends[row]]

    rows = zip(chosen_rows.tolist(), rejected_rows.tolist(), strict=True)
    return torch.tensor([torch.equal(answer(a), answer(b)) for a, b in rows], dtype=torch.bool)


def check_starts_at_reference(loss: float, precision: str) -> None:
    """Before the first update policy and reference are one, so the loss must be ln 2.

    Raises RecipeError where it is not (1e-4 in fp32, 1e-2 in bf16): then the reference
    is another state, another layout of the pack, or dropout is on.
    """
    tolerance = 1e-4 if precision == "fp32" else 1e-2
    if not abs(loss - LOSS_AT_REFERENCE) <= tolerance:
        expected = (
            f"a loss of ln 2 = {LOSS_AT_REFERENCE:.6f} ± {tolerance:g} before the first update; "
            "the reference is not the state that the stage began from"
        )
        raise RecipeError(Problem("preference loss", expected, loss))
