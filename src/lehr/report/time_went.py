"""Where a stage's time went, and how much of the machine it used: rows for a table."""

from __future__ import annotations

from lehr.report.reading import StageFiles, number
from lehr.report.wording import duration

WORDS = {
    "updates": "computing updates",
    "data": "waiting for data",
    "log": "metrics and log lines",
    "evaluation": "evaluations during training",
    "checkpoint": "checkpoints",
    "rest": "everything around: gates, samples, saving",
}


def time_went(stage: StageFiles) -> list[tuple[str, str, str]]:
    """(what, how long, share) of the stage's seconds; [] where they were not kept."""
    kept = {name: number(value) or 0.0 for name, value in stage.time.items()}
    attempts = kept.get("attempts")
    if not attempts:
        return []
    seconds = {name: kept.get(name, 0.0) for name in ("data", "log", "evaluation", "checkpoint")}
    seconds = {"updates": max(0.0, attempts - seconds["data"]), **seconds}
    everything = max(number(stage.entry.get("seconds")) or 0.0, sum(seconds.values()))
    seconds["rest"] = everything - sum(seconds.values())
    return [
        (WORDS[name], duration(value), f"{value / everything:.0%}")
        for name, value in sorted(seconds.items(), key=lambda one: -one[1])
        if value >= 0.005 * everything
    ]


def limit_words(stage: StageFiles) -> str:
    """How much of the measured rate of products the updates used; "" where it is not known."""
    limit = number(stage.planned.get("limit_tokens_per_second"))
    attempts = number(stage.time.get("attempts"))
    tokens = sum(number(row.get("tokens")) or 0.0 for row in stage.metrics)
    if not limit or not attempts or not tokens:
        return ""
    return (
        f"While it trained, {tokens / attempts / limit:.0%} of this machine's limit was used: of "
        "the matrix products that it can do, as measured, those that the model needs."
    )
