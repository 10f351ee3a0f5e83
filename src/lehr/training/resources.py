"""Disk and memory: what is there, what was needed, said before it is too late."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from lehr.errors import OutOfResources, Problem

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CGROUP = Path("/sys/fs/cgroup")


def free_disk(folder: Path) -> int:
    """Free bytes where `folder` is, or will be made."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_disk(folder: Path, needed_bytes: int, what: str = "files") -> None:
    """Raise OutOfResources where fewer than `needed_bytes` are free at `folder`."""
    available = free_disk(folder)
    if available < needed_bytes:
        expected = f"{_size(needed_bytes)} for {what}, {_size(available)} free"
        raise OutOfResources(Problem(f"disk at {folder}", expected))


def available_memory() -> int:
    """Bytes that can still be allocated: the machine's, or the control group's if lower."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text().strip()
        if limit != "max":
            available = min(available, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass  # no control group, or none that this process may read
    return available


def require_memory(needed_bytes: int, what: str = "training") -> None:
    """Raise OutOfResources where fewer than `needed_bytes` can be allocated."""
    available = available_memory()
    if available < needed_bytes:
        expected = f"{_size(needed_bytes)} for {what}, {_size(available)} available"
        raise OutOfResources(Problem("memory", expected))


_highest_gib = 0.0  # of the time before the last mark


def peak_memory_gib() -> float:
    """High-water mark of this process's resident memory since `reset_peak_memory`, in GiB."""
    return max(_highest_gib, _high_water_gib())


def peak_since_mark() -> int:
    """High-water mark of resident memory since `mark_peak_memory`, in bytes."""
    return int(_high_water_gib() * 2**30)


def mark_peak_memory() -> bool:
    """Begin a mark for `peak_since_mark`; `peak_memory_gib` goes on. False where it cannot be."""
    global _highest_gib
    before = peak_memory_gib()
    if not _clear_high_water():
        return False
    _highest_gib = before
    return True


def _high_water_gib() -> float:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    except OSError:
        pass
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / 2**30
    import resource  # absent on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def reset_peak_memory() -> bool:
    """Start the high-water mark anew (loading often peaks above training).

    False where the system cannot; the peak then still includes what came before.
    """
    global _highest_gib
    if not _clear_high_water():
        return False
    _highest_gib = 0.0
    return True


def _clear_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn a card's "out of memory" inside the block into OutOfResources."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).strip().splitlines()[0]
        expected = (
            f"more memory than the card had ({first}); lower max_length or pack_length, turn "
            "recompute on, set memory_limit lower, or say device: cpu"
        )
        raise OutOfResources(Problem("memory of the card", expected)) from error


@contextmanager
def disk_errors(where: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn "no space left" inside the block into OutOfResources; other errors pass."""
    try:
        yield
    except Exception as error:
        # safetensors wraps the system's error in its own, and keeps only the text
        full = getattr(error, "errno", None) in _NO_SPACE or any(
            f"os error {code}" in str(error) for code in _NO_SPACE
        )
        if not full:
            raise
        needed = "" if needed_bytes is None else f"{_size(needed_bytes)} needed, "
        expected = f"room on the disk: {needed}{_size(free_disk(where))} free"
        raise OutOfResources(Problem(str(where), expected)) from error


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
