"""A card that is not there: real numbers behind tensors that say they are on `cuda:0`.

Inside `pretended_card()` torch finds one CUDA device. What is moved to it or made on it is an
`OnCard`: its numbers are computed on the CPU, and an operation that mixes it with a tensor of the
CPU raises, as a card would, as does a kernel that only a CPU has. What makes the host wait for
the device is counted. Nothing is said about a card's own kernels, their numbers or their speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
INSIDE = torch.device(
    "meta", 7
)  # what C++ is told: it has no cuda built in, and this means nothing
NAME = "pretended card"
GIB = 2**30
# A tensor of the CPU may stand in these: as what is copied, or as an index.
_TAKE_BOTH = (
    "copy_",
    "_to_copy",
    "index",
    "index_put",
    "index_put_",
    "_unsafe_index",
    "_index_put_impl_",
)
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2")
_RANDOM = ("native_dropout", "bernoulli", "bernoulli_", "rand", "randn", "uniform_", "normal_")


class OnCard(Tensor):
    """C++ takes it for a meta tensor, Python for one on the card; `inner` holds the numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCard:
        made: OnCard = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=INSIDE,
        )
        made.inner = inner
        return made

    # Modules exchange tensors of this kind whole, so that what is tied stays tied.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, *_: Any) -> OnCard:
        return OnCard(parts["inner"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a pretended card that is no longer there")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_inside(self) -> bool:  # type: ignore[override]
        return False

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inner = value.inner

    def to(self, *where: Any, **how: Any) -> Tensor:  # type: ignore[override]
        device, dtype, *_ = torch._C._nn._parse_to(*where, **how)
        here = device is None or _is_card(device)
        if here and dtype in (None, self.dtype) and not how.get("copy"):
            return self
        return super().to(*where, **how)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({self.inner!r})"

    def __deepcopy__(self, memo: Any) -> OnCard:
        return OnCard(self.inner.clone())


class _Names(TorchFunctionMode):
    """`cuda` is another name to C++, which has no such device built in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _inside(value) for name, value in (kwargs or {}).items()}
        if func is torch.device:
            return func(*args, **kwargs)
        args = tuple(_inside(one) for one in args)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _without_lists(args[1]), *args[2:])
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            device = kwargs.pop("device")  # made by C++ alone, which would leave no numbers
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _without_lists(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_without_lists(one) for one in index)
    return torch.tensor(index, dtype=torch.long) if isinstance(index, list) else index


def _inside(value: Any) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return INSIDE if torch.device(value).type == "cuda" else value
    return value


def _is_card(device: torch.device) -> bool:
    return device == INSIDE or device.type == "cuda"  # by its name where no mode renamed it


class Card(TorchDispatchMode):
    """Runs operations behind the tensors; refuses what a card would refuse.

    waits   how often the host waited for the device, by operation
    copies  from the CPU: `pinned` or `pageable` (of more than one number)
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.random = torch.Generator().manual_seed(0).get_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        kwargs = dict(kwargs or {})
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        cards = [one for one in tensors if isinstance(one, OnCard)]
        assert all(isinstance(one, OnCard) or one.device != INSIDE for one in tensors), name
        asked = kwargs.get("device")
        if asked is not None:
            asked = torch.device(asked)
            kwargs["device"] = torch.device("cpu") if _is_card(asked) else asked
        if name == "is_pinned":
            return getattr(args[0], "pinned", False)
        if name == "_pin_memory":
            found = args[0].clone()
            found.pinned = True
            return found
        there = bool(cards) if asked is None else _is_card(asked)
        self._check(name, tensors, cards, args)
        self._count(name, cards, args, there)
        known = {id(one.inner): one for one in cards}
        inside = tree_map(lambda one: one.inner if isinstance(one, OnCard) else one, (args, kwargs))
        with self._own_random(there and name in _RANDOM):
            found = func(*inside[0], **inside[1])
        if not there:
            return found
        if name == "copy_" and not isinstance(args[0], OnCard):
            return args[0]

        def outside(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            return known[id(one)] if id(one) in known else OnCard(one)

        return tree_map(outside, found)

    def _check(self, name: str, tensors: list[Tensor], cards: list[Any], args: Any) -> None:
        if not cards:
            return
        if name.endswith("_for_cpu") or name.endswith("_for_cpu_backward"):
            raise NotImplementedError(f"{name} has no kernel on a card")
        strict = name in ("cat", "stack", "_foreach_norm")
        left = [one for one in tensors if not isinstance(one, OnCard) and (one.dim() or strict)]
        if name in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"):
            left = [] if isinstance(args[0], OnCard) else left
        elif name in _TAKE_BOTH:
            return
        if left:
            sizes = [tuple(one.shape) for one in left]
            raise RuntimeError(f"{name}: tensors on {DEVICE} and on the cpu {sizes}: one device")

    def _count(self, name: str, cards: list[Any], args: Any, there: bool) -> None:
        if cards:
            by_truth = name == "index" and any(
                one is not None and one.dtype == torch.bool for one in args[1]
            )
            down = name == "_to_copy" and not there
            down |= name == "copy_" and not isinstance(args[0], OnCard)
            if name in _WAITS or down or by_truth:
                self.waits[name] += 1
        up = args[1:2] if name == "copy_" and cards else args[:1] if name == "_to_copy" else ()
        for one in up if there else ():
            if not isinstance(one, OnCard) and one.numel() > 1:
                self.copies["pinned" if getattr(one, "pinned", False) else "pageable"] += 1

    @contextmanager
    def _own_random(self, wanted: bool) -> Iterator[None]:
        """Random numbers of the card come from its own generator."""
        if not wanted:
            yield
            return
        default = torch.default_generator
        before = default.get_state()
        default.set_state(self.random)
        try:
            yield
        finally:
            self.random = default.get_state()
            default.set_state(before)


@contextmanager
def pretended_card(memory_gib: float = 64.0) -> Iterator[Card]:
    """One CUDA device for torch, its memory as given; afterwards there is none."""
    import peft.peft_model  # now: what it imports looks for a card's own functions

    card = Card()

    def seed(value: int) -> None:
        card.random = torch.Generator().manual_seed(value).get_state()

    def set_state(state: Tensor, *_: Any) -> None:
        card.random = state.clone()

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_: True,
        "mem_get_info": lambda *_: (int(memory_gib * GIB), int(memory_gib * GIB)),
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: card.waits.update(["synchronize"]),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda *_: card.random.clone(),
        "set_rng_state": set_state,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        # safetensors reads straight onto a card, past everything here.
        patch.setattr(peft.peft_model, "infer_device", lambda: "cpu")
        with _Names(), card:
            yield card
