"""The guard of a stage: from the recipe to the engine, and from its events to people."""

from __future__ import annotations

from typing import Any

from lehr.pipeline.events import Events
from lehr.training import events as engine
from lehr.training.clipping import AdaptiveClipSettings
from lehr.training.guard import GuardSettings
from lehr.training.quarantine import Quarantined, read_record
from lehr.training.restarts import RestartSettings

LISTED_ROWS = 50  # more stand in quarantine.jsonl only


def guard_of(stage: Any) -> GuardSettings | None:
    """The guard that the recipe asks for; None for `guard: off`."""
    guard = stage.guard
    if guard.policy == "off":
        return None
    return GuardSettings(
        guard.policy, guard.limit, guard.window, guard.rewinds, guard.attention_queries
    )


def adaptive_clip_of(stage: Any) -> AdaptiveClipSettings | None:
    """The clipping that follows the run, if the recipe asks for it."""
    adaptive_clip = stage.adaptive_clip
    if adaptive_clip is None:
        return None
    return AdaptiveClipSettings(
        adaptive_clip.kind, adaptive_clip.limit, adaptive_clip.decay, adaptive_clip.warmup
    )


def restart_of(stage: Any) -> RestartSettings | None:
    """The optimizer's restarts within the stage, if the recipe asks for them."""
    restart = stage.restart
    if restart is None:
        return None
    return RestartSettings(
        restart.every, restart.after_rewind, restart.moments, restart.warmup, restart.initial
    )


def quarantine_of(recipe: Any, stage: Any) -> tuple[Quarantined, ...]:
    """The batches that the recipe leaves out. Raises RecipeError for a file that is no record."""
    path = stage.guard.quarantine
    return () if path is None else tuple(read_record(recipe.path_of(path)))


def tell(events: Events, event: engine.Event) -> bool:
    """Tell people about an event of the guard; False where it is none."""
    if isinstance(event, engine.UpdateUnusual):
        text = (
            f"update {event.update + 1} skipped, no weight changed: {event.why} "
            f"(rows: {_some(event.origins)})"
        )
        rows = list(event.origins[:LISTED_ROWS])
        events.emit("guard_skipped", text, attempt=event.attempt, why=event.why, origins=rows)
    elif isinstance(event, engine.StepUnusual):
        text = f"update {event.update} moved the weights unusually far: {event.why}"
        events.emit("guard_step", text, attempt=event.attempt, why=event.why)
    elif isinstance(event, engine.WentBack):
        named = ", ".join(map(str, event.attempts))
        left_out = f"Batches {named} are" if len(event.attempts) > 1 else f"Batch {named} is"
        text = (
            f"went back from update {event.undone} to {event.reached} (time {event.number}): "
            f"not {event.why}. {left_out} in quarantine (rows: {_some(event.origins)})"
        )
        rows = list(event.origins[:LISTED_ROWS])
        events.emit(
            "guard_went_back", text, undone=event.undone, reached=event.reached,
            number=event.number, attempts=list(event.attempts), why=event.why, origins=rows,
        )  # fmt: skip
    elif isinstance(event, engine.BatchPassedOver):
        text = f"batch {event.attempt} is in quarantine: passed over ({_some(event.origins)})"
        events.emit("guard_passed_over", text, attempt=event.attempt, why=event.why)
    else:
        return False
    return True


def _some(origins: tuple[str, ...]) -> str:
    return ", ".join(origins[:3]) + (", ..." if len(origins) > 3 else "")
