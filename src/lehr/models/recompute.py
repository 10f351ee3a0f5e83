"""Which blocks of a network are computed again, and what each keeps.

`none`       everything is kept
`full`       the inputs of the blocks (Chen et al. 2016)
`selective`  the inputs and every matrix product; norms, activations, gated products, rotary
             embeddings, dropout and the attention core are computed again
             (Korthikanti et al. 2022, section 5, by operation list)
a list       for each block the names of the products that it keeps, or None: all of it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from lehr.models.adapter_layers import LoraConv1D, LoraLinear, LoraMixin, LoraNf4
from lehr.models.meta import cast_type
from lehr.models.nf4 import Nf4Linear
from lehr.models.replay import Block, unit

ATTENTION = "attention"  # the unit that lehr's attention over segments names
Kind = Literal["none", "full", "selective"]
Keeps = Sequence[Collection[str] | None]

# Products that draw no random numbers and save nothing large but their input.
_PRODUCTS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, Conv1D, Nf4Linear),
    *(LoraLinear, LoraConv1D, LoraNf4),
)


class Recomputation:
    """The blocks of a network under a choice; `stop()` leaves the network as it was.

    The choice belongs to the modules that are there: make a new one after an adapter came or
    went. Raises ValueError where the network has no blocks, or a name is no product of its block.
    """

    def __init__(self, network: nn.Module, choice: Kind | Keeps) -> None:
        self.names, modules = zip(*_blocks_of(network), strict=True)
        if any("forward" in module.__dict__ for module in modules):
            raise RuntimeError("the blocks are under another choice: stop that one first")
        self.blocks = [Block(module, None) for module in modules]
        self.products = [_products_of(module) for module in modules]
        self._exchanged: list[tuple[nn.Module, str]] = []
        self.choose(choice)
        for block, products in zip(self.blocks, self.products, strict=True):
            self._exchange(block.module, "forward", block)
            for name, module in products.items():
                if isinstance(module, LoraMixin):
                    base = partial(_base_product, name, module, module.base_product)
                    self._exchange(module, "base_product", base)
                self._exchange(module, "forward", partial(_forward, name, module, module.forward))

    def choose(self, choice: Kind | Keeps) -> None:
        """Another choice from the next forward pass on."""
        for block, keeps in zip(self.blocks, self.keeps_of(choice), strict=True):
            block.keeps = None if keeps is None else frozenset(keeps)

    def keeps_of(self, choice: Kind | Keeps) -> Keeps:
        """For each block what `choice` keeps."""
        if isinstance(choice, str):
            each: dict[str, Callable[[Iterable[str]], Collection[str] | None]] = {
                "none": lambda _: None,
                "full": lambda _: (),
                "selective": tuple,
            }
            if choice not in each:
                raise ValueError(f"recompute is none, full, selective or a list, not {choice!r}")
            return [each[choice](products) for products in self.products]
        if len(choice) != len(self.blocks):
            raise ValueError(f"{len(self.blocks)} blocks need as many choices, not {len(choice)}")
        for name, products, keeps in zip(self.names, self.products, choice, strict=True):
            unknown = sorted(set(keeps or ()) - {*products, ATTENTION})
            if unknown:
                raise ValueError(
                    f"{name} has no product {unknown[0]}; it has {', '.join(products)}"
                )
        return choice

    def uncovered(self) -> list[str]:
        """Weight matrices inside the blocks whose products cannot be kept: computed again."""
        found = []
        for name, block, products in zip(self.names, self.blocks, self.products, strict=True):
            inside = {id(p) for module in products.values() for p in module.parameters()}
            found += [
                f"{name}.{own}"
                for own, parameter in block.module.named_parameters()
                if parameter.dim() > 1 and id(parameter) not in inside
            ]
        return found

    def operations(self) -> dict[str, list[str]]:
        """The operation list: names of products, and classes of what lies between them."""
        products = list(dict.fromkeys(name for each in self.products for name in each))
        between: dict[str, None] = {}
        for block, each in zip(self.blocks, self.products, strict=True):
            own = {id(module) for module in each.values()}
            for module in block.module.modules():
                if id(module) not in own and not list(module.children()):
                    between[type(module).__name__] = None
        listed = [*between, "attention core", "products and sums of elements"]
        return {"products": products, "between": listed}

    def stop(self) -> None:
        for module, name in self._exchanged:
            module.__dict__.pop(name, None)
        self._exchanged.clear()

    def _exchange(self, module: nn.Module, name: str, new: Callable[..., Any]) -> None:
        module.__dict__[name] = new
        self._exchanged.append((module, name))


def _blocks_of(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost layers that transformers itself would compute again, in order."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in network.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            found.append((name, module))
    if not found:
        raise ValueError(
            f"{type(network).__name__} has no blocks that can be computed again: recompute: none"
        )
    return found


def _products_of(block: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in block.named_modules() if type(module) in _PRODUCTS}


def _forward(name: str, module: Any, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    if not isinstance(module, LoraMixin):
        x = _cast(x)
    elif module.adapter_active and module.dropout and module.training:
        return forward(x)  # only its base product is a unit: the mask is drawn again
    return unit(name, forward, x, operations=partial(_operations, module, x))


def _base_product(
    name: str, module: LoraMixin, product: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    operations = 2.0 * _rows(x) * float(_numbers(module))
    return unit(name, product, x, operations=lambda: operations)


def _cast(x: Tensor) -> Tensor:
    """Autocast's own cast, before the unit rather than in it: a cast copy would be kept."""
    kind = x.device.type
    if kind == "meta":  # has no autocast of its own
        narrow = cast_type()
        return x if narrow is None or x.dtype != torch.float32 else x.to(narrow)
    if torch.is_autocast_enabled(kind) and x.dtype == torch.float32:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _operations(module: Any, x: Tensor) -> float:
    weights = _numbers(module)
    if isinstance(module, LoraMixin) and module.adapter_active:
        weights += module.lora_a.numel() + module.lora_b.numel()
    return 2.0 * _rows(x) * float(weights)


def _numbers(module: Any) -> int:
    """Weights of a layer, without dequantising them."""
    quantised = getattr(module, "quantised", None)
    return int((module.weight if quantised is None else quantised).numel())


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]
