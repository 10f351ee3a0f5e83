"""From the engine's events to the run's: what a person and events.jsonl are told."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lehr.pipeline.events import Events
from lehr.pipeline.files import write_text
from lehr.pipeline.guarding import tell
from lehr.training import events as engine
from lehr.training.float8_convert import LayerFellBack

LISTED_LAYERS = 60  # more stand in events.jsonl and plan.json only
DISPLACEMENT_UPDATES = 10  # the last ones of a stage: one update is noise


def watch(events: Events) -> Callable[[Any], None]:
    """An observer of the engine that speaks through `events`."""
    better: deque[float] = deque(maxlen=DISPLACEMENT_UPDATES)
    updates = 0

    def observe(event: Any) -> None:
        nonlocal updates
        if tell(events, event):
            return
        if isinstance(event, engine.RunStarted):
            updates = event.updates
        elif isinstance(event, engine.UpdateDone):
            events.emit("update", "", durable=False, **event.row, spans=dict(event.spans))
            better.append(event.row.get("objective.chosen_logratio") or 0.0)
            if event.row["update"] == updates and sum(better) < 0:
                _displaced(events, sum(better) / len(better))
        elif isinstance(event, engine.ResumedFrom):
            text = f"resumed at update {event.update}"
            events.emit("resumed", text, update=event.update)
        elif isinstance(event, engine.ResumeInexact):
            events.emit("resume_inexact", str(event), reasons=list(event.reasons))
        elif isinstance(event, engine.OrderUnknown):
            text = (
                f"{event.operation} adds in no fixed order on this card: a resumed run may differ "
                "in last bits from one that was not interrupted"
            )
            events.emit("order_unknown", text, operation=event.operation)
        elif isinstance(event, engine.CheckpointSkipped):
            text = f"checkpoint {event.path.name} is not used: {event.reason}"
            events.emit("checkpoint_skipped", text, path=event.path.name, reason=event.reason)
        elif isinstance(event, engine.NonFinite):
            text = (
                f"update {event.update + 1} skipped, no weight changed: not finite: "
                f"{engine.not_finite(event.names)} (rows: {', '.join(event.origins[:3])})"
            )
            events.emit(
                "nonfinite", text, names=list(event.names), origins=list(event.origins[:50])
            )
        elif isinstance(event, engine.ScaleLowered):
            text = (
                f"update {event.update + 1} skipped, no weight changed: the gradient of "
                f"{event.names[0]} overflowed at loss scale {event.used:g}, now {event.next:g}"
            )
            events.emit("loss_scale", text, names=list(event.names), scale=event.next)
        elif isinstance(event, engine.Float8Converted):
            _converted(events, event)
        elif isinstance(event, LayerFellBack):
            events.emit("fp8_fallback", str(event), **asdict(event))
        elif isinstance(event, engine.StoppedEarly):
            text = (
                f"stopped at update {event.update}: {event.evaluations_without_improvement} "
                "evaluations without improvement"
            )
            events.emit("stopped_early", text, update=event.update)
        elif isinstance(event, engine.PromotedBest):
            text = f"the weights of update {event.update} were the best ({event.value:.4f})"
            events.emit("best", text, update=event.update, value=event.value)
        elif isinstance(event, engine.PromotedAverage):
            text = f"the weights are the average of {event.count} updates (decay {event.decay:g})"
            events.emit("average", text, count=event.count, decay=event.decay)
        elif isinstance(event, engine.MissingGradient):
            named = ", ".join(event.names[:3]) + (", ..." if len(event.names) > 3 else "")
            text = (
                f"{len(event.names)} of {event.of} trained tensors got no gradient from the first "
                f"backward pass and do not train: {named}"
            )
            events.emit("missing_gradient", text, names=list(event.names))
        elif isinstance(event, engine.GradientFlowMeasured):
            text = f"gradient flow after update {event.update}: {event.verdict}"
            layers = [asdict(layer) for layer in event.layers]
            events.emit("gradient_flow", text, verdict=event.verdict.kind, layers=layers)
        elif isinstance(event, engine.NoiseScaleMeasured):
            events.emit("noise_scale", event.advice, **asdict(event.scale))
        elif isinstance(event, engine.BatchNormAlarm):
            text = f"batch norms {', '.join(event.names[:3])}: {event.why}"
            events.emit("batch_norm", text, names=list(event.names), why=event.why)
        elif isinstance(event, engine.InterruptNoted):
            events.emit("interrupt", f"{event.signal}: writing a checkpoint, then leaving")

    return observe


def _converted(events: Events, event: engine.Float8Converted) -> None:
    reasons = Counter(line.partition(": ")[2] for line in event.choices if ": " in line)
    kept = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    text = (
        f"FP8 ({event.backend}) in {len(event.layers)} of {len(event.choices)} linear layers"
        f"{f'; in high precision: {kept}' if kept else ''}; evaluations and what is saved have "
        "no FP8"
    )
    listed = event.choices if len(event.choices) <= LISTED_LAYERS else ()
    events.emit("fp8", "\n".join([text, *listed]), layers=list(event.choices))


def _displaced(events: Events, logratio: float) -> None:
    """Preference: the margin can grow while the better answers become less likely."""
    text = (
        f"displacement: the better answers are less likely than at the start (log-ratio "
        f"{logratio:.2f}); the margin comes from pushing the worse ones down further"
    )
    events.emit("displacement", text, chosen_logratio=logratio)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines, whole or absent."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
