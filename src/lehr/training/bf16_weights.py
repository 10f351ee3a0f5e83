"""bf16 weights that an optimizer moves in fp32: the sum is made wide and rounded once.

bf16 has 8 significant bits: where an update is below 2⁻⁹ of its weight, rounding to nearest
gives the old weight again, update after update. Stochastic rounding (Gupta et al. 2015,
arXiv:1502.02551, §3) moves it with the probability of the rest, so that the mean is right.
Gradients are bf16, the optimizer's moments fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lehr.streams import seed_for
from lehr.training.numeric_range import stochastic_round_bf16

MEASURE_EVERY = 10  # updates; the first is measured too


class Bf16Weights:
    """Trained tensors in bf16 beside fp32 stand-ins that live for the length of a step.

    stand_ins   what the optimizer is made of; they hold values only inside a step
    stochastic  round at random with the mean kept, else to nearest
    seed_names  names of the random stream; update and tensor are added to them
    """

    def __init__(
        self, trained: Mapping[str, Parameter], stochastic: bool, seed_names: Sequence[object]
    ) -> None:
        self.stochastic, self._seed_names = stochastic, tuple(seed_names)
        self._trained = trained
        self.stand_ins = {
            name: Parameter(value.detach().float(), requires_grad=True)
            for name, value in trained.items()
        }

    def release(self) -> None:
        """Give the memory of the stand-ins back."""
        for stand_in in self.stand_ins.values():
            stand_in.grad = None
            stand_in.data = stand_in.data.new_empty(0)

    @torch.no_grad()
    def step(self, optimizer: Optimizer, update: int) -> dict[str, float]:
        """Apply update number `update` (from 1); columns of metrics.jsonl where it is measured.

        The stand-ins hold the new weights until `release`.
        """
        for name, value in self._trained.items():
            self.stand_ins[name].data = value.detach().float()
            self.stand_ins[name].grad = None if value.grad is None else value.grad.float()
        optimizer.step()
        measured = update == 1 or update % MEASURE_EVERY == 0
        sums = torch.zeros(4, dtype=torch.float64)
        for name, value in self._trained.items():
            wanted = self.stand_ins[name].data
            rounded = self._rounded(wanted, update, name)
            if measured:
                sums += loss_sums(value.detach(), wanted, rounded)
            value.copy_(rounded)
            self.stand_ins[name].data = rounded.float()
        return columns_of(sums) if measured else {}

    def _rounded(self, wanted: Tensor, update: int, name: str) -> Tensor:
        if not self.stochastic:
            return wanted.to(torch.bfloat16)
        generator = torch.Generator(wanted.device)
        generator.manual_seed(seed_for(*self._seed_names, "rounding", update, name))
        return stochastic_round_bf16(wanted, generator)


def loss_sums(before: Tensor, wanted: Tensor, after: Tensor) -> Tensor:
    """[4] sums of one tensor: updates that are not 0; those that rounding to nearest would drop;
    Σ applied · asked; Σ asked².

    before, after  bf16 weights around the update; wanted: fp32, what the optimizer made
    """
    asked = wanted.double() - before.double()
    applied = after.double() - before.double()
    moving = asked != 0
    lost = moving & (wanted.to(torch.bfloat16) == before)
    parts = (moving.sum(), lost.sum(), (applied * asked).sum(), (asked * asked).sum())
    return torch.stack([part.double().cpu() for part in parts])


def columns_of(sums: Tensor) -> dict[str, float]:
    """`bf16.lost_updates`: share of the updates that rounding to nearest drops, whichever rounding
    is used; `bf16.update_arrived`: share of the update that the weights took along its direction,
    1 where nothing is lost (on average, with stochastic rounding).

    >>> before = torch.ones(3, dtype=torch.bfloat16)
    >>> wanted = torch.tensor([1 + 2.0**-10, 1 + 2.0**-7, 1.0])
    >>> columns = columns_of(loss_sums(before, wanted, wanted.bfloat16()))
    >>> columns["bf16.lost_updates"], round(columns["bf16.update_arrived"], 4)
    (0.5, 0.9846)
    """
    moving, lost, along, asked = sums.tolist()
    return {
        "bf16.lost_updates": lost / moving if moving else 0.0,
        "bf16.update_arrived": along / asked if asked else 1.0,
    }
