"""Forward passes of models on torch's meta device, where a tensor has a shape and no numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lehr.models.precision import autocast_dtype

# What autocast computes in its narrow type: the products.
_PRODUCTS = frozenset(
    (
        *(F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
    )
)


class SizesAlone(TorchFunctionMode):
    """What forward passes of a meta model need: autocast, and answers to questions about numbers.

    torch has no autocast for this device; where all weights train, products take their type
    from here.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._outer: SizesAlone | None = None

    @property
    def narrow(self) -> torch.dtype | None:
        """Type of the products where it is not that of the weights."""
        return autocast_dtype(self.model.precision) if self.model.trains_all else None

    def __enter__(self) -> Any:
        global _current
        self._outer, _current = _current, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        global _current
        _current = self._outer
        super().__exit__(*error)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # transformers asks whether positions are those of a plain row.
        if func is Tensor.__bool__ and args[0].device.type == "meta":
            return True
        if func in _PRODUCTS and (narrow := self.narrow) is not None:
            args = tuple(_narrowed(one, narrow) for one in args)
        return func(*args, **(kwargs or {}))


_current: SizesAlone | None = None


def cast_type() -> torch.dtype | None:
    """What autocast would cast the inputs of products to, for a meta model; None: nothing."""
    return None if _current is None else _current.narrow


def _narrowed(value: Any, narrow: torch.dtype) -> Any:
    wide = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.to(narrow) if wide else value
