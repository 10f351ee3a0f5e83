"""Everything that a resume needs, as tensors and JSON: weights, buffers, moments."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lehr import ranks
from lehr.device import name_of
from lehr.errors import Problem, RecipeError
from lehr.models.precision import trained_dtype
from lehr.training.batch_norm import batch_norms
from lehr.training.checkpoint import Checkpoint

if TYPE_CHECKING:  # settings are made of parts that stand on this module
    from lehr.training.settings import EngineSettings

_WATCHING = (  # settings that change no number of the training
    *("checkpoint_every", "checkpoints_kept", "nonfinite_limit", "stage"),
    *("gradient_flow_every", "noise_scale_every"),
)
_PACKAGES = ("lehr", "torch", "transformers", "safetensors")


@runtime_checkable
class NamesItsTrained(Protocol):
    """A model that names its own trained tensors, as lehr's LanguageModel does."""

    def trained(self) -> dict[str, Parameter]: ...


def trained_parameters(model: nn.Module, precision: str = "fp32") -> dict[str, Parameter]:
    """What is trained, by stable name. Raises RecipeError for none, or for a type that the
    precision does not train: small updates vanish in a narrow one, unless that is asked for."""
    if isinstance(model, NamesItsTrained):
        trained = dict(model.trained())
    else:
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trained:
        raise RecipeError(Problem("model", "at least one tensor that is trained"))
    allowed = {trained_dtype(precision)}
    expected = "bf16 for a tensor that pure_bf16 trains: convert the model first"
    if torch.float32 in allowed:
        allowed.add(torch.float64)
        expected = "fp32 for a trained tensor: small updates vanish in less"
    problems = [
        Problem(name, expected, str(value.dtype))
        for name, value in trained.items()
        if value.dtype not in allowed
    ]
    if problems:
        raise RecipeError(problems)
    return trained


def running_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a forward pass may change (running statistics), by name.

    A model that names its trained tensors answers for its buffers: they are constants, but
    for the statistics of batch norms.
    """
    if isinstance(model, NamesItsTrained):
        norms = batch_norms(model).items()
        return {f"{name}.{key}": one for name, norm in norms for key, one in norm.named_buffers()}
    saved = model.state_dict()
    return {name: value for name, value in model.named_buffers() if name in saved}


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold an infinity or a NaN."""
    return [name for name, value in tensors.items() if not bool(value.isfinite().all())]


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of all tensors."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def put_back(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], where: str) -> None:
    """Copy `values` into `targets` in place.

    Raises RecipeError where names, shapes or types differ: a silent cast would lose bits.
    """
    shapes = {name: tuple(value.shape) for name, value in targets.items()}
    stored = {name: tuple(value.shape) for name, value in values.items()}
    if shapes != stored:
        differ = sorted(
            name for name in shapes.keys() | stored.keys() if shapes.get(name) != stored.get(name)
        )
        first = differ[0]
        expected = f"{first} with shape {shapes.get(first)}: the model in training is another one"
        raise RecipeError(Problem(where, expected, stored.get(first)))
    for name, target in targets.items():
        if values[name].dtype != target.dtype:
            expected = (
                f"{name} in {target.dtype}, which the precision of this run trains. Say the "
                "precision that the checkpoint was written with, or start over (--fresh)"
            )
            raise RecipeError(Problem(where, expected, str(values[name].dtype)))
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])


def modes_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Train or eval mode of every module: a frozen part may stand in eval mode for good."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Put every module back into the mode that `modes_of` found."""
    for module, training in modes:
        module.training = training


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as tensors named `<state>/<parameter>`."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named(optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value)
    return tensors


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave, bit for bit."""
    optimizer.state.clear()
    parameters = _named(optimizer)
    for name, tensor in tensors.items():
        key, _, of = name.partition("/")
        if of not in parameters:
            raise RecipeError(Problem("optimizer state", f"no entry for the unknown tensor {of}"))
        parameter = parameters[of]
        # Step counts stay where the optimizer keeps them: on the CPU unless it is fused there.
        home = parameter.device if tensor.ndim or parameter.device.type == "cuda" else "cpu"
        optimizer.state[parameter][key] = tensor.to(home)


def _named(optimizer: Optimizer) -> dict[str, Parameter]:
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }


def environment(trained: Mapping[str, Parameter]) -> dict[str, Any]:
    """What the bits of an update depend on besides the recipe."""
    device = next(iter(trained.values())).device
    card = {"accelerator": name} if (name := name_of(device)) else {}
    return {
        **card,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "device": str(device),
        "ranks": ranks.world_size(),
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def numeric_settings(settings: EngineSettings) -> dict[str, Any]:
    """The settings that change numbers."""
    values = asdict(settings)
    for name in _WATCHING:
        del values[name]
    del values["optimizer"]["watch_every"]
    return values


def differences(then: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """Each value that differs, as `name was x, is y`.

    >>> differences({"threads": 2}, {"threads": 4})
    ['threads was 2, is 4']
    """
    found = []
    for name in sorted(then.keys() | now.keys()):
        before, after = then.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{path}{name}.")
        elif _plain(before) != _plain(after):
            found.append(f"{path}{name} was {before}, is {after}")
    return found


def tensors_of(checkpoint: Checkpoint, file: str, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file whose name begins with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in checkpoint.tensors(file).items()
        if name.startswith(prefix)
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@functools.cache  # reading a package's metadata takes milliseconds
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
