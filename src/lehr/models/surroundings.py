"""What a computation depends on besides its arguments: random numbers and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Surroundings:
    """The random state and the autocast of one moment, on the devices of its tensors.

    random  the state of each device's generator, or None: nothing was drawn
    """

    devices: list[torch.device]
    casts: list[Callable[[], AbstractContextManager[Any]]]
    random: list[Tensor] | None

    @classmethod
    def now(cls, arguments: Any) -> Surroundings:
        """As they are, on the CPU and on the devices of the tensors in `arguments`."""
        found = {torch.device("cpu"): None}
        map_tensors(arguments, lambda tensor: found.setdefault(tensor.device))
        devices = [one for one in found if one.type != "meta"]  # sizes alone draw nothing
        return cls(devices, [_autocast(one.type) for one in devices], random_state(devices))

    def forget_what_was_not_drawn(self) -> None:
        """Keep no random state (5 KB on a CPU) where nothing has been drawn since."""
        pairs = zip(self.random or [], random_state(self.devices), strict=False)
        if all(torch.equal(before, after) for before, after in pairs):
            self.random = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """As they were; afterwards the random state is what it was before."""
        before = None
        if self.random is not None:
            before = random_state(self.devices)
            set_random_state(self.devices, self.random)
        try:
            with ExitStack() as stack:
                for cast in self.casts:
                    stack.enter_context(cast())
                yield
        finally:
            if before is not None:
                set_random_state(self.devices, before)


def random_state(devices: Sequence[torch.device]) -> list[Tensor]:
    return [
        torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device)
        for device in devices
    ]


def set_random_state(devices: Sequence[torch.device], states: Sequence[Tensor]) -> None:
    for device, state in zip(devices, states, strict=True):
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _autocast(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the autocast that holds now."""
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cache)


def map_tensors(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """`value` with every tensor (or other `kind`) in tuples, lists and dicts changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(item, change, kind) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change, kind) for item in value)
    return value
