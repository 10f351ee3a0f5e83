"""The exchange between ranks: timed as it is, or done by each rank with itself.

Collectives of gloo block the processor, so wall-clock around them is what nothing hides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lehr.diagnosis.speed_clock import fair_clock

NAMES = ("all_reduce", "all_gather", "broadcast", "barrier")


@contextmanager
def timed_exchange() -> Iterator[list[float]]:
    """[seconds so far] in the collectives of `torch.distributed` that run inside."""
    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = fair_clock()
            try:
                return call(*arguments, **options)
            finally:
                spent[0] += fair_clock() - began

        return run

    with _replaced({name: timed(getattr(dist, name)) for name in NAMES}):
        yield spent


@contextmanager
def exchanged(*, by_itself: bool) -> Iterator[None]:
    """Inside, with `by_itself`, each rank answers as if the others had what it has itself."""
    if not by_itself:
        yield
        return

    def all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        tensor.mul_(dist.get_world_size())

    def all_gather(found: list[torch.Tensor], tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        for one in found:
            one.copy_(tensor)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    calls: dict[str, Callable[..., Any]] = {"all_reduce": all_reduce, "all_gather": all_gather}
    with _replaced(calls | {"broadcast": nothing, "barrier": nothing}):
        yield


@contextmanager
def _replaced(calls: dict[str, Callable[..., Any]]) -> Iterator[None]:
    before = {name: getattr(dist, name) for name in calls} if dist.is_available() else {}
    for name in before:
        setattr(dist, name, calls[name])
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(dist, name, call)
