"""What a narrow floating type would do to given tensors; stochastic rounding to bf16.

fp16   values below 2⁻²⁵ become 0, below 2⁻¹⁴ lose bits, from 65520 on become inf
bf16   the range of fp32, but 8 significant bits: w + u = w where |u| < 2⁻⁹ |w|
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FP16_SMALLEST_NORMAL = 2.0**-14
# Loss scaling aims the largest gradient at 2^13: two doublings below fp16's largest value.
_AIM_EXPONENT = 13


@dataclass(frozen=True)
class TensorRange:
    """Where the values of one tensor lie. Shares are of the values that are finite and not 0.

    values           how many those are; zeros and non-finite values are counted apart
    smallest         smallest magnitude above 0, largest: largest finite one; 0 without any
    fp16_underflow   share that a cast to fp16 turns into 0
    fp16_subnormal   share that keeps some, but not all, of fp16's 11 bits
    fp16_overflow    share that a cast to fp16 turns into inf
    bf16_underflow, bf16_overflow   the same for bf16
    """

    name: str
    values: int
    zeros: int
    nonfinite: int
    smallest: float
    largest: float
    fp16_underflow: float
    fp16_subnormal: float
    fp16_overflow: float
    bf16_underflow: float
    bf16_overflow: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.smallest:.1e} to {self.largest:.1e}, "
            f"fp16 loses {self.fp16_underflow + self.fp16_overflow:.1%} "
            f"and blurs {self.fp16_subnormal:.1%}, "
            f"bf16 loses {self.bf16_underflow + self.bf16_overflow:.1%}"
        )


def range_of(name: str, values: Tensor) -> TensorRange:
    """Shares found by making the casts. `values` fp32 or float64, of any shape.

    >>> report = range_of("g", torch.tensor([2.0**-25, 2.0**-24, 1.0, 65520.0, 0.0]))
    >>> report.fp16_underflow, report.fp16_subnormal, report.fp16_overflow
    (0.25, 0.25, 0.25)
    """
    wide = values.detach()
    finite = wide.isfinite()
    magnitude = wide[finite & (wide != 0)].abs()
    count = magnitude.numel()

    def share(where: Tensor) -> float:
        return int(where.sum()) / count if count else 0.0

    half, brain = magnitude.half(), magnitude.bfloat16()
    return TensorRange(
        name=name,
        values=count,
        zeros=int((wide == 0).sum()),
        nonfinite=int((~finite).sum()),
        smallest=float(magnitude.min()) if count else 0.0,
        largest=float(magnitude.max()) if count else 0.0,
        fp16_underflow=share(half == 0),
        fp16_subnormal=share((half != 0) & (magnitude < FP16_SMALLEST_NORMAL)),
        fp16_overflow=share(half.isinf()),
        bf16_underflow=share(brain == 0),
        bf16_overflow=share(brain.isinf()),
    )


def range_report(tensors: Mapping[str, Tensor]) -> list[TensorRange]:
    """One line per tensor, in order; for gradients: `{name: p.grad}` of an fp32 backward."""
    return [range_of(name, values) for name, values in tensors.items()]


def suggested_loss_scale(report: list[TensorRange]) -> float:
    """Power of two, at least 1, that brings the largest value near 2¹³; 1 without any value.

    >>> suggested_loss_scale(range_report({"g": torch.tensor([2.0**-26, 2.0**-20])}))
    8589934592.0
    """
    largest = max((entry.largest for entry in report), default=0.0)
    if largest == 0:
        return 1.0
    return 2.0 ** max(0, _AIM_EXPONENT - math.floor(math.log2(largest)))


def lost_update_share(before: Tensor, update: Tensor, dtype: torch.dtype = torch.bfloat16) -> float:
    """Share of the updates that are not 0, but leave a weight kept in `dtype` as it was.

    before, update  weights and what is added to them, of one shape; the sum is made in fp32
                    (as an optimizer does) and rounded to nearest

    >>> lost_update_share(torch.ones(4), torch.tensor([2.0**-10, 2.0**-9, 2.0**-7, 0.0]))
    0.6666666666666666
    """
    kept = before.detach().to(dtype)
    wide = torch.float64 if update.dtype == torch.float64 else torch.float32
    after = (kept.to(wide) + update.detach().to(wide)).to(dtype)
    moving = update != 0
    count = int(moving.sum())
    return int((moving & (after == kept)).sum()) / count if count else 0.0


def stochastic_round_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to bf16, up or down at random with the mean kept: E[result] = value.

    A bf16 number is the upper half of an fp32 one. A random lower half is added to the
    magnitude and the lower half cut off: the carry comes with the probability of the rest.
    Values that bf16 has stay exactly; infinities and NaN stay; nothing finite becomes infinite.

    generator  of the same device: a stream named by (seed, update, tensor) makes it repeatable
    Raises ValueError for another dtype than fp32.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"stochastic rounding starts from fp32, not {values.dtype}")
    bits = values.detach().contiguous().view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    largest = torch.finfo(torch.bfloat16).max
    rounded = rounded.clamp(-largest, largest)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
