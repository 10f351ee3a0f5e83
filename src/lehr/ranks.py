"""Ranks: every count and verdict that all processes must agree on goes through here.

Alone (no process group) each function is the identity, so the engine is written
once for one process and for many.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def _active() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Index of this process."""
    return dist.get_rank() if _active() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if _active() else 1


def is_main() -> bool:
    """True in the process that writes files and prints."""
    return rank() == 0


def all_sum(value: float) -> float:
    """Sum of `value` over all ranks, in float64."""
    if not _active():
        return float(value)
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total.item())


def add_up(value: torch.Tensor) -> torch.Tensor:
    """Element-wise sum of `value` over all ranks."""
    if not _active():
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def all_true(verdict: bool) -> bool:
    """True where every rank says so: one refusal counts for all."""
    return all_sum(0.0 if verdict else 1.0) == 0.0


def barrier() -> None:
    """Wait for all ranks."""
    if _active():
        dist.barrier()
