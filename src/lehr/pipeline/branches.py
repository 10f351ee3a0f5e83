"""Decisive tests that need the engine: a resume, another precision, branches of a run."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import equal

from lehr.diagnosis.decisive import (
    CANNOT_TELL,
    CONFIRMS,
    WITHDRAWS,
    Answer,
    Desk,
    backward,
)
from lehr.diagnosis.decisive_tests import level
from lehr.diagnosis.doctor import Finding
from lehr.diagnosis.left_alone import left_alone
from lehr.errors import Diverged
from lehr.objectives.base import Objective
from lehr.pipeline.replaying import Again, Source, again, engine_aside
from lehr.pipeline.run_stages import entries_of, older_checkpoints
from lehr.pipeline.stage_run import rows_of
from lehr.stages.context import StageContext
from lehr.training import checkpoint, events, gradients

LENGTH, LAST = 50, 10  # updates of a branch, and those at its end that are judged
BETTER_ABSOLUTE, BETTER_RELATIVE = 0.05, 0.02  # nats: by so much a branch must lie below
APART = 0.05  # of the loss: what rounding may do to one batch


class _EnoughError(Exception):
    """The updates that were asked for are done."""


def resume(context: StageContext, objective: Objective, aside: Path) -> Answer:
    """Three updates in one go, and one, a pause, two more: the same bits."""
    base = Answer(
        "resume", "a resume does not restore weights, moments, rate, random numbers or data",
        "two updates in one go, and with a save and a load between them",
        "the same weights and moments, bit for bit", "", CANNOT_TELL,
    )  # fmt: skip
    if context.settings.updates < 3:
        return replace(base, seen="the stage has fewer than three updates")
    begin = context.batches.state()
    kept = context.model.state()
    with tempfile.TemporaryDirectory(dir=aside) as name:
        straight, paused = Path(name, "straight"), Path(name, "paused")
        _train(context, objective, straight, 3)
        source = checkpoint.folder_of(straight / "checkpoints", 1)
        if not source.is_dir():
            return replace(base, seen="the first updates were skipped: no checkpoint was written")
        context.model.load_state(kept)
        context.batches.load(begin)
        target = checkpoint.folder_of(paused / "checkpoints", 1)
        shutil.copytree(source, target)
        shutil.copy2(straight / "metrics.jsonl", paused / "metrics.jsonl")
        _train(context, objective, paused, 3)
        different = _different(*(one / "checkpoints" for one in (straight, paused)))
    if different is None:
        return replace(base, seen="the second update was skipped: nothing to compare")
    if different:
        seen = f"{len(different)} tensors differ, first {different[0]}"
        return replace(base, seen=seen, verdict=CONFIRMS)
    return replace(base, seen="every tensor has the same bits", verdict=WITHDRAWS)


def _train(context: StageContext, objective: Objective, folder: Path, attempts: int) -> None:
    """The stage's first attempts, with a checkpoint after each update."""

    def observe(event: Any) -> None:
        if isinstance(event, events.UpdateDone) and event.row["attempt"] >= attempts:
            raise _EnoughError

    def evaluate(_update: int) -> dict[str, float]:
        return {"loss": 0.0}

    settings = replace(context.settings, checkpoint_every=1, checkpoints_kept=3)
    engine = engine_aside(context, objective, settings, folder, observe, evaluate)
    with suppress(_EnoughError, Diverged):
        engine.run()


def _different(one: Path, other: Path) -> list[str] | None:
    """Tensors of update 2 that differ; None where it was not reached."""
    paths = [checkpoint.folder_of(root, 2) for root in (one, other)]
    if not all(path.is_dir() for path in paths):
        return None
    first, second = (checkpoint.read(path)[1] for path in paths)
    found = []
    for file in sorted(path.stem for path in first.path.glob("*.safetensors")):
        a, b = first.tensors(file), second.tensors(file)
        found += [
            f"{file}: {name.removeprefix('parameter.')}"
            for name in sorted(a.keys() | b.keys())
            if name not in a or name not in b or not equal(a[name], b[name])
        ]
    return found


def fp32(desk: Desk, exact: Desk | None) -> Answer:
    """The first batch in the stage's precision and in fp32."""
    base = Answer(
        "fp32", "the precision loses numbers",
        "loss and gradient of the first batch, also in fp32",
        f"finite, and losses within {APART:.0%}", "", CANNOT_TELL,
    )  # fmt: skip
    if exact is None:
        return replace(base, seen="the stage computes in fp32 already", verdict=WITHDRAWS)
    loss, norm = _of_batch(desk)
    true, true_norm = _of_batch(exact)
    seen = f"{desk.settings.precision} {loss:.4f} (gradient {norm:.3g}), "
    seen += f"fp32 {true:.4f} ({true_norm:.3g})"
    if not math.isfinite(true) or not math.isfinite(true_norm):
        return replace(base, seen=f"{seen}: not finite in fp32 either: data or weights")
    bad = not math.isfinite(loss) or not math.isfinite(norm) or abs(loss - true) > APART * abs(true)
    return replace(base, seen=seen, verdict=CONFIRMS if bad else WITHDRAWS)


def _of_batch(desk: Desk) -> tuple[float, float]:
    with left_alone(desk.model, desk.settings.precision):
        done = backward(desk, desk.updates[0], ("test",))
        norm = gradients.measure(desk.trained).norm
    return done.loss, norm


def branch_of_half(
    context: StageContext, objective: Objective, place: Path, aside: Path, finding: Finding
) -> Answer:
    """From the newest checkpoint before the finding, at half the rate, beside the run's lines."""
    base = Answer(
        "rate_halved", "the learning rate is too high",
        "updates from before the finding at half the rate, beside the run's own",
        "half the rate is no better", "", CANNOT_TELL,
    )  # fmt: skip
    return _branch(base, context, objective, place, aside, finding, rate=0.5)


def branch_in_fp32(
    context: StageContext, objective: Objective, place: Path, aside: Path, finding: Finding
) -> Answer | None:
    """From the newest checkpoint before the finding in fp32; None where the run has none."""
    base = Answer(
        "fp32", "the precision loses numbers",
        "updates from before the finding in fp32, beside the run's own",
        "fp32 is no better", "", CANNOT_TELL,
    )  # fmt: skip
    found = _branch(base, context, objective, place, aside, finding)
    return found if found.seen else None


def _branch(
    base: Answer,
    context: StageContext,
    objective: Objective,
    place: Path,
    aside: Path,
    finding: Finding,
    rate: float = 1.0,
) -> Answer:
    lines = rows_of(place)
    at = max(1, int(finding.first))
    attempt = next((int(one["attempt"]) for one in lines if int(one["update"]) >= at), 1)
    entries = entries_of(place, attempt, False)
    older = older_checkpoints(place, attempt, entries)
    start = older[-1] if older else None
    since = start.update if start else 0
    done = int(start.state["progress"]["attempt"]) if start else 0
    upto = max(min(max(int(finding.last), at), since + LENGTH) + attempt - at, done + 2)
    upto = min(upto, int(lines[-1]["attempt"]))
    if upto - done > 4 * LENGTH:
        seen = f"no checkpoint near update {at} is kept (checkpoint_every, checkpoints_kept)"
        return replace(base, seen=seen)
    source = Source(place, aside, context.batches.state(), lines, entries)
    run = again(context, objective, source, start, upto, rate=rate)
    return compared(base, run, lines, since)


def compared(base: Answer, run: Again, lines: Sequence[dict[str, Any]], since: int) -> Answer:
    """The last updates of a branch beside the run's lines of the same attempts."""
    mine = {int(one["attempt"]): one for one in run.rows[-LAST:]}
    theirs = {int(one["attempt"]): one for one in lines if int(one["attempt"]) in mine}
    if not theirs:
        return base
    branch, own = (
        level([math.inf if one.get("loss") is None else float(one["loss"]) for one in rows])
        for rows in (mine.values(), theirs.values())
    )
    begin = f"from update {since}" if since else "from the beginning"
    seen = f"{begin}, last {len(mine)} updates: {branch:.3f}, the run itself {own:.3f}"
    if not math.isfinite(branch) and not math.isfinite(own):
        return replace(base, seen=seen.replace("inf", "not finite"), verdict=WITHDRAWS)
    allowed = max(BETTER_ABSOLUTE, BETTER_RELATIVE * abs(own)) if math.isfinite(own) else 0.0
    better = branch < own - allowed
    seen = seen.replace("inf", "not finite")
    return replace(base, seen=seen, verdict=CONFIRMS if better else WITHDRAWS)
