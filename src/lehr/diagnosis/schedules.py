"""What is wrong with a schedule, seen from its numbers before the run.

A schedule is a list of learning rates, one an update, as plan.json holds it. Half of the
complaints about schedules are that they do something else than was thought.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TAIL_SHARE = 0.05  # of the run at (almost) no learning rate is worth a word
NEARLY_ZERO = 1e-3  # of the peak
JUMP = 2.0  # a rate that rises by this factor after the warm-up


def schedule_findings(
    curve: Sequence[float],
    peak: float | None = None,
    warmup_updates: float | None = None,
    rate_after: float | None = None,
) -> list[str]:
    """Sentences about what is odd in a curve of learning rates; empty where nothing is.

    peak           the recipe's learning_rate, where known
    warmup_updates updates of warm-up, where known
    rate_after     the rate that the update after the last one would have, where known

    >>> schedule_findings([0.5, 1.0, 0.75, 0.5, 0.25], peak=1.0)
    []
    >>> schedule_findings([0.1, 0.2, 0.3], peak=1.0)[0]
    'the peak 1 is never reached: the highest rate is 0.3 at update 3 of 3'
    """
    updates = len(curve)
    if updates == 0:
        return ["the schedule has no updates"]
    bad = [index for index, rate in enumerate(curve) if not math.isfinite(rate) or rate < 0]
    if bad:
        return [f"the rate of update {bad[0] + 1} is {curve[bad[0]]}: not a rate"]
    highest = max(curve)
    if highest == 0:
        return ["every rate is 0: nothing would be learnt"]
    at_highest = curve.index(highest)
    findings = []
    if peak is not None and highest < peak * (1 - 1e-6):
        findings.append(
            f"the peak {peak:g} is never reached: the highest rate is {highest:g} "
            f"at update {at_highest + 1} of {updates}"
        )
    if peak is not None and highest > peak * (1 + 1e-6):
        findings.append(f"the rate rises to {highest:g}, above the peak {peak:g}")
    if warmup_updates is not None and warmup_updates > updates:
        findings.append(
            f"the warm-up ({warmup_updates:g} updates) is longer than the run ({updates} updates)"
        )
    elif updates >= 4 and at_highest == updates - 1 and curve[0] < highest:
        findings.append("the rate rises to the last update: the whole run is warm-up")
    tail = _tail(curve, highest)
    if tail > max(1, TAIL_SHARE * updates):
        findings.append(
            f"the last {tail} of {updates} updates have (almost) no rate: they cost time "
            "and teach nothing"
        )
    elif rate_after is not None and rate_after <= NEARLY_ZERO * highest:
        findings.append(
            "the rate ends at (almost) 0: good for a last run; nothing can go on from its end "
            "without warming up again (final above 0, or infinite, leaves a rate to go on with)"
        )
    jump = _jump(curve, at_highest)
    if jump is not None:
        findings.append(
            f"the rate jumps from {curve[jump - 1]:g} to {curve[jump]:g} at update {jump + 1}"
        )
    return findings


def _tail(curve: Sequence[float], highest: float) -> int:
    length = 0
    for rate in reversed(curve):
        if rate > NEARLY_ZERO * highest:
            break
        length += 1
    return length


def _jump(curve: Sequence[float], at_highest: int) -> int | None:
    """The first update after the peak whose rate is more than twice the one before."""
    for index in range(at_highest + 1, len(curve)):
        if curve[index] > JUMP * curve[index - 1]:
            return index
    return None
