"""Flips: the items that changed side, with both texts. A gate's evidence that can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lehr.evaluation.suites import ItemScore, paired


def flips(
    before: Sequence[ItemScore], after: Sequence[ItemScore], against: str
) -> list[dict[str, Any]]:
    """Rows of flips.jsonl: items of one measure that passed on one side only.

    against names what `before` is: parent or base. Losses come first. Items without a
    verdict on either side (ties, measures without right and wrong) do not flip.
    """
    rows = []
    for one, other in paired(before, after):
        if one.passed is None or other.passed is None or one.passed == other.passed:
            continue
        rows.append(
            {
                "suite": other.suite,
                "measure": other.measure,
                "id": other.id,
                "prompt": other.prompt,
                "reference": other.reference,
                "against": against,
                "before": one.answer,
                "after": other.answer,
                "before_passed": one.passed,
                "after_passed": other.passed,
                "direction": "gained" if other.passed else "lost",
            }
        )
    return sorted(rows, key=lambda row: row["direction"] != "lost")
