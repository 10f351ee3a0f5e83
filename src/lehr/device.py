"""The device that a run trains on: chosen once, made ready, asked for its memory.

A card is never chosen in part: what a recipe asks for is there, or the run is refused before
anything else happens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lehr.errors import Problem, RecipeError

CPU = torch.device("cpu")
# cuBLAS repeats its bits only with work space of its own for each stream.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def choose(asked: str = "auto") -> torch.device:
    """The device of `auto | cpu | cuda | cuda:N`; `auto` is a card where torch finds one.

    Under torchrun each process takes the card of its LOCAL_RANK. Raises RecipeError for a card
    that is not there.
    """
    if asked == "cpu":
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto" and not count:
        return CPU
    number = asked.partition(":")[2]
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0"))
    if index < count:
        return torch.device("cuda", index)
    raise RecipeError(Problem("device", _missing(count), asked if number or not count else index))


def _missing(count: int) -> str:
    if count:
        last = f" to cuda:{count - 1}" if count > 1 else ""
        return f"one of the {count} card(s) that torch finds here: cuda:0{last}"
    why = "torch finds no CUDA device here"
    if torch.version.cuda is None:
        why += f" (torch {torch.__version__} was built without CUDA: install a build with it)"
    return f"auto or cpu: {why}"


def prepare(device: torch.device) -> None:
    """Make it the current one; before the first product on it."""
    if device.type == "cuda":
        os.environ.setdefault(*_WORKSPACE)
        torch.cuda.set_device(device)


def name_of(device: torch.device) -> str:
    """What a card is called; nothing for a CPU."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""


def card_memory(device: torch.device) -> int:
    """Bytes of a card that this process may have: what is free, and what it holds already."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(torch.cuda.memory_reserved(device))


def peak_of_card(device: torch.device) -> int:
    """Most bytes that this process has held on a card so far."""
    return int(torch.cuda.max_memory_allocated(device))


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given: before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on the device; the host does not wait for the copy to a card."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextmanager
def repeatable(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """The same bits from the same numbers inside: sums of a card in one fixed order.

    An operation that has no such order raises RuntimeError (`without_order` knows it). A CPU's
    always have one.
    """
    if device.type != "cuda" or not wanted:
        yield
        return
    memory: Any = torch.utils.deterministic
    os.environ.setdefault(*_WORKSPACE)  # for those who come without `prepare`
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # costs a pass over every tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        memory.fill_uninitialized_memory = fills


def without_order(error: RuntimeError) -> str:
    """The operation that has no fixed order of its sums, where that is what the error says.

    >>> without_order(RuntimeError("cumsum_cuda_kernel does not have a deterministic ..."))
    'cumsum_cuda_kernel'
    >>> without_order(RuntimeError("out of memory"))
    ''
    """
    found = re.match(r"(\S+) does not have a deterministic", str(error))
    if found is None and "not deterministic because it uses CuBLAS" in str(error):
        return "CuBLAS"
    return found[1] if found else ""


def backend_of(device: torch.device) -> str:
    """What torch.distributed is begun with: small counts of all ranks stay on the CPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
