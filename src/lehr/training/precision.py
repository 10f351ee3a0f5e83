"""What a precision needs of the other settings and of the device, before anything is trained."""

from __future__ import annotations

import torch

from lehr.errors import Problem
from lehr.models.precision import PRECISIONS
from lehr.training.float8_recipe import Float8Settings
from lehr.training.loss_scale import LossScaleSettings

Capability = tuple[int, int]
BF16_CAPABILITY = (8, 0)  # of a CUDA device with bf16 units


def precision_problems(
    precision: str,
    loss_scale: LossScaleSettings | None,
    fp8: Float8Settings | None,
    stochastic_rounding: bool,
    averages: bool,
) -> list[Problem]:
    """Everything in these settings that contradicts itself, on any device.

    averages  a moving average of the weights is asked for
    """
    if precision not in PRECISIONS:
        return [Problem("precision", "one of " + ", ".join(PRECISIONS), precision)]
    problems = []
    if precision == "fp16" and loss_scale is None:
        expected = (
            "a loss scale: without one, gradients below 2^-24 become 0 in fp16. "
            "Leave the key out for the default, or say precision: bf16 or fp32"
        )
        problems.append(Problem("loss_scale", expected))
    if precision != "fp16" and loss_scale is not None:
        expected = f"no loss scale with {precision}, or precision: fp16"
        problems.append(Problem("loss_scale", expected, loss_scale.init))
    if loss_scale is not None:
        problems += loss_scale.problems()
    if precision != "fp8" and fp8 is not None:
        problems.append(Problem("fp8", f"nothing with {precision}, or precision: fp8"))
    if fp8 is not None:
        problems += fp8.problems()
    if stochastic_rounding and precision != "pure_bf16":
        expected = f"false with {precision}, whose trained tensors are fp32; or pure_bf16"
        problems.append(Problem("stochastic_rounding", expected, True))
    if averages and precision == "pure_bf16":
        expected = "none with pure_bf16: an average kept in bf16 stops moving; or precision: bf16"
        problems.append(Problem("ema", expected))
    return problems


def hardware_problems(
    precision: str, fp8: Float8Settings | None, device: str, capability: Capability | None = None
) -> list[Problem]:
    """What the device that trains cannot do.

    device      cpu, cuda, ...
    capability  of a CUDA device, as torch.cuda.get_device_capability gives it

    >>> str(hardware_problems("bf16", None, "cuda", (7, 5))[0].expected)
    'fp16 or fp32: this GPU (SM 7.5) has no bf16 units'
    """
    problems = []
    wide = precision in ("bf16", "pure_bf16", "fp8")
    if device == "cuda" and wide and (capability or (0, 0)) < BF16_CAPABILITY:
        found = "of unknown kind" if capability is None else f"SM {capability[0]}.{capability[1]}"
        expected = f"fp16 or fp32: this GPU ({found}) has no bf16 units"
        problems.append(Problem("precision", expected, precision))
    if precision == "fp8":
        problems += (fp8 or Float8Settings()).on(device).problems(device, capability)
    return problems


def capability_of(device: torch.device) -> Capability | None:
    """Compute capability of a CUDA device; None of others."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
