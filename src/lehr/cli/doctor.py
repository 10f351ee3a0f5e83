"""`lehr doctor`: findings for a person or a program."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lehr.cli.saying import WIDTH, wrapped
from lehr.cli.verbs import say_json
from lehr.diagnosis.doctor import ENOUGH_POINTS, Diagnosis, Finding


def doctor_verb(path: Path, loss: str | None, known: Mapping[str, Any], *, as_json: bool) -> int:
    """Print what is wrong with a curve; 0 whatever was found."""
    from lehr.diagnosis.doctor import diagnose
    from lehr.diagnosis.doctor_look import Context
    from lehr.diagnosis.doctor_readers import curve_of_bytes
    from lehr.pipeline.examining import examine

    given = {name: value for name, value in known.items() if value is not None}
    context = Context(**given) if given else None
    if str(path) == "-":
        content = sys.stdin.buffer.read()
        found = diagnose(curve_of_bytes(content, loss=loss, where="stdin"), context)
    else:
        found = examine(path, loss, context)
    if as_json:
        say_json(found.as_json())
        return 0
    print_diagnosis(Console(highlight=False), found)
    return 0


def print_diagnosis(console: Console, found: Diagnosis) -> None:
    """Findings, the likeliest root first."""
    for note in found.notes:
        _say(console, "  ", note, style="dim")
    for finding in found.findings:
        _print_finding(console, finding)
    if found.healthy and found.points >= ENOUGH_POINTS:
        console.print(f"[green]nothing suspicious[/] in {found.points:,} points of the loss")
        if found.missing:
            unseen = " and ".join(filter(None, (", ".join(found.missing[:-1]), found.missing[-1])))
            said = f"without {unseen} many faults look healthy: see `lehr explain doctor`"
            _say(console, "  ", said, style="dim")


def _print_finding(console: Console, finding: Finding) -> None:
    sure = f"({finding.name}, {finding.confidence:.0%} sure)"
    console.print()
    _say(console, "", f"{finding.title} {sure}", styled=finding.title, style="bold yellow")
    _say(console, "  ", f"{finding.where}: {finding.seen}")
    for number, cause in enumerate(finding.causes, 1):
        _say(console, f"  {number}. ", cause, style="dim")
    if finding.also_possible:
        other = ", ".join(finding.also_possible)
        _say(console, "  ", f"the curve alone cannot exclude: {other}")
    _say(console, "  test: ", finding.decisive_test, styled="test:", style="bold")
    _say(console, "  fix:  ", finding.fix["do"], styled="fix:", style="bold")
    if finding.fix["patch"]:
        console.print(Text("        as keys of the stage in a recipe of lehr:"))
        for line in patch_lines(finding.fix["patch"]):
            console.print(Text(f"          {line}"))


def _say(console: Console, begin: str, words: str, *, styled: str = "", style: str = "") -> None:
    """A sentence whose further lines begin below its first word; `styled`: only this part."""
    then = " " * (len(begin) or 2)
    said = Text(wrapped(words, min(console.width, WIDTH), begin, then))
    if styled:
        said.highlight_words([styled], style)
    else:
        said.stylize(style)
    console.print(said, soft_wrap=True)


def patch_lines(patch: Mapping[str, Any]) -> list[str]:
    """Keys of a stage as a recipe has them, a line a key, so that they can be pasted.

    >>> patch_lines({"clip": 1.0, "schedule": {"warmup": 0.05}})
    ['clip: 1.0', 'schedule: {warmup: 0.05}']
    """
    import yaml

    lines: list[str] = []
    for key, value in patch.items():
        flow = yaml.safe_dump(
            {key: value}, default_flow_style=True, sort_keys=False, width=math.inf
        )
        lines.append(flow.strip()[1:-1])  # without the braces of {key: value}
    return lines
