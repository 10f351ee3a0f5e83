"""What a person sees of a run: 80 columns, plain lines in a pipe, no noise of libraries."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
from tests.pipeline.small import lora_recipe, stage, write_recipe

from lehr.cli.main import main
from lehr.cli.terminal import Terminal, duration, mask_text
from lehr.pipeline.events import Event


def drawn(events: Any, **console: Any) -> list[str]:
    stream = io.StringIO()
    terminal = Terminal(stream, **console)
    for event in events:
        terminal(event)
    terminal.close()
    return stream.getvalue().splitlines()


def test_a_run_in_a_pipe_fits_80_columns_and_says_everything(finished_once):
    lines = drawn(finished_once[2])
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80 and "\x1b" not in text and "\r" not in text
    for word in (
        "recipe: ./base",
        "GiB",
        "fp32",
        "1 sft",
        "2 preference",
        "trained tokens are green",
        "every end token: yes",
        "[1/2] sft",
        "held-out loss",
        "Which colour has door 3? → ",
        "vs parent",
        "although undetermined",
        "the same as trained, ",
        "Promoted preference",
        "report.html",
        "lehr chat",
    ):
        assert word in text, word
    assert text.count("s left") == 12, "a line an update: six updates are fewer than ten tenths"


def test_a_pipe_gets_ten_lines_a_stage():
    events = [Event("stage_started", "[1/1] sft", data={"updates": 1000, "reused": False})]
    for update in range(1, 1001):
        row = {"update": update, "loss": 2.0, "tokens": 10, "seconds": 0.1, "skipped": False}
        events.append(Event("update", data=row))
    lines = [line for line in drawn(events) if "left" in line]
    assert len(lines) == 10 and lines[-1].endswith("0 s left")


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([3 - n / 20 for n in range(20)], "falling"),
        ([2 + n / 20 for n in range(20)], "watch"),
        ([2.0 + (n % 2) / 10 for n in range(20)], "level"),
        ([5.7, *(90.0 - n for n in range(19))], "watch: loss 76.50, at first 5.70"),
    ],
)
def test_one_line_says_how_it_goes(losses, word):
    events = [Event("stage_started", "sft", data={"updates": 20, "reused": False})]
    for update, loss in enumerate(losses, 1):
        row = {"update": update, "loss": loss, "tokens": 10, "seconds": 0.1, "skipped": False}
        events.append(Event("update", data=row))
    assert word in drawn(events)[-1]


def test_a_long_finding_is_indented_and_its_path_stays_whole():
    path = "/data/" + "x" * 70 + "/chats.jsonl:6"
    text = f"chats: 155 rows saying exactly what another row says (first: {path})"
    lines = drawn([Event("finding", text, data={})])
    assert lines[0].startswith("  chats: 155 rows") and lines[-1] == f"    {path})"


def test_text_of_the_user_is_no_markup():
    """A row may hold [red] or [/]: it is shown, not obeyed, and does not crash."""
    prompt = {"kind": "prompt", "prompt": "[/] [red]a", "answer": "[bold]b[/]"}
    events = [
        Event("run_started", "[/red] x"),
        Event("showcase", "after", data={"prompts": [prompt], "update": 1, "loss": 1.0}),
        Event("finding", "data: [/x] odd"),
        Event("notice", "[link=x]"),
        Event("finished", "[/]", data={"verdict": "promoted", "next": [("report", "[/]a")]}),
    ]
    text = "\n".join(drawn(events))
    assert "[/] [red]a" in text and "[bold]b[/]" in text and "[link=x]" in text
    assert mask_text([{"text": "[/]", "supervised": True, "control": False}]).plain == "[/]"


def test_one_slow_update_does_not_make_a_run_of_hours():
    events = [Event("stage_started", "sft", data={"updates": 100, "reused": False})]
    for update in range(1, 41):
        row = {"update": update, "loss": 2.0, "tokens": 10, "skipped": False}
        events.append(Event("update", data=row | {"seconds": 600.0 if update == 38 else 0.1}))
    assert drawn(events)[-1].endswith("100 tokens/s, 6 s left")


class LeavingReader(io.StringIO):
    """A pipe whose reader has seen enough."""

    def write(self, text: str) -> int:
        if self.tell() > 200:
            raise BrokenPipeError
        return super().write(text)


def test_a_reader_that_leaves_does_not_end_the_run(finished_once):
    stream = LeavingReader()
    terminal = Terminal(stream)
    for event in finished_once[2]:
        terminal(event)
    terminal.close()
    assert "recipe: ./base" in stream.getvalue() and "report.html" not in stream.getvalue()


def test_a_terminal_without_the_signs_gets_question_marks(finished_once, capfd, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    with pytest.raises(SystemExit) as left:
        main(["run", str(finished_once[0]), "--verify", "--out", "nowhere"])
    assert left.value.code == 2
    terminal = Terminal(stream)
    for event in finished_once[2]:
        terminal(event)
    stream.flush()
    assert b"Promoted preference" in stream.buffer.getvalue()


def test_durations():
    assert [duration(s) for s in (0.2, 59, 89.9, 3600, 86400)] == [
        *("0 s", "59 s", "90 s", "60 min", "24 h 0 min"),
    ]


def test_nothing_of_the_libraries_is_printed(work, capfd):
    recipe = lora_recipe(gates="none", export=["adapter", "merged"])
    recipe["stages"] = [{"sft": stage("chats", max_updates=2, recompute="full")}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SystemExit) as left:
            main(["run", str(write_recipe(work, recipe))])
    said = capfd.readouterr()
    assert left.value.code == 0 and said.err == ""
    assert "Loading weights" not in said.out and "it/s" not in said.out
    assert [str(one.message) for one in caught if one.category is FutureWarning] == []


def test_the_status_line_of_a_run_fits_a_terminal():
    """Health, speed, share of the limit, wait for data, time left: as the page of it says."""
    events = [Event("stage_started", "sft", data={"updates": 200, "reused": False, "limit": 907})]
    for update in range(1, 21):
        row = {"update": update, "loss": 3 - update / 20, "tokens": 372, "seconds": 1.0}
        events.append(Event("update", data={**row, "spans": {"data": 0.02}}))
    line = drawn(events)[-1]
    assert len(line) <= 80 and "healthy: loss 2.23 falling, 372 tokens/s" in line
    assert "41 % of the limit" in line and line.endswith("3 min left")


def test_a_long_wait_for_data_is_said_before_the_limit():
    events = [Event("stage_started", "sft", data={"updates": 200, "reused": False, "limit": 907})]
    for update in range(1, 21):
        row = {"update": update, "loss": 3 - update / 20, "tokens": 372, "seconds": 1.0}
        events.append(Event("update", data={**row, "spans": {"data": 0.4}}))
    line = drawn(events)[-1]
    assert len(line) <= 80 and "waits for data 40 %" in line
