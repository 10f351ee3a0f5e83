"""report.html: one self-contained file, written from the files of a run folder alone.

No script and no network: folding is <details>, switching between scales is a radio
button, plots are inline SVG, and a content security policy forbids everything else.
All text from the run is escaped by the template engine.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lehr.report.details import stage_details
from lehr.report.first_screen import first_screen
from lehr.report.provenance import environment, lineage_steps
from lehr.report.reading import RunFiles, mapping, read_run, text
from lehr.report.wording import moment

TEXT_FOLDED = 420  # characters; a longer answer is folded
PROMPT_MOST = 2_000  # characters; prompts are read at a glance
TEXT_MOST = 20_000  # characters; of a longer one only the beginning goes into the page


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    Works for a run in any state: running, interrupted, without evaluation, with damaged
    files. Raises NotADirectoryError where the folder does not exist.
    """
    run_folder = Path(run_folder)
    page = render(read_run(run_folder))
    target = run_folder / "report.html"
    aside = run_folder / ".report.html.writing"
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(page)
    aside.replace(target)
    return target


def render(run: RunFiles) -> str:
    """The page of a run as text."""
    environment_ = _environment()
    return environment_.get_template("report.html.jinja").render(
        style=Markup(_style()),
        title=text(run.ledger.get("name")) or run.folder.resolve().name,
        run=run,
        model=text(run.ledger.get("model")) or text(mapping(run.plan.get("model")).get("name")),
        when=moment(run.ledger.get("finished") or run.ledger.get("started")),
        recipe_hash=text(run.ledger.get("recipe_hash")),
        screen=first_screen(run),
        stages=[stage_details(stage) for stage in run.stages],
        lineage=lineage_steps(run),
        environment=environment(run),
    )


@cache
def _environment() -> Environment:
    loader = PackageLoader("lehr.report", "templates")
    made = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["fold"] = fold
    made.filters["cut"] = cut
    return made


@cache
def _style() -> str:
    source, _, _ = PackageLoader("lehr.report", "templates").get_source(
        Environment(autoescape=True), "report.css"
    )
    return source


def cut(value: str, most: int = PROMPT_MOST) -> str:
    """The beginning of a text, with what is missing said.

    >>> cut("abcdef", 4)
    'abcd … (2 characters more)'
    """
    if len(value) <= most:
        return value
    return f"{value[:most]} … ({len(value) - most:,} characters more)"


def fold(value: str) -> dict[str, Any]:
    """A long text in parts: what is seen at once, what unfolds, how much is left out.

    >>> fold("short")["rest"]
    ''
    >>> long = fold("word " * 10_000)
    >>> len(long["head"]) <= 420, long["left_out"]
    (True, 30000)
    """
    if len(value) <= TEXT_FOLDED:
        return {"head": value, "rest": "", "left_out": 0}
    space = value.rfind(" ", TEXT_FOLDED - 80, TEXT_FOLDED)
    end = TEXT_FOLDED if space < 0 else space
    return {
        "head": value[:end],
        "rest": value[end:TEXT_MOST],
        "left_out": max(0, len(value) - TEXT_MOST),
    }
