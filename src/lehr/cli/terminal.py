"""What a person sees of a run: a listener that draws events in 80 columns.

On a terminal one status line is redrawn in place; piped, plain lines appear about
ten times a stage. Everything goes to the stream that the verb chose.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from statistics import fmean, median
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lehr.cli.saying import WIDTH, wrapped
from lehr.pipeline.events import Event
from lehr.report.wording import gate_sentence

FAR_ABOVE_START = 2.0  # times the first loss: no batch is so much harder on the same weights
SHORTEST_BAR = 6  # a shorter one shows nothing
VERDICT_STYLE = {"passed": "green", "refused": "red", "undetermined": "yellow"}
VERDICT_SIGN = {"passed": "✓", "refused": "✗", "undetermined": "?"}


def duration(seconds: float) -> str:
    """Seconds in words of one unit or two: 42 s, 3 min, 1 h 20 min.

    >>> duration(42), duration(200), duration(6000)
    ('42 s', '3 min', '1 h 40 min')
    """
    if seconds < 90:
        return f"{max(0, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def one_line(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters.

    >>> one_line("a\\nb  c", 4)
    'a b…'
    """
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1].rstrip() + "…"


class _Screen(Console):
    """A console whose reader may leave: `lehr run recipe.yaml | head` must not end the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Terminal:
    """Draws the events of a run."""

    def __init__(self, stream: IO[str], width: int | None = None) -> None:
        self.console = _Screen(file=stream, highlight=False, soft_wrap=False)
        found = self.console.width if self.console.is_terminal else WIDTH
        self.console.width = width or max(40, min(found, 100))
        self.live: Live | None = None
        self.losses: deque[float] = deque(maxlen=40)
        self.first_loss: float | None = None  # of the stage; a resumed one does not know it
        self.rates: deque[tuple[float, float]] = deque(maxlen=20)
        self.waits: deque[float] = deque(maxlen=20)  # for data, of the same updates
        self.limit = 0.0  # tokens a second, by the measured rate of products
        self.printed_tenths = 0
        self.updates = 0
        self.suspected = ""  # what the doctor said of this stage last
        self.started = time.monotonic()
        self.draw: dict[str, Callable[[Event], None]] = {
            "run_started": self._run_started,
            "machine": self._machine,
            "plan": self._plan,
            "data": self._data,
            "mask": self._mask,
            "finding": self._warning,
            "displacement": self._warning,
            "doctor": self._doctor,
            "stage_started": self._stage_started,
            "update": self._update,
            "showcase": self._showcase,
            "gates": self._gates,
            "verdict": self._verdict,
            "finished": self._finished,
        }

    def __call__(self, event: Event) -> None:
        if event.kind not in ("update",):
            self._stop_live()
        draw = self.draw.get(event.kind)
        if draw is not None:
            draw(event)
        elif event.text:
            self._say(event.text, "dim")

    def close(self) -> None:
        self._stop_live()

    def _say(self, text: str, style: str) -> None:
        """A sentence whose further lines are indented; a path is never broken."""
        self.console.print(Text(wrapped(text, self.console.width), style=style), soft_wrap=True)

    # -- beginning ------------------------------------------------------------

    def _run_started(self, event: Event) -> None:
        self.console.print(Text(event.text, style="bold"))

    def _machine(self, event: Event) -> None:
        self.console.print(Text(event.text))

    def _plan(self, event: Event) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column, side in (("stage", "left"), ("data", "left"), ("updates", "right")):
            table.add_column(column, justify=side)  # type: ignore[arg-type]
        table.add_column("about", justify="right")
        for number, stage in enumerate(event.data["stages"], 1):
            table.add_row(
                f"{number} {stage['name']}",
                escape(one_line(stage["data"], 40)),
                f"{stage['updates']:,}",
                "reused" if stage.get("reused") else duration(stage["seconds"]),
            )
        self.console.print()
        self.console.print(table)

    def _data(self, event: Event) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("data", justify="left")
        for column in ("rows", "kept", "held out", "dropped", "tokens", "trained"):
            table.add_column(column, justify="right")
        reasons: list[str] = []
        for source in event.data["sources"]:
            dropped = source["dropped"]
            table.add_row(
                escape(source["name"]),
                f"{source['rows']:,}",
                f"{source['kept']:,}",
                f"{source['heldout']:,}",
                f"{sum(found['rows'] for found in dropped.values()):,}",
                f"{source['tokens']:,}",
                f"{source['supervised_tokens'] / max(1, source['tokens']):.0%}",
            )
            reasons += [
                f"{source['name']}: {found['rows']} dropped, {reason} (first: {found['first']})"
                for reason, found in dropped.items()
            ]
        self.console.print()
        self.console.print(table)
        for reason in reasons:
            self._say(reason, "yellow")

    def _mask(self, event: Event) -> None:
        data = event.data
        self.console.print()
        self.console.print(
            Text.assemble(("One conversation; ", "bold"), ("trained tokens are green", "green"))
        )
        self.console.print(mask_text(data["spans"]))
        every = end_words(data["answers"], data["answers_without_end"])
        self.console.print(f"supervised tokens {data['supervised_share']:.0%} · {every}")

    def _warning(self, event: Event) -> None:
        self._say(event.text, "yellow")

    def _doctor(self, event: Event) -> None:
        self.suspected = event.data["finding"]["title"]
        self._warning(event)

    # -- a stage --------------------------------------------------------------

    def _stage_started(self, event: Event) -> None:
        self.losses.clear()
        self.first_loss = None
        self.rates.clear()
        self.waits.clear()
        self.limit = float(event.data.get("limit") or 0.0)
        self.printed_tenths = 0
        self.suspected = ""
        self.updates = event.data["updates"]
        self.console.print()
        self.console.print(Text(event.text, style="bold"))

    def _update(self, event: Event) -> None:
        row = event.data
        if row.get("loss") is not None:
            self.losses.append(row["loss"])
            if row["update"] == 1:
                self.first_loss = row["loss"]
        self.rates.append((row["tokens"], row["seconds"]))
        if "spans" in row:
            self.waits.append(row["spans"].get("data", 0.0))
        share = min(1.0, row["update"] / max(1, self.updates))
        line = self._status(row, share)
        if self.console.is_terminal:
            if self.live is None:
                self.live = Live(console=self.console, transient=True, refresh_per_second=4)
                self.live.start()
            self.live.update(line)
        elif int(10 * share + 1e-9) > self.printed_tenths:
            self.printed_tenths = int(10 * share + 1e-9)
            self.console.print(line)

    def _status(self, row: dict[str, Any], share: float) -> Text:
        # The median: one update during which the machine did something else says nothing.
        seconds = median(spent for _, spent in self.rates)
        rate = fmean(tokens for tokens, _ in self.rates) / max(seconds, 1e-9)
        left = max(0, self.updates - row["update"]) * seconds
        health, style = self._health(row)
        words = status_words(
            self.console.width - 2 - len(health),
            rate,
            duration(left),
            rate / self.limit if self.limit else None,
            sum(self.waits) / max(1e-9, sum(spent for _, spent in self.rates))
            if self.waits
            else None,
        )
        room = min(20, self.console.width - 3 - len(health) - len(words))
        bar = ""
        if room >= SHORTEST_BAR:
            done = round(room * share)
            bar = "━" * done + "╌" * (room - done) + " "
        return Text.assemble("  ", (bar, "cyan"), (health, style), words)

    def _health(self, row: dict[str, Any]) -> tuple[str, str]:
        if row.get("skipped"):
            return f"update skipped: {_why_skipped(row)}", "red"
        if self.suspected and self.losses:
            return f"doctor: {self.suspected}, loss {self.losses[-1]:.2f}", "yellow"
        if len(self.losses) < 8:
            return f"loss {self.losses[-1]:.2f}" if self.losses else "starting", ""
        half = len(self.losses) // 2
        values = list(self.losses)
        before, after = sum(values[:half]) / half, sum(values[half:]) / (len(values) - half)
        spread = max(1e-9, max(values) - min(values))
        if self.first_loss is not None and after > FAR_ABOVE_START * self.first_loss > 0:
            return f"watch: loss {after:.2f}, at first {self.first_loss:.2f}", "yellow"
        if after > before + 0.5 * spread:
            return f"watch: loss {after:.2f} rising", "yellow"
        word = "falling" if after < before - 0.05 * spread else "level"
        return f"healthy: loss {after:.2f} {word}", "green"

    def _showcase(self, event: Event) -> None:
        self._say(event.text, "dim")
        room = self.console.width - 4
        for prompt in event.data["prompts"]:
            question = one_line(prompt["prompt"], room // 2 - 2)
            answer = one_line(prompt["answer"], room - len(question) - 5) or "(nothing)"
            self.console.print(Text.assemble("    ", (question, "cyan"), " → ", answer))

    def _gates(self, event: Event) -> None:
        for gate in event.data["gates"]:
            verdict = gate["verdict"]
            line = Text.assemble(
                ("  " + VERDICT_SIGN[verdict] + " ", VERDICT_STYLE[verdict]),
                gate_sentence(gate, against=True, needs=True, minus="-"),
            )
            self.console.print(line)

    def _verdict(self, event: Event) -> None:
        style = "bold green" if event.data["promoted"] else "bold red"
        self._say(event.text, style)

    def _finished(self, event: Event) -> None:
        data = event.data
        style = "bold green" if data["verdict"] == "promoted" else "bold yellow"
        self.console.print()
        self.console.print(Text(event.text, style=style))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in data["next"]:
            table.add_row(name, escape(value))
        self.console.print(table)

    def _stop_live(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def status_words(
    room: int, rate: float, left: str, limit: float | None, waits: float | None
) -> str:
    """What follows the health on the status line, in at most `room` characters if it can be.

    limit  share of this machine's measured rate of products; waits: share spent waiting for data

    >>> status_words(80, 372.4, "3 min", 0.41, 0.02)
    ", 372 tokens/s, 41 % of this machine's limit, waits for data 2 %, 3 min left"
    >>> status_words(52, 372.4, "3 min", 0.41, 0.02)
    ', 372 tokens/s, 41 % of the limit, 3 min left'
    """
    speed, end = f", {rate:,.0f} tokens/s", f", {left} left"
    used = "" if limit is None else f", {100 * limit:.0f} % of this machine's limit"
    waiting = "" if waits is None else f", waits for data {100 * waits:.0f} %"
    short = used.replace("this machine's", "the")
    many = waiting if waits is not None and waits >= 0.1 else ""  # then it is what matters
    for words in (used + waiting, short + waiting, short + many, many or short, many, ""):
        if len(speed + words + end) <= room:
            return speed + words + end
    return speed + end


def end_words(answers: int, without_end: int) -> str:
    """Whether answers teach the model to stop: the end token of each is trained, or not.

    >>> end_words(12, 0), end_words(12, 2)
    ('every end token: yes', 'every end token: NO, 2 of 12 answers are cut before it')
    """
    if not answers:
        return "no answers: every token is trained"
    if not without_end:
        return "every end token: yes"
    if without_end == answers:
        return "every end token: NO, not one: answers would never learn to stop"
    return f"every end token: NO, {without_end:,} of {answers:,} answers are cut before it"


def mask_text(spans: list[dict[str, Any]]) -> Text:
    """Spans of a conversation with the trained ones green."""
    text = Text()
    for span in spans:
        style = "green" if span["supervised"] else "dim"
        text.append(span["text"], style=style + (" bold" if span["control"] else ""))
    text.rstrip()
    return text


def _why_skipped(row: dict[str, Any]) -> str:
    """The guard's signal, quarantine, or a value that is not finite."""
    if "guard.signal" in row:
        return f"unusual {row['guard.signal']}"
    return "in quarantine" if row.get("quarantined") else "not finite"
