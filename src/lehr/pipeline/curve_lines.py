"""Lines of metrics.jsonl that are no part of a curve: what was passed over on purpose.

A batch in quarantine, an update that the guard skipped, one whose gradients only the loss scale
made infinite: no weight moved and each has been told in its own words. A doctor that read them
as losses that are not finite would blame the learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lehr.diagnosis.doctor_curve import Curve
from lehr.diagnosis.doctor_readers import curve_of_bytes, read_curve

_SKIPPED = b'"skipped": true'  # as `MetricsFile` writes it


def of_the_curve(row: Mapping[str, Any]) -> bool:
    """Whether a line shows how training goes: an applied update, or a loss that is not finite.

    >>> of_the_curve({"skipped": True, "origins": ["a:1"], "loss": None})
    True
    >>> of_the_curve({"skipped": True, "loss": None})  # the loss scale was too large
    False
    """
    if not row.get("skipped"):
        return True
    return bool(row.get("origins")) and not row.get("quarantined") and "guard.signal" not in row


def read_own_curve(path: Path, loss: str | None = None) -> Curve:
    """The curve in a stage's metrics.jsonl. Raises RecipeError for what is none."""
    try:
        content = path.read_bytes()
    except OSError:
        content = b""  # what follows says why
    if _SKIPPED not in content:
        return read_curve(path, loss)
    kept = [line for line in content.split(b"\n") if _SKIPPED not in line or _kept(line)]
    return curve_of_bytes(b"\n".join(kept), loss=loss, where=str(path))


def _kept(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except ValueError:  # torn by a kill: the reader says what it makes of it
        return True
    return not isinstance(row, dict) or of_the_curve(row)
