"""The two 8-bit floating formats of the OCP OFP8 specification, v1.0, and an exact cast to them.

    E4M3 (the FN variant)  4 exponent bits, bias 7,  3 mantissa bits, no infinity, largest 448
    E5M2                   5 exponent bits, bias 15, 2 mantissa bits, infinities,  largest 57344

torch's own casts differ from each other at the ends, and one of them from release to release:
in torch 2.13 the cast to E4M3 turns +inf into 448 and so hides it, and the cast to E5M2 turns a
finite 61440 into inf. Here the policy is said, and both formats follow it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lehr.errors import Problem, RecipeError

OVERFLOW = ("saturate", "nonfinite")


@dataclass(frozen=True)
class Float8Format:
    """One format.

    largest    largest finite value
    smallest   smallest value above 0 (a subnormal)
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    has_infinity: bool

    @property
    def smallest(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def relative_error(self) -> float:
        """Bound of the rounding error of a normal value, as a share of it: half a step."""
        return 2.0 ** -(self.mantissa_bits + 1)


E4M3 = Float8Format("e4m3", torch.float8_e4m3fn, 4, 3, 7, 448.0, has_infinity=False)
E5M2 = Float8Format("e5m2", torch.float8_e5m2, 5, 2, 15, 57344.0, has_infinity=True)
FORMATS = {form.name: form for form in (E4M3, E5M2)}


def format_named(name: str) -> Float8Format:
    """The format of that name. Raises RecipeError for another one.

    >>> format_named("e5m2").smallest == 2**-16
    True
    """
    if name not in FORMATS:
        raise RecipeError(Problem("float8 format", " or ".join(FORMATS), name))
    return FORMATS[name]


def encode(values: Tensor, form: Float8Format, overflow: str = "saturate") -> Tensor:
    """Nearest value of the format, ties to even, as a float8 tensor of the same shape.

    overflow  saturate: a finite value past the largest becomes the largest, with its sign;
              nonfinite: one that rounds past the largest becomes infinite (E5M2) or NaN (E4M3)

    Infinities stay visible under both: inf in E5M2, NaN in E4M3, which has no infinity. (OFP8's
    own saturating mode turns them into the largest value; then a diverged layer looks healthy.)
    NaN stays NaN. Raises ValueError for values that are not floating or for another policy.

    >>> x = torch.tensor([1.0625, 500.0, float("inf")])
    >>> encode(x, E4M3).float().tolist()
    [1.0, 448.0, nan]
    >>> encode(torch.tensor([61440.0, float("inf")]), E5M2).float().tolist()
    [57344.0, inf]
    """
    if overflow not in OVERFLOW:
        raise ValueError(f"overflow is {' or '.join(OVERFLOW)}, not {overflow!r}")
    if not values.is_floating_point():
        raise ValueError(f"a cast to {form.name} takes floating values, not {values.dtype}")
    # fp16, bf16 and other float8 widen exactly. torch rounds float64 twice, by way of fp32.
    wide = _nearest(values, form) if values.dtype == torch.float64 else values.float()
    codes = wide.clamp(-form.largest, form.largest).to(form.dtype).view(torch.uint8)
    beyond = wide.isinf() if overflow == "saturate" else _rounds_past(wide, form)
    if form.has_infinity:
        infinite = torch.where(wide < 0, 0xFC, 0x7C).to(torch.uint8)
        return torch.where(beyond, infinite, codes).view(form.dtype)
    return codes.masked_fill(beyond, 0x7F).view(form.dtype)  # NaN


def decode(codes: Tensor) -> Tensor:
    """The values of a float8 tensor in fp32: exact, every one of them fits.

    >>> decode(torch.tensor([0x7E, 0x01], dtype=torch.uint8).view(torch.float8_e4m3fn)).tolist()
    [448.0, 0.001953125]
    """
    return codes.float()


def round_to(values: Tensor, form: Float8Format, overflow: str = "saturate") -> Tensor:
    """`values` rounded to the format and widened back to their own dtype; see `encode`."""
    return decode(encode(values, form, overflow)).to(values.dtype)


def _rounds_past(values: Tensor, form: Float8Format) -> Tensor:
    """Whether round-to-nearest-even, with unlimited exponents, would leave the finite range.

    Half a step past the largest is a tie: it goes to the neighbour with an even mantissa, which
    is 448 (mantissa 110) in E4M3 and the one past 57344 (mantissa 11) in E5M2.
    """
    magnitude = values.abs()
    if form.has_infinity:
        return magnitude >= 61440.0
    return magnitude > 464.0


def _nearest(values: Tensor, form: Float8Format) -> Tensor:
    """float64 values on the format's grid, with exponents past its largest, in one rounding."""
    values = values.clamp(-(2.0**17), 2.0**17).where(values.isfinite(), values)
    _, exponent = torch.frexp(values)  # |value| = m 2^exponent with m in [0.5, 1)
    lowest = 2 - form.bias  # exponent of the smallest normal value in that convention
    step = exponent.clamp(min=lowest) - 1 - form.mantissa_bits
    rounded = torch.ldexp(torch.round(torch.ldexp(values, -step)), step)
    return torch.where(values.isfinite(), rounded, values)
