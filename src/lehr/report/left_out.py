"""The batches that a stage did not train on: which, why, and of which rows they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lehr.report.reading import items, number, text

LISTED = 50  # rows of a batch; quarantine.jsonl and metrics.jsonl have all


def left_out(
    metrics: Sequence[Mapping[str, Any]], record: Sequence[Mapping[str, Any]], key: str = ""
) -> list[dict[str, Any]]:
    """Batches that were skipped or stand in quarantine, by attempt.

    metrics, record  lines of metrics.jsonl and of quarantine.jsonl
    key              of the stage: the record's lines of another one are left out; "" = none are

    Each: {"attempt", "update", "how", "why", "rows", "origins"}; update is the one that the batch
    would have made. Skipped because of the loss scale is not meant: nothing is wrong with those.
    """
    known = {
        int(attempt): line
        for line in record
        if (attempt := number(line.get("attempt"))) is not None
        and (not key or line.get("key") == key)
    }
    found: dict[int, dict[str, Any]] = {}
    for row in metrics:
        attempt = number(row.get("attempt"))
        if row.get("skipped") is not True or "origins" not in row or attempt is None:
            continue
        line = known.get(int(attempt), {})
        update = (number(row.get("update")) or 0.0) + 1
        found[int(attempt)] = _entry(
            int(attempt), int(update), _how(row), text(line.get("why")) or _why(row), row
        )
    for attempt, line in known.items():
        if attempt not in found:  # named when the run stopped, and not come to again
            update = int((number(line.get("update")) or 0.0) + 1)
            found[attempt] = _entry(attempt, update, "in quarantine", text(line.get("why")), line)
    return [found[attempt] for attempt in sorted(found)]


def _entry(attempt: int, update: int, how: str, why: str, row: Mapping[str, Any]) -> dict[str, Any]:
    origins = [text(one) for one in items(row.get("origins"))]
    return {
        "attempt": attempt,
        "update": update,
        "how": how,
        "why": why,
        "rows": len(origins),
        "origins": origins[:LISTED],
    }


def _how(row: Mapping[str, Any]) -> str:
    return "in quarantine" if row.get("quarantined") is True else "skipped"


def _why(row: Mapping[str, Any]) -> str:
    if row.get("guard.signal"):
        value, usual, limit = (
            number(row.get(f"guard.{name}")) for name in ("value", "usual", "limit")
        )
        if value is not None and usual is not None and limit is not None:
            return f"{text(row['guard.signal'])} {value:.4g} (usual {usual:.4g}, limit {limit:.4g})"
        return f"{text(row['guard.signal'])} unusual"
    if row.get("quarantined") is True:
        return "named in the record that the recipe gives (guard.quarantine)"
    names = ", ".join(text(one) for one in items(row.get("nonfinite"))[:3])
    return f"not finite: {names}" if names else "not finite"
