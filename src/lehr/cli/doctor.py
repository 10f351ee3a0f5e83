"""`lehr doctor`: findings for a person or a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

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
        console.print(Text(f"  {note}", style="dim"))
    for finding in found.findings:
        _print_finding(console, finding)
    if found.healthy and found.points >= ENOUGH_POINTS:
        console.print(f"[green]nothing suspicious[/] in {found.points:,} points of the loss")


def _print_finding(console: Console, finding: Finding) -> None:
    title = (finding.title, "bold yellow")
    console.print(Text.assemble("\n", title, f" ({finding.name}, {finding.confidence:.0%} sure)"))
    console.print(Text(f"  {finding.where}: {finding.seen}"))
    for number, cause in enumerate(finding.causes, 1):
        console.print(Text(f"  {number}. {cause}", style="dim"))
    if finding.also_possible:
        other = ", ".join(finding.also_possible)
        console.print(Text(f"  the curve alone cannot exclude: {other}"))
    console.print(Text.assemble(("  test: ", "bold"), finding.decisive_test))
    console.print(Text.assemble(("  fix:  ", "bold"), finding.fix["do"]))
    if finding.fix["patch"]:
        patch = json.dumps(finding.fix["patch"], ensure_ascii=False)
        console.print(Text(f"        in the stage: {patch}"))
