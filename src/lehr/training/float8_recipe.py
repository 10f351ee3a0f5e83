"""Which layers compute in FP8, how, and why the others do not.

The selective recipe: embeddings and norms are never candidates; the head, the first and last
blocks and small layers stay in high precision. Every linear layer gets a line with its verdict.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lehr.errors import Problem, RecipeError
from lehr.training.float8_formats import FORMATS

SCALINGS = ("current", "delayed", "block")
BACKENDS = ("auto", "emulated", "scaled_mm")
OPERANDS = ("input", "weight", "gradient")
LARGEST_MARGIN = 14  # 448 / 2^15 is below 2^-6, the smallest normal number of E4M3
# Width that the FP8 products of CUDA want of both sides of a weight matrix.
CUDA_MULTIPLE = 16
CUDA_CAPABILITY = (8, 9)
_HEADS = ("lm_head", "head", "score", "output", "embed_out", "classifier")


@dataclass(frozen=True)
class HealthLimits:
    """A layer is sick when one of its casts is outside for `patience` measured updates in a row.

    A healthy tensor has 31 dB in E4M3 and 25 dB in E5M2; one outlier of 1e5 standard
    deviations leaves 18 dB and 17 % zeros. One spike alone must not switch a layer off.
    """

    sqnr_db: float = 15.0
    underflow: float = 0.25
    saturation: float = 0.01
    patience: int = 3

    def problems(self) -> list[Problem]:
        """Everything that is wrong with these values."""
        problems = _count_problems("fp8.limits.patience", self.patience, 1)
        for name in ("underflow", "saturation"):
            if not 0 <= getattr(self, name) <= 1:
                expected = "a share from 0 to 1"
                problems.append(Problem(f"fp8.limits.{name}", expected, getattr(self, name)))
        if math.isnan(self.sqnr_db) or self.sqnr_db == math.inf:
            problems.append(Problem("fp8.limits.sqnr_db", "a number of decibels", self.sqnr_db))
        return problems


@dataclass(frozen=True)
class Float8Settings:
    """How FP8 is used.

    scaling            current | delayed | block (1 × 128)
    forward_format     of inputs and weights; gradient_format: of the gradient of the output
    window, margin     of delayed scaling: applied updates remembered, powers of two to spare
    convert            names or patterns of layers; ("*",) = all that the selective recipe allows,
                       anything else = exactly these, or it is refused
    keep               names or patterns that stay in high precision
    smallest_features  a layer with a narrower side stays in high precision
    backend            emulated (float8 casts, fp32 products; any device) | scaled_mm (torch's
                       FP8 products: SM >= 8.9, or a CPU for tests) | auto (see `on`)
    measure_every      updates between two measurements of health
    """

    scaling: str = "current"
    forward_format: str = "e4m3"
    gradient_format: str = "e5m2"
    window: int = 16
    margin: int = 0
    convert: tuple[str, ...] = ("*",)
    keep: tuple[str, ...] = ()
    keep_first_blocks: int = 1
    keep_last_blocks: int = 1
    smallest_features: int = 64
    backend: str = "auto"
    limits: HealthLimits = field(default_factory=HealthLimits)
    measure_every: int = 10

    def on(self, device: str) -> Float8Settings:
        """With `backend: auto` settled: real FP8 products on a GPU, emulated ones elsewhere.

        A GPU without FP8 units gets no emulation unasked: it is slower than bf16, and who asks
        for FP8 there expects speed. `problems` then refuses it.
        """
        if self.backend != "auto":
            return self
        return replace(self, backend="scaled_mm" if device == "cuda" else "emulated")

    def problems(
        self, device: str = "cpu", capability: tuple[int, int] | None = None
    ) -> list[Problem]:
        """Everything that is wrong with these values on a target device.

        device      type of the device that trains: cpu, cuda, ...; not where this is called
        capability  of a CUDA device, as torch.cuda.get_device_capability gives it
        """
        problems = []
        choices = (
            ("scaling", SCALINGS),
            ("forward_format", tuple(FORMATS)),
            ("gradient_format", tuple(FORMATS)),
            ("backend", BACKENDS),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                expected = "one of " + ", ".join(allowed)
                problems.append(Problem(f"fp8.{name}", expected, getattr(self, name)))
        lowest = {"window": 1, "margin": 0, "keep_first_blocks": 0, "keep_last_blocks": 0}
        lowest |= {"smallest_features": 1, "measure_every": 1}
        for name, least in lowest.items():
            problems += _count_problems(f"fp8.{name}", getattr(self, name), least)
        if isinstance(self.margin, int) and self.margin > LARGEST_MARGIN:
            expected = f"at most {LARGEST_MARGIN}: beyond it even the largest value loses bits"
            problems.append(Problem("fp8.margin", expected, self.margin))
        problems += self.limits.problems()
        if not self.convert:
            problems.append(Problem("fp8.convert", "at least one pattern", []))
        if self.backend == "scaled_mm":
            problems += self._hardware_problems(device, capability)
        return problems

    def _hardware_problems(self, device: str, capability: tuple[int, int] | None) -> list[Problem]:
        problems = []
        if self.scaling == "block":
            expected = "current or delayed: torch._scaled_mm takes one scale a tensor"
            problems.append(Problem("fp8.scaling", expected, self.scaling))
        if self.forward_format == self.gradient_format == "e5m2":
            expected = "e4m3 forward: no device multiplies E5M2 by E5M2"
            problems.append(Problem("fp8.forward_format", expected, self.forward_format))
        if device not in ("cpu", "cuda"):
            problems.append(Problem("fp8.backend", f"emulated on {device}", self.backend))
        if device == "cuda" and (capability or (0, 0)) < CUDA_CAPABILITY:
            found = "unknown" if capability is None else f"SM {capability[0]}.{capability[1]}"
            expected = "emulated, or a GPU of SM 8.9 or later (Ada, Hopper, Blackwell)"
            problems.append(Problem("fp8.backend", expected, f"{self.backend} on {found}"))
        return problems


@dataclass(frozen=True)
class LayerChoice:
    """One linear layer; `reason` says why it stays in high precision, "" where it does not."""

    name: str
    inputs: int
    outputs: int
    reason: str

    @property
    def converted(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        verdict = "fp8" if self.converted else f"high precision: {self.reason}"
        return f"{self.name} [{self.outputs} x {self.inputs}] {verdict}"


def shape_reason(inputs: int, outputs: int, settings: Float8Settings, device: str) -> str:
    """Why a layer of that shape cannot compute in FP8 on that device; "" where it can.

    >>> shape_reason(30, 8, Float8Settings(backend="scaled_mm"), "cuda")
    'both sides must be multiples of 16 on cuda'
    >>> shape_reason(30, 8, Float8Settings(backend="scaled_mm"), "cpu")
    ''
    """
    if settings.backend != "scaled_mm" or device != "cuda":
        return ""
    if inputs % CUDA_MULTIPLE or outputs % CUDA_MULTIPLE:
        return f"both sides must be multiples of {CUDA_MULTIPLE} on {device}"
    return ""


def select(
    model: nn.Module,
    settings: Float8Settings,
    layers: dict[str, nn.Linear],
    device: str = "cpu",
) -> list[LayerChoice]:
    """The verdict for every layer of `layers`, in the model's order.

    Raises RecipeError, with all problems, for a pattern that matches no layer, a layer that
    is both named and kept, a named layer whose shape the device cannot take, or where nothing
    is left to convert.
    """
    named = _matches("fp8.convert", settings.convert, layers)
    kept = _matches("fp8.keep", settings.keep, layers)
    explicit = settings.convert != ("*",)
    outside = {} if explicit else _reserved(model, settings, layers)
    problems, choices = [], []
    for name, layer in layers.items():
        inputs, outputs = layer.in_features, layer.out_features
        shape = shape_reason(inputs, outputs, settings, device)
        if name not in named:
            reason = "not named in convert"
        elif name in kept:
            reason = "named in keep"
            if explicit:
                expected = "a layer of convert or of keep, not of both"
                problems.append(Problem("fp8.keep", expected, name))
        elif explicit:
            reason = shape
            if shape:
                found = f"{name} [{outputs} x {inputs}]"
                expected = f"layers that {device} can take in FP8: {shape}"
                problems.append(Problem("fp8.convert", expected, found))
        elif name in outside:
            reason = outside[name]
        elif min(inputs, outputs) < settings.smallest_features:
            reason = f"a side is below {settings.smallest_features}"
        else:
            reason = shape
        choices.append(LayerChoice(name, inputs, outputs, reason))
    if not problems and not any(choice.converted for choice in choices):
        why = "; ".join(str(choice) for choice in choices[:4]) or "the model has no linear layer"
        expected = "at least one layer in FP8; use another precision, or fp8.convert with names"
        problems.append(Problem("fp8", expected, why))
    if problems:
        raise RecipeError(problems)
    return choices


def _matches(where: str, patterns: Sequence[str], layers: dict[str, nn.Linear]) -> frozenset[str]:
    """Layers that a pattern names, whole or by its end. Raises RecipeError for an idle pattern."""
    found: set[str] = set()
    problems = []
    for pattern in patterns:
        hits = [n for n in layers if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")]
        if not hits and layers:
            ends = sorted({name.rsplit(".", 1)[-1] for name in layers})
            close = difflib.get_close_matches(pattern, [*layers, *ends], n=3, cutoff=0.4) or ends
            expected = f"a pattern that matches a linear layer: {', '.join(close[:8])}"
            problems.append(Problem(where, expected, pattern))
        found.update(hits)
    if problems:
        raise RecipeError(problems)
    return frozenset(found)


def _reserved(
    model: nn.Module, settings: Float8Settings, layers: dict[str, nn.Linear]
) -> dict[str, str]:
    """Layers that the selective recipe leaves alone, with the reason."""
    reserved: dict[str, str] = {}
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(head) for head in map(_head_of, model.modules()) if head is not None}
    for name, layer in layers.items():
        if id(layer) in heads or id(layer.weight) in embedded or name.split(".")[-1] in _HEADS:
            reserved[name] = "the head"
    for blocks in _block_lists(model, [name for name in layers if name not in reserved]):
        last = len(blocks) - settings.keep_last_blocks
        for index, block in enumerate(blocks):
            if index >= settings.keep_first_blocks and index < last:
                continue
            which = "first" if index < settings.keep_first_blocks else "last"
            reserved |= {name: f"in the {which} block" for name in block if name not in reserved}
    return reserved


def _head_of(module: Any) -> object | None:
    get = getattr(module, "get_output_embeddings", None)
    return get() if callable(get) else None


def _block_lists(model: nn.Module, layers: Sequence[str]) -> list[list[list[str]]]:
    """For each outermost ModuleList with linear layers: the layers of each of its blocks.

    A model without one, a plain chain, has one block per layer.
    """
    found: list[list[list[str]]] = []
    taken: tuple[str, ...] = ()
    for name, module in model.named_modules():  # outer modules come first
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or name.startswith(taken):
            continue
        starts = [f"{name}.{index}." if name else f"{index}." for index in range(len(module))]
        blocks = [[n for n in layers if f"{n}.".startswith(start)] for start in starts]
        if any(blocks):
            found.append(blocks)
            taken = (*taken, f"{name}.")
    return found or [[[name] for name in layers]]


def _count_problems(where: str, value: object, least: int) -> list[Problem]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return []
    return [Problem(where, f"a whole number, at least {least}", value)]
