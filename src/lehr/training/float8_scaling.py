"""Scales that bring a tensor into the range of a narrow format, and what the cast loses.

    scale = largest / amax / 2^margin        code = cast(x scale)        x' = code / scale

`current` takes amax from the tensor itself; `delayed` from the last updates, so that it needs
no pass over the tensor before the cast (and is wrong after a jump); `block` takes one amax per
1 × 128 values along the axis that a product sums over. INT8 stands beside them: its steps are
equal, so one outlier costs every small value, where a floating format keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lehr.errors import Problem, RecipeError
from lehr.training.float8_formats import Float8Format, encode

BLOCK = 128
# The largest scale: its reciprocal is still a normal fp32 number. amax 1e-38 would need 4.5e40.
LARGEST_SCALE = 2.0**126
INT8_LARGEST = 127.0


def finite_amax(values: Tensor, dim: int | None = None) -> Tensor:
    """Largest magnitude of the finite values, fp32; 0 where there are none.

    An infinity must not reach a scale (it would be 0, and 0 · inf is NaN for all its neighbours)
    nor a history (it would stay for a whole window).
    """
    magnitude = values.detach().float().abs()
    magnitude = magnitude.where(magnitude.isfinite(), 0.0)
    if dim is None:
        return magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    return magnitude.amax(dim)


def scale_for(amax: Tensor, largest: float, margin: int = 0) -> Tensor:
    """largest / amax / 2^margin, always finite and above 0; 1 for an amax of 0.

    >>> scale_for(torch.tensor([4.0, 0.0, 1e-38]), 448.0, margin=1).tolist() == [56, 1, 2**126]
    True
    """
    amax = amax.float()
    scale = (largest / amax) * 2.0**-margin
    return torch.where(amax > 0, scale.clamp(2.0**-126, LARGEST_SCALE), 1.0)


@dataclass(frozen=True)
class Quantized:
    """codes / scale is what stands for the tensor.

    codes  float8 or int8, of the tensor's shape
    scale  fp32: [] for one scale, [rows, blocks] for blocks of `block` along the last axis
    """

    codes: Tensor
    scale: Tensor
    block: int | None = None

    def values(self) -> Tensor:
        """What the codes stand for, fp32."""
        wide = self.codes.float()
        if self.block is None:
            return wide / self.scale
        scale = self.scale.repeat_interleave(self.block, dim=-1)
        return wide / scale[..., : wide.shape[-1]]


def quantize(values: Tensor, form: Float8Format, scale: Tensor | None = None) -> Quantized:
    """Cast with one scale; by default the tensor's own. Past the largest it saturates; an
    infinity stays visible (see `encode`).

    >>> from lehr.training.float8_formats import E4M3
    >>> quantize(torch.tensor([0.5, -1.0, 0.0]), E4M3).values().tolist()
    [0.5, -1.0, 0.0]
    """
    if scale is None:
        scale = scale_for(finite_amax(values), form.largest)
    return Quantized(encode(values.detach().float() * scale, form), scale)


def quantize_blocks(values: Tensor, form: Float8Format, block: int = BLOCK) -> Quantized:
    """Cast with one scale per `block` neighbours along the last axis; the last may be shorter."""
    wide = values.detach().float()
    length = wide.shape[-1]
    padded = F.pad(wide, (0, -length % block))
    blocks = padded.unflatten(-1, (-1, block))
    scale = scale_for(finite_amax(blocks, dim=-1), form.largest)
    codes = encode(blocks * scale.unsqueeze(-1), form).flatten(-2)[..., :length]
    return Quantized(codes, scale, block)


def quantize_int8(values: Tensor) -> Quantized:
    """Symmetric INT8 with one scale, for comparison. Raises ValueError for what is not finite:
    no code of INT8 could show it."""
    wide = values.detach().float()
    if not bool(wide.isfinite().all()):
        raise ValueError("INT8 has no code for infinities and NaN")
    scale = scale_for(finite_amax(wide), INT8_LARGEST)
    codes = (wide * scale).round().clamp(-INT8_LARGEST, INT8_LARGEST)
    return Quantized(codes.to(torch.int8), scale)


@dataclass(frozen=True)
class Health:
    """What a cast lost.

    underflow    share of the values that are not 0 whose code is 0
    saturation   share of the finite values that lay past the largest code
    sqnr_db      10 log10(Σ x² / Σ (x − x')²) over finite values; inf where nothing was lost
    nonfinite    values that are infinite or NaN
    """

    underflow: float
    saturation: float
    sqnr_db: float
    nonfinite: int

    @staticmethod
    def of(sums: Tensor) -> Health:
        """From sums of `health_sums`; they add up over micro-batches and ranks."""
        signal, noise, nonzero, flushed, finite, saturated, nonfinite = sums.tolist()
        return Health(
            underflow=flushed / nonzero if nonzero else 0.0,
            saturation=saturated / finite if finite else 0.0,
            sqnr_db=10 * math.log10(signal / noise) if signal and noise else math.inf,
            nonfinite=int(nonfinite),
        )


def health_sums(values: Tensor, quantized: Quantized, largest: float) -> Tensor:
    """[7] sums behind `Health`: Σx², Σ(x − x')², and the counts of values that are not 0,
    flushed, finite, saturated, not finite."""
    # float64: the squares of small gradients do not exist in fp32.
    wide_type = torch.float32 if values.device.type == "mps" else torch.float64
    wide = values.detach().to(wide_type)
    finite = wide.isfinite()
    kept = wide.where(finite, 0.0)
    scale = quantized.scale
    if quantized.block is not None:
        scale = scale.repeat_interleave(quantized.block, dim=-1)[..., : wide.shape[-1]]
    back = quantized.codes.float().to(wide_type) / scale
    noise = (kept - back).where(finite, 0.0)
    nonzero = kept != 0
    # A share of the step allows for the rounding of amax · scale in fp32.
    past = (kept * scale).abs() > largest * (1 + 2.0**-20)
    counts = (nonzero, nonzero & (back == 0), finite, past, ~finite)
    sums = [(kept * kept).sum(), (noise * noise).sum(), *(c.sum().to(wide_type) for c in counts)]
    return torch.stack(sums)


def health(values: Tensor, quantized: Quantized, form: Float8Format | None = None) -> Health:
    """Health of one cast; `form` None = INT8."""
    largest = INT8_LARGEST if form is None else form.largest
    return Health.of(health_sums(values, quantized, largest))


class AmaxHistory:
    """Delayed scaling of one tensor: the largest amax of the last `window` applied updates.

    Within an update nothing moves: `scale` uses the updates before, `note` collects this one's
    amax over its micro-batches, `advance` ends it. So all micro-batches share one scale, however
    the update is cut. While nothing but zeros was seen (the first update, or a LoRA B that
    starts at zero), there is nothing to delay, and each tensor's own amax is used.
    """

    def __init__(self, window: int = 16, margin: int = 0) -> None:
        if window < 1 or margin < 0:
            raise ValueError("window is at least 1, margin at least 0")
        self.window, self.margin = window, margin
        self.amax: list[float] = []  # oldest first
        self._pending: Tensor | None = None

    def scale(self, values: Tensor, form: Float8Format) -> Tensor:
        """Scale for `values` in this update."""
        known = max(self.amax, default=0.0)
        if known > 0:
            amax = torch.tensor(known, dtype=torch.float32, device=values.device)
        else:
            amax = finite_amax(values)
        return scale_for(amax, form.largest, self.margin)

    def note(self, values: Tensor) -> None:
        """Collect the amax of one micro-batch; a repeated pass (recomputation) changes nothing."""
        amax = finite_amax(values)
        self._pending = amax if self._pending is None else torch.maximum(self._pending, amax)

    def pending(self) -> float | None:
        """Largest amax of this update so far; None where the tensor was not seen."""
        return None if self._pending is None else float(self._pending)

    def advance(self, amax: float | None) -> None:
        """An update was applied; `amax` is the largest over all ranks, None leaves it as is."""
        self._pending = None
        if amax is not None:
            self.amax = [*self.amax, amax][-self.window :]

    def forget(self) -> None:
        """An update was skipped: what it saw does not count."""
        self._pending = None

    def state(self) -> dict[str, Any]:
        """JSON; the scale is not stored, it follows from the history."""
        return {"amax": list(self.amax)}

    def load(self, state: Mapping[str, Any], where: str = "float8 state") -> None:
        """Restore a history. Raises RecipeError for one that this run cannot have made."""
        amax = state.get("amax")
        good = isinstance(amax, list) and all(
            isinstance(value, float | int) and math.isfinite(value) and value >= 0 for value in amax
        )
        if not good or len(amax or ()) > self.window:
            expected = f"at most {self.window} finite amax values of at least 0"
            raise RecipeError(Problem(where, expected, state))
        self.amax = [float(value) for value in amax or ()]
        self._pending = None
