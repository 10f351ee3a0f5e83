"""`lehr doctor RECIPE --speed`: where an update's time goes, drawn for a person."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lehr.cli.saying import WIDTH, wrapped
from lehr.cli.verbs import say_json, terminal
from lehr.diagnosis.speed import TITLES, Speed

BAR = 24


def speed_verb(
    path: Path, overrides: Sequence[str], out: Path | None, trace: Path | None, *, as_json: bool
) -> int:
    """Measure and print; 0 whatever was found."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to the terminal
    from lehr.pipeline.speeding import speed_of_file

    with terminal(as_json) as drawn:
        found = speed_of_file(path, overrides, out, [drawn], trace)
    if as_json:
        say_json({"stages": {name: one.as_json() for name, one in found.items()}})
        return 0
    console = Console(highlight=False)
    for name, one in found.items():
        print_speed(console, name, one)
    if trace is not None:
        console.print(f"\ntrace of the last stage: {trace} (open it in ui.perfetto.dev)")
    return 0


def print_speed(console: Console, name: str, found: Speed) -> None:
    """One stage: shares, utilisation, the bottleneck, its proof, what to do."""
    rate = found.tokens / max(found.total, 1e-12)
    console.print(f"\n[bold]{name}[/] {1e3 * found.total:,.1f} ms an update, {rate:,.0f} tokens/s")
    width = min(console.width, WIDTH)
    console.print(shares_picture(found.shares, width), soft_wrap=True)
    console.print(Text(wrapped(utilisation_words(found), width, "  ", "  ")), soft_wrap=True)
    console.print()
    title = TITLES[found.bottleneck]
    share = found.shares[found.bottleneck]
    console.print(Text.assemble(("bottleneck: ", "bold"), (f"{title} ({share:.0%})", "yellow")))
    if found.trial is not None:
        console.print(Text(wrapped(trial_words(found), width)), soft_wrap=True)
    for note in found.notes:
        console.print(Text(wrapped(note, width), style="dim"), soft_wrap=True)
    gain = "" if found.gain <= 1.005 else f"{found.gain:.2f} times as fast: "
    fix = Text(wrapped(gain + found.fix, width, "  fix: ", " " * 7))
    fix.stylize("bold", 2, 6)
    console.print(fix, soft_wrap=True)


def shares_picture(shares: Mapping[str, float], width: int = WIDTH) -> Text:
    """A bar for every class that takes half a percent or more; the largest first."""
    beside = BAR + 8  # where the words begin
    text = Text()
    for name, share in sorted(shares.items(), key=lambda one: -one[1]):
        if share >= 0.005:
            text.append(f"  {share:4.0%} ")
            text.append("━" * round(BAR * share), style="cyan")
            text.append(" " * (BAR - round(BAR * share) + 1))
            words = textwrap.wrap(TITLES[name], max(width - beside, 16))
            text.append(("\n" + " " * beside).join(words) + "\n")
    text.rstrip()
    return text


def utilisation_words(found: Speed) -> str:
    """What a monitor shows beside what was used of the machine's measured limits."""
    words = (
        f"The processor was busy {min(1.0, found.busy):.0%} of the time; of the matrix products "
        f"that it can do ({found.limits.get('gflops', 0.0):,.0f} GFLOP/s measured) the model "
        f"needed {found.mfu:.0%} (MFU)"
    )
    if abs(found.hfu - found.mfu) >= 0.005:
        words += f", {found.hfu:.0%} were done (HFU)"
    if found.bandwidth is not None and found.shares["memory"] >= 0.005:
        words += (
            f"; work on memory ran at {found.bandwidth:.0%} of the speed of a copy "
            f"({found.limits.get('gbytes', 0.0):,.0f} GB/s)"
        )
    return words + "."


def trial_words(found: Speed) -> str:
    """The counterfactual run in a sentence."""
    trial = found.trial
    assert trial is not None
    if trial.predicted == trial.measured:
        return f"without: {1e3 * trial.measured:,.1f} ms an update, as timed without them"
    verdict = "confirmed" if trial.agrees else "NOT confirmed: measure again on a quiet machine"
    return (
        f"{trial.change}: predicted {1e3 * trial.predicted:,.1f} ms an update, measured "
        f"{1e3 * trial.measured:,.1f} ({verdict})"
    )
