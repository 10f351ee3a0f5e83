"""Hashes and random streams: the one place where seeds and content keys are made.

A stream is named by what it is for (seed, stage, update, item), never by when it
is used, so that order, batch size and resume cannot change a random number.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, unicode kept."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def content_hash(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`."""
    text = canonical_json(value)
    # Lone surrogates are legal in JSON escapes, but have no UTF-8 form.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def seed_for(*names: object) -> int:
    """A 63-bit seed for the stream with these names.

    >>> seed_for(0, "dropout", 3) == seed_for(0, "dropout", 3)
    True
    >>> seed_for(0, "dropout", 3) == seed_for(0, "dropout", 4)
    False
    """
    return int(content_hash([str(name) for name in names])[:16], 16) >> 1


def generator_for(*names: object) -> torch.Generator:
    """A CPU generator of the stream with these names."""
    return torch.Generator().manual_seed(seed_for(*names))
