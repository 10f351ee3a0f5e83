"""`lehr doctor RUN --spike N`: the verdict with its evidence."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lehr.cli.saying import WIDTH
from lehr.cli.verbs import say_json, terminal
from lehr.diagnosis.spike import MEANING, REMEDY, Bits, Record, Replay, Spike
from lehr.report.folding import fold


def spike_verb(run: Path, update: int, stage: str, from_start: bool, *, as_json: bool) -> int:
    """Replay a batch and print what it shows; 0 whatever was found."""
    from lehr.pipeline.spikes import explain_spike

    with terminal(as_json) as drawn:
        found = explain_spike(run, update, stage=stage, from_start=from_start, listeners=[drawn])
    if as_json:
        say_json(found.as_json())
        return 0
    print_spike(Console(highlight=False, width=WIDTH), found)
    return 0


def print_spike(console: Console, found: Spike) -> None:
    """Verdict first, then what it rests on."""
    title = f"\nupdate {found.update} of {found.stage}: {found.verdict}"
    console.print(Text(title, style="bold yellow"))
    for line in [f"{MEANING[found.verdict]}.", *evidence(found)]:
        for part in fold(line, WIDTH - 4).splitlines():
            console.print(Text(f"  {part}"))
    for line in table(found.replays):
        console.print(Text(f"  {line}"))
    if found.rows:
        console.print(Text(f"  rows of the batch, with the weights of {found.rows_with}:"))
        for row in found.rows:
            others = "" if math.isnan(row.others) else f", the others' middle {row.others:.3f}"
            console.print(Text(f"    {shown(row.origin)}"), soft_wrap=True)
            console.print(Text(f"      loss {row.loss:.3f}{others}"))
    for part in fold(f"what to do: {REMEDY[found.verdict]}", WIDTH - 4).splitlines():
        console.print(Text(f"  {part}"))


def evidence(found: Spike) -> list[str]:
    """Sentences about the record and the bits."""
    return [_record(found.record), *_bits(found.bits), *found.notes]


def _record(record: Record) -> str:
    if not record.signal:
        return f"metrics.jsonl: loss {_number(record.loss)}, nothing unusual in its line."
    if record.signal == "not finite":
        said = "metrics.jsonl: not finite"
    else:
        said = (
            f"metrics.jsonl: {record.signal} {record.value:.4g} "
            f"(usual {record.usual:.4g}, limit {record.limit:.4g})"
        )
    said += "; the update was skipped." if record.skipped else "; the update was applied."
    if record.long_step:
        said += f" Update {record.long_step} before it moved the weights unusually far."
    return said


def _bits(bits: Bits) -> list[str]:
    if bits.environment:
        return [
            "Bits cannot be compared, this is not the machine state of the run: "
            + "; ".join(bits.environment[:3])
        ]
    begin = f"from update {bits.since}" if bits.since else "from the stage's beginning"
    if not bits.departure:
        said = [f"Computed again {begin}: every line comes out bit for bit."]
    else:
        same = (
            "A second replay gave the bits of the first, so the run itself was disturbed there."
            if bits.repeats
            else "A second replay gave yet other bits: this machine does not repeat itself."
        )
        said = [f"Computed again {begin}: update {bits.departure} comes out differently. {same}"]
    if bits.changed:
        names = ", ".join(bits.changed[:2])
        said.append(
            f"The state of update {bits.since} is not what training from an older one gives: "
            f"{len(bits.changed)} tensor(s) differ ({names})."
        )
    elif bits.changed is not None:
        said.append(
            f"The state of update {bits.since} is what training from an older one gives: "
            "nothing changed it from outside."
        )
    return said


def table(replays: Sequence[Replay]) -> list[str]:
    """The batch beside its neighbours, a line a state."""
    width = max((len(one.state) for one in replays), default=0)
    width = max(width, 29)
    lines = [f"{'the batch with the weights of':<{width}}  batch  usual  limit"]
    for one in replays:
        pairs = [("loss", one.losses)] + ([("norm", one.norms)] if one.norms else [])
        for name, values in pairs:
            numbers = " ".join(map(_cell, (values.batch, values.usual, values.limit)))
            sign = "UNUSUAL" if values.unusual else ""
            label = one.state if name == "loss" else "  its gradient's norm"
            lines.append(f"{label:<{width}} {numbers}  {sign}".rstrip())
    if any(math.isnan(one.losses.usual) for one in replays):
        lines.append("too few other batches are near it: what is usual is not known")
    return lines


def _cell(value: float) -> str:
    return f"{'-' if math.isnan(value) else format(value, '.3g'):>6}"


def shown(origin: str) -> str:
    """file:line from where the person stands, where that is shorter."""
    near = os.path.relpath(origin)
    return near if len(near) < len(origin) else origin


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
