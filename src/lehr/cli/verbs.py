"""The verbs: call the function, choose the streams, print the result, give the status."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lehr import signals
from lehr.cli.arguments import Device
from lehr.cli.saying import WIDTH, wrapped
from lehr.cli.terminal import (
    Terminal,
    duration,
    end_words,
    mask_text,
    one_line,
)
from lehr.errors import GateRefused, Problem, RecipeError
from lehr.report.wording import gate_sentence

MENTIONED = 0.001  # smaller shares of a stage's memory are in --json


@contextmanager
def terminal(as_json: bool) -> Iterator[Terminal]:
    """A terminal on stdout, or on stderr where stdout belongs to the JSON object."""
    drawn = Terminal(sys.stderr if as_json else sys.stdout)
    try:
        with _terminate_as_interrupt():
            yield drawn
    finally:
        drawn.close()


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """TERM ends a verb like Ctrl-C does: files whole, status 130."""

    def leave(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say_json(value: Any) -> None:
    signals.deaf()
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def run_verb(
    recipe_path: Path,
    overrides: Sequence[str],
    out: Path | None,
    *,
    fresh: bool,
    verify: bool,
    as_json: bool,
) -> int:
    from lehr.recipe.loading import load_recipe

    recipe = load_recipe(recipe_path, overrides)
    if verify:
        return _verify(recipe, out, as_json)
    from lehr.pipeline.run import run

    with terminal(as_json) as drawn:
        ledger = run(recipe, out=out, fresh=fresh, listeners=[drawn])
    if as_json:
        say_json(ledger.data)
    return 0 if ledger.verdict == "promoted" else GateRefused.exit_status


def _verify(recipe: Any, out: Path | None, as_json: bool) -> int:
    from lehr.pipeline.folder import place_of
    from lehr.pipeline.verifying import verify

    _, folder = place_of(recipe, None, out)
    with terminal(as_json) as drawn:
        found = verify(recipe, folder, listeners=[drawn])
    if as_json:
        say_json(found)
    else:
        console = Console(highlight=False)
        for check in found["checks"]:
            sign = "[green]✓[/]" if check["ok"] else "[red]✗[/]"
            console.print(f"  {sign} {check['name']}: {check['found']}")
    return 0 if found["ok"] else GateRefused.exit_status


def demo_verb(out: Path | None, *, fresh: bool, as_json: bool) -> int:
    with resources.as_file(resources.files("lehr.cli") / "demo.yaml") as path:
        target = out if out is not None else Path("runs/demo")
        return run_verb(path, [], target, fresh=fresh, verify=False, as_json=as_json)


def plan_verb(
    paths: Sequence[Path],
    model: str | None,
    overrides: Sequence[str],
    out: Path | None,
    checks: Mapping[str, bool],
    device: Device,
    *,
    as_json: bool,
) -> int:
    is_recipe = len(paths) == 1 and paths[0].suffix in (".yaml", ".yml")
    if not is_recipe and any(checks.values()):
        asked = ", ".join(f"--{name.replace('_', '-')}" for name, on in checks.items() if on)
        raise RecipeError(Problem(f"lehr plan {asked}", "a recipe, which names model and stages"))
    if not is_recipe:
        return _plan_data(paths, model, out, as_json)
    from lehr.pipeline.plan import plan
    from lehr.recipe.loading import load_recipe

    if device.memory_gib is not None:
        overrides = [*overrides, f"memory_limit={device.memory_gib}"]
    recipe = load_recipe(paths[0], overrides)
    with terminal(as_json) as drawn:
        found = plan(
            recipe,
            out=out,
            listeners=[drawn],
            numerics=checks["numerics"],
            gradcheck=checks["gradcheck"],
            find_lr=checks["find_lr"],
            gflops=device.gflops,
        )
    if as_json:
        say_json(found.as_json())
        return 0
    console = Console(highlight=False)
    begins_random = recipe.model.startswith("tiny:")  # then its first stage has nothing to lose
    print_plan(console, found, recipe.gates.protect if begins_random else None)
    if found.numerics is not None:
        from lehr.cli.numerics import print_numerics

        print_numerics(console, found.numerics)
    return 0


def print_plan(console: Console, found: Any, protect: Iterable[str] | None = None) -> None:
    """Gates, memory, findings and where the strategy lies; and which of `protect` no stage is
    held to."""
    from lehr.cli.pictures import range_picture, schedule_picture

    for stage in found.plan["stages"]:
        console.print(f"\n[bold]{stage['folder']}[/] learning rate, {stage['updates']} updates")
        console.print(schedule_picture(stage["curve"]))
        parts = dict(stage["memory"])
        peak = parts.pop("peak", 0) / 2**30
        console.print(
            f"  memory {peak:.2f} GiB, about {duration(stage['seconds'])}, "
            f"micro-batch {stage['micro_batch']} ({stage['micro_batch_why']})"
        )
        for name, amount in sorted(parts.items(), key=lambda part: -part[1]):
            if abs(amount) >= MENTIONED * sum(parts.values()):
                console.print(f"  {name:>12} {amount / 2**30:8.2f} GiB")
    if found.plan["gates"]:
        console.print("\n[bold]gates[/]")
    for gate in found.plan["gates"]:
        sign = "[green]can pass[/]" if gate["can_pass"] else "[red]cannot pass[/]"
        note = f"; {gate['note']}" if gate["note"] else ""
        console.print(f"  {gate['kind']} {gate['name']}: {sign}{note}")
    if protect and all(gate["kind"] != "protect" for gate in found.plan["gates"]):
        said = f"protect {', '.join(protect)}: not judged, random weights have nothing to lose"
        console.print(Text(wrapped(said)), soft_wrap=True)
    tested = found.checks.get("learning_rate")
    if tested is not None:
        console.print(f"\n[bold]{tested['stage']}[/] change of the loss in a range test")
        picture = range_picture(tested["rates"], tested["changes"], tested["recommended"])
        console.print(picture, markup=False)
        console.print(f"  {tested['why']}")
    if found.strategy_path:
        console.print(f"\nstrategy: {found.strategy_path}", soft_wrap=True)


def _plan_data(paths: Sequence[Path], model: str | None, out: Path | None, as_json: bool) -> int:
    from lehr.pipeline.drafting import draft_recipe

    if model is None:
        raise RecipeError(Problem("lehr plan", "one recipe (.yaml), or data files with --model"))
    text, target = draft_recipe(paths, model, out)
    if as_json:
        say_json({"recipe": text, "path": str(target)})
    else:
        print(text)
        again = shlex.quote(str(target))
        print(f"# written to {target}\n# next: lehr plan {again}", file=sys.stderr)
    return 0


def audit_verb(
    paths: Sequence[Path],
    model: str | None,
    template: str,
    clean: Path | None,
    *,
    as_json: bool,
) -> int:
    from lehr.pipeline.auditing import audit

    found = audit(paths, model=model, template=template, clean=clean)
    if as_json:
        say_json(found.as_json())
        return 0
    console = Console(highlight=False)
    for source in found.sources:
        console.print(
            f"[bold]{source['name']}[/]: {source['rows']:,} rows, shape {source['shape']}, "
            f"{source['kept']:,} usable"
        )
        for reason, entry in source["dropped"].items():
            console.print(f"  [yellow]{entry['rows']:,} dropped[/]: {reason} ({entry['first']})")
        for note in source["notes"]:
            console.print(f"  {note}", style="dim", markup=False)
    for finding in found.findings:
        places = ", ".join(finding["examples"][:3])
        console.print(f"[yellow]{finding['kind']}[/]: {finding['sentence']} ({places})")
    if not found.findings:
        console.print("[green]nothing suspicious found[/]")
    if found.mask_sample:
        console.print("\n[bold]One conversation;[/] [green]trained tokens are green[/]")
        console.print(mask_text(found.mask_sample))
        every = end_words(found.answers, found.answers_without_end)
        share = f"{found.supervised_share:.0%} of {found.tokens:,}"
        console.print(f"supervised tokens {share} · {every}")
    if clean is not None:
        console.print(f"clean rows: {clean}")
    return 0


def evaluate_verb(
    model: str,
    against: str | None,
    suites: list[str] | None,
    data: Sequence[Path],
    template: str,
    items: int,
    *,
    as_json: bool,
) -> int:
    from lehr.pipeline.comparing import evaluate

    found = evaluate(model, suites, against=against, data=data, template=template, items=items)
    if as_json:
        say_json(found.as_json())
    else:
        console = Console(highlight=False)
        for suite, measures in found.suites.items():
            for measure, entry in measures.items():
                console.print(f"  {suite}.{measure}: {measure_words(entry)}")
        for note in found.notes:
            console.print(f"  {note}", style="dim", markup=False)
        for gate in found.gates:
            said = gate_sentence(gate, against=True, needs=True, minus="-")
            console.print(f"  {gate['verdict']}: {said}")
        for row in found.flips[:10]:
            console.print(f"  {row['direction']}: {one_line(row['prompt'], 60)}", markup=False)
    return 0 if found.verdict in ("passed", "measured") else GateRefused.exit_status


def measure_words(entry: dict[str, Any]) -> str:
    """A measured value with its interval and unit."""
    scale, unit = (100.0, "%") if entry["unit"] == "share" else (1.0, f" {entry['unit']}")
    digits = 1 if scale == 100.0 else 4
    low, high = entry["low"], entry["high"]
    interval = (
        ""
        if low is None or high is None
        else f" [{low * scale:.{digits}f}, {high * scale:.{digits}f}]"
    )
    return f"{entry['value'] * scale:.{digits}f}{unit}{interval} (n = {entry['n']:,})"


def export_verb(run_folder: Path, kinds: Sequence[str], *, as_json: bool) -> int:
    from lehr.pipeline.reopening import export

    with terminal(as_json) as drawn:
        entries, gap = export(run_folder, kinds, listeners=[drawn])
    if as_json:
        say_json({"exports": entries, "gap": gap})
    else:
        for entry in entries:
            print(f"  {entry['kind']}: {run_folder / entry['path']}")
    if gap:
        raise GateRefused(Problem(str(run_folder), f"an export that is what was trained ({gap})"))
    return 0


def chat_verb(
    model: str,
    against: str | None,
    template: str,
    prompt: str | None,
    tokens: int,
    *,
    as_json: bool,
) -> int:
    from lehr.cli.conversation import answer_once, converse

    names = [model] if against is None else [against, model]
    if as_json:
        if prompt is None:
            raise RecipeError(Problem("lehr chat --json", "a --prompt to answer once"))
        said = answer_once(names, template, prompt, tokens)
        say_json({"answers": [{"model": name, "answer": text} for name, text in said]})
        return 0
    return converse(names, template, prompt, tokens)


def explain_verb(topic: str | None, *, as_json: bool) -> int:
    from rich.markdown import Markdown

    from lehr.report.explain import explain, topics
    from lehr.report.folding import fold

    if as_json:
        if topic is None:
            say_json({"topics": [{"name": name, "about": line} for name, line in topics()]})
        else:
            say_json({"topic": topic, "text": explain(topic)})
        return 0
    console = Console(highlight=False)
    if topic is None:
        for name, line in topics():
            console.print(f"  [bold]{name:<22}[/] {line}")
        return 0
    text = explain(topic)
    if console.is_terminal:
        console.print(Markdown(text), width=min(console.width, 100))
    else:
        print(fold(text, WIDTH).rstrip("\n"))
    return 0


def fetch_verb(name: str | None, *, as_json: bool) -> int:
    from lehr.models.fetch import KNOWN, fetch

    if name is None:
        if as_json:
            say_json({"models": list(KNOWN)})
        else:
            print("\n".join(KNOWN))
        return 0
    path = fetch(name, progress=lambda line: print(line, file=sys.stderr))
    if as_json:
        say_json({"name": name, "path": str(path)})
    else:
        print(path)
    return 0
