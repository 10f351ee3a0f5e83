"""Sums over the micro-batches and ranks of an update; metrics.jsonl, strict and cut-able."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lehr import ranks
from lehr.objectives.base import Number
from lehr.training.resources import disk_errors

UNDONE = "undone.jsonl"


class MetricSums:
    """Collects (sum, count) pairs without waiting for the device; reads them once.

    >>> sums = MetricSums()
    >>> sums.add({"loss": (4.0, 1.0)})
    >>> sums.add({"loss": (9.0, 9.0)})
    >>> sums.means()
    {'loss': 1.3}
    """

    def __init__(self) -> None:
        self._parts: list[tuple[str, Number, Number]] = []

    def add(self, metrics: Mapping[str, tuple[Number, Number]]) -> None:
        """Take one micro-batch's metrics."""
        self._parts += [(name, total, count) for name, (total, count) in metrics.items()]

    def means(self) -> dict[str, float]:
        """Σ sum ÷ Σ count per name, over all ranks; a name whose count is 0 is left out."""
        numbers = read([value for _, *pair in self._parts for value in pair])
        sums: dict[str, list[float]] = {}
        for index, (name, _, _) in enumerate(self._parts):
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += numbers[2 * index]
            entry[1] += numbers[2 * index + 1]
        merged: dict[str, list[float]] = {}
        for part in gather(sums):
            for name, (total, count) in part.items():
                entry = merged.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
        return {name: total / count for name, (total, count) in merged.items() if count != 0}


def read(values: Sequence[Number]) -> list[float]:
    """Scalars as floats: all tensors in one transfer."""
    tensors = [value.detach() for value in values if isinstance(value, Tensor)]
    if not tensors:
        return [float(value) for value in values]
    device = tensors[0].device
    wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    numbers = iter(torch.stack([tensor.to(device, wide) for tensor in tensors]).tolist())
    return [next(numbers) if isinstance(value, Tensor) else float(value) for value in values]


def gather(value: Any) -> list[Any]:
    """`value` (JSON) of every rank, in the order of ranks; no pickle is read."""
    if ranks.world_size() == 1:
        return [value]
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world_size())]
    dist.all_gather(sizes, torch.tensor([text.numel()]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: text.numel()] = text
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, padded)
    return [
        json.loads(bytes(text[: int(size)].tolist()))
        for text, size in zip(texts, sizes, strict=True)
    ]


def strict(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with every non-finite number as null and its name in `nonfinite`.

    >>> strict({"loss": float("nan"), "update": 3})
    {'loss': None, 'update': 3, 'nonfinite': ['loss']}
    """
    clean: dict[str, Any] = {}
    nonfinite = list(row.get("nonfinite", ()))
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            clean[name] = None
            if name not in nonfinite:
                nonfinite.append(name)
        else:
            clean[name] = value
    if nonfinite:
        clean["nonfinite"] = nonfinite
    return clean


class MetricsFile:
    """metrics.jsonl: one strict JSON line per attempt, in order, visible at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def cut(self, attempt: int) -> tuple[int, int]:
        """Keep the lines up to `attempt`; returns (lines kept, lines cut).

        The kept lines are the longest whole beginning with rising attempts. What follows
        is cut, a torn last line too; the kept lines are not rewritten.
        """
        self.close()
        if not self.path.exists():
            return 0, 0
        kept, end, last = 0, 0, 0
        content = self.path.read_bytes()
        lines = [line for line in re.split(rb"(?<=\n)", content) if line]
        for line in lines:
            number = _attempt_of(line) if line.endswith(b"\n") else None
            if number is None or not last < number <= attempt:
                break
            kept, end, last = kept + 1, end + len(line), number
        if end < len(content):
            with self.path.open("r+b") as stream:
                stream.truncate(end)
                os.fsync(stream.fileno())
        return kept, len(lines) - kept

    def keep_aside(self, attempt: int, rewind: int) -> None:
        """Copy the lines past `attempt`, which a run that goes back will cut, to undone.jsonl."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        rows = [json.loads(line) for line in lines if (_attempt_of(line) or 0) > attempt]
        with disk_errors(self.path), self.path.with_name(UNDONE).open("a") as stream:
            for row in rows:
                stream.write(json.dumps({"rewind": rewind} | row) + "\n")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line. Raises OutOfResources where the disk is full."""
        line = json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
        data = line.encode("utf-8", "replace")
        with disk_errors(self.path):
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                self._descriptor = os.open(self.path, flags, 0o644)
            while data:
                data = data[os.write(self._descriptor, data) :]

    def sync(self) -> None:
        """Lines reach the disk before the checkpoint that counts on them."""
        if self._descriptor is not None:
            with disk_errors(self.path):
                os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _attempt_of(line: bytes) -> int | None:
    try:
        attempt = json.loads(line)["attempt"]
    except (ValueError, KeyError, TypeError):
        return None
    return attempt if isinstance(attempt, int) else None
