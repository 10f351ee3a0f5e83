"""`lehr doctor RECIPE|RUN --run-tests`: what each test saw, and what it decides."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from lehr.cli.saying import WIDTH, wrapped
from lehr.cli.verbs import say_json, terminal
from lehr.diagnosis.decisive import CONFIRMS, WITHDRAWS, Answer
from lehr.errors import GateRefused
from lehr.pipeline.deciding import Decided, Report
from lehr.report.folding import fold

SIGNS = {CONFIRMS: ("✗", "bold red"), WITHDRAWS: ("✓", "green")}


def run_tests_verb(target: Path, stage: str, *, as_json: bool) -> int:
    """Run the tests; 3 where one confirms a fault, else 0."""
    from lehr.pipeline.deciding import run_tests

    with terminal(as_json) as drawn:
        report = run_tests(target, stage=stage, listeners=[drawn])
    if as_json:
        say_json(report.as_json())
    else:
        print_report(Console(highlight=False, width=WIDTH), report)
    return GateRefused.exit_status if report.confirmed else 0


def print_report(console: Console, report: Report) -> None:
    """Finding by finding, or stage by stage."""
    for note in report.notes:
        console.print(Text(wrapped(note)), soft_wrap=True)
    for one in report.decided:
        _print_decided(console, one)


def _print_decided(console: Console, one: Decided) -> None:
    if one.finding is None:
        console.print(Text(f"\n{one.stage}: {_summary(one.answers)}", style="bold"))
    else:
        title = f"\n{one.stage}: {one.finding.title} ({one.finding.name}): {one.verdict}"
        for part in fold(title.strip(), WIDTH - 2).splitlines():
            console.print(Text(part, style="bold"))
        if not one.answers:
            said = f"no test that lehr can run by itself; to decide: {one.finding.decisive_test}"
            _indented(console, said)
    for answer in one.answers:
        _print_answer(console, answer)


def _summary(answers: tuple[Answer, ...]) -> str:
    bad = sum(answer.verdict == CONFIRMS for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    said = f"{bad} of {len(answers)} tests confirm a fault" if bad else "no fault found"
    return f"{said} ({len(answers)} tests, {seconds:.0f} s)"


def _print_answer(console: Console, answer: Answer) -> None:
    sign, style = SIGNS.get(answer.verdict, ("?", "yellow"))
    said = f" ({answer.seconds:.1f} s): {answer.verdict}"
    console.print(Text.assemble((f"  {sign} ", style), (answer.name, "bold"), said))
    _indented(console, f"fault: {answer.fault}")
    _indented(console, f"{answer.what}; expected: {answer.expected}")
    _indented(console, f"seen: {answer.seen}")


def _indented(console: Console, line: str) -> None:
    for part in fold(line, WIDTH - 8).splitlines():
        console.print(Text(f"      {part}", style="dim"))
