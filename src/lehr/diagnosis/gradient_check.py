"""Is the gradient right? The engine's against float64 and against finite differences.

Three numbers on a slice of the user's own model and data, which must agree:

    g_engine   what the engine adds up, in the run's precision, micro-batch by micro-batch
    g_64       the same, every product in float64
    d(v)       (L(w + h v) - L(w - h v)) / 2h in float64 along random directions v of single
               tensors and of all; with h and h/2 combined (Richardson) its error falls with h^4

g_engine against g_64 shows what rounding does; <g_64, v> against d(v) shows a backward pass
that is not the derivative of its forward pass, or a tensor that was cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lehr.data.shapes import Pack
from lehr.objectives.base import Objective
from lehr.streams import generator_for
from lehr.training import gradients
from lehr.training.state import trained_parameters
from lehr.training.update import accumulate, denominator_of

LIMITS = {
    "fp32": 1e-3,
    "bf16": 0.15,
    "fp16": 0.05,
    "pure_bf16": 0.15,
}  # of a tensor's relative rounding error
DIFFERENCE_LIMIT = 1e-4  # of a slope, beside what the size of a gradient promises
TENSORS = 6  # that get a direction of their own
STEP = 1e-3  # of the weights' norm
SPREAD = 0.02  # of a tensor of zeros: an adapter's B, without which A has no gradient


@dataclass(frozen=True)
class TensorCheck:
    """One trained tensor: norm of its float64 gradient, and ‖g_engine - g_64‖ / ‖g_64‖."""

    name: str
    norm: float
    error: float


@dataclass(frozen=True)
class SlopeCheck:
    """One direction: the slope by the gradient and by differences.

    error      |by_gradient - by_differences| over the size that a slope along a random
               direction has
    unsure     how far differences with h and h/2 are apart, in the same unit: a kink nearby
    """

    along: str
    by_gradient: float
    by_differences: float
    error: float
    unsure: float

    @property
    def ok(self) -> bool:
        return self.error <= max(DIFFERENCE_LIMIT, 10 * self.unsure)


@dataclass(frozen=True)
class GradientCheck:
    """What was compared, and whether all of it agrees."""

    precision: str
    limit: float
    tokens: int
    tensors: tuple[TensorCheck, ...]
    slopes: tuple[SlopeCheck, ...]
    missing: tuple[str, ...]

    @property
    def worst(self) -> TensorCheck:
        return max(self.tensors, key=lambda one: one.error)

    @property
    def ok(self) -> bool:
        return self.worst.error <= self.limit and all(slope.ok for slope in self.slopes)

    def __str__(self) -> str:
        slope = max(self.slopes, key=lambda one: one.error)
        said = (
            f"gradient {'agrees' if self.ok else 'DISAGREES'}: {self.precision} against float64 "
            f"at most {self.worst.error:.1e} of a tensor ({self.worst.name}; limit "
            f"{self.limit:g}), differences against float64 at most {slope.error:.1e} along "
            f"{slope.along} (limit {DIFFERENCE_LIMIT:g})"
        )
        if self.missing:
            said += f"; no gradient at all: {', '.join(self.missing[:3])}"
        return said

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "worst": asdict(self.worst), **asdict(self)}


def check_gradient(
    model: nn.Module,
    objective: Objective,
    micro_batches: Sequence[Pack],
    precision: str = "fp32",
    seed: int = 0,
) -> GradientCheck:
    """Compare the three gradients on `micro_batches`; the model is left bitwise as it was.

    Dropout is off and batch norms use their running statistics. Trained tensors that are
    all 0 get small random values for the time, or what they multiply would not be seen.
    FP8 rounds on purpose, by a tenth of a gradient and more: its layers are checked as in bf16,
    which surrounds them.
    Takes the memory of the model twice more, and about 30 passes over the micro-batches.
    """
    precision = "bf16" if precision == "fp8" else precision
    trained = trained_parameters(model, precision)
    weights = [float(objective.weight(pack)) for pack in micro_batches]
    denominator = denominator_of(weights, micro_batches, 1)

    def gradient(precision: str) -> tuple[float, dict[str, Tensor | None]]:
        gradients.clear(trained)
        done = accumulate(
            model, objective, micro_batches, weights, denominator, (seed, "check"), precision
        )
        found = {name: one.grad for name, one in trained.items()}
        gradients.clear(trained)
        return done.loss, found

    def loss() -> float:
        with torch.no_grad():
            totals = [float(objective.loss(model, pack).total) for pack in micro_batches]
        return sum(totals) / denominator

    with _as_it_was(model), _nothing_is_zero(trained, seed):
        _, engine = gradient(precision)
        with _in_float64(model):
            _, exact = gradient("fp32")
            reached = [name for name, one in exact.items() if one is not None]
            missing = tuple(name for name in trained if name not in reached)
            tensors = tuple(_compared(name, engine[name], exact[name]) for name in reached)
            slopes = tuple(
                _slope(along, {name: trained[name] for name in names}, exact, loss, seed)
                for along, names in _directions(list(trained)).items()
            )
    tokens = sum(pack.tokens for pack in micro_batches)
    return GradientCheck(precision, LIMITS[precision], tokens, tensors, slopes, missing)


def _compared(name: str, engine: Tensor | None, exact: Tensor | None) -> TensorCheck:
    assert exact is not None
    norm = float(exact.norm())
    if engine is None:
        return TensorCheck(name, norm, math.inf)
    off = float((engine.double() - exact).norm())
    return TensorCheck(name, norm, off / norm if norm else math.inf if off else 0.0)


def _directions(names: Sequence[str]) -> dict[str, list[str]]:
    """All tensors together, and some, evenly spread, by themselves."""
    count = min(TENSORS, len(names))
    chosen = [names[round(i * (len(names) - 1) / max(1, count - 1))] for i in range(count)]
    return {"all tensors": list(names), **{name: [name] for name in chosen}}


def _slope(
    along: str,
    tensors: Mapping[str, nn.Parameter],
    exact: Mapping[str, Tensor | None],
    loss: Callable[[], float],
    seed: int,
) -> SlopeCheck:
    """Central differences along one random unit direction, with h and h/2."""
    stream = generator_for(seed, "direction", along)
    direction = {
        name: torch.randn(one.shape, generator=stream, dtype=torch.float64).to(one.device)
        for name, one in tensors.items()
    }
    count = sum(one.numel() for one in tensors.values())
    length = math.sqrt(sum(float(one.square().sum()) for one in direction.values()))
    size = math.sqrt(sum(float(one.detach().square().sum()) for one in tensors.values()))
    kept = {name: one.data for name, one in tensors.items()}

    def at(step: float) -> float:
        for name, one in tensors.items():
            one.data = kept[name] + (step / length) * direction[name]
        return loss()

    step = STEP * max(size, 0.01 * math.sqrt(count))
    try:
        wide = (at(step) - at(-step)) / (2 * step)
        narrow = (at(step / 2) - at(-step / 2)) / step
    finally:
        for name, one in tensors.items():
            one.data = kept[name]
    found = {name: grad for name in tensors if (grad := exact[name]) is not None}
    by_gradient = sum(float((g * direction[name]).sum()) for name, g in found.items()) / length
    norm = math.sqrt(sum(float(one.square().sum()) for one in found.values()))
    differences = (4 * narrow - wide) / 3
    unit = max(abs(by_gradient), abs(differences), norm / math.sqrt(count)) or 1.0
    off, apart = abs(by_gradient - differences), abs(differences - narrow)
    return SlopeCheck(along, by_gradient, differences, off / unit, apart / unit)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; modes and the global random state as before outside."""
    modes = [(module, module.training) for module in model.modules()]
    random_state = torch.get_rng_state()
    model.eval()
    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        for module, training in modes:
            module.training = training


@contextmanager
def _nothing_is_zero(trained: Mapping[str, nn.Parameter], seed: int) -> Iterator[None]:
    kept = {name: one.data for name, one in trained.items() if not one.detach().any()}
    try:
        for name in kept:
            noise = torch.randn(kept[name].shape, generator=generator_for(seed, "spread", name))
            trained[name].data = (SPREAD * noise).to(kept[name])
        yield
    finally:
        for name, value in kept.items():
            trained[name].data = value


@contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    """Weights, buffers and casts in float64 inside; the same tensors as before outside."""
    kept = [(one, one.data) for one in (*model.parameters(), *model.buffers())]
    named: Any = model
    dtype = getattr(model, "compute_dtype", None)
    try:
        for tensor, value in kept:
            if value.is_floating_point():
                tensor.data = value.double()
        if dtype is not None:
            named.compute_dtype = torch.float64
        with _WideCasts():
            yield
    finally:
        for tensor, value in kept:
            tensor.data = value
        if dtype is not None:
            named.compute_dtype = dtype


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class _WideCasts(TorchFunctionMode):
    """Casts to a narrower type, as norms and rotary embeddings make them, go to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.bfloat16, Tensor.half):
            func = Tensor.double
        args = tuple(_widened(one) for one in args)
        kwargs = {name: _widened(one) for name, one in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
