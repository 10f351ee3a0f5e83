"""The doctor beside a run: silent on a healthy stage, and names a sick one while it trains."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.pipeline.small import go, lora_recipe, read, write_recipe

from lehr.diagnosis.doctor_look import Context
from lehr.pipeline.doctoring import LiveDoctor
from lehr.pipeline.events import Events
from lehr.pipeline.examining import examine
from lehr.training import events as engine


def heard_of(rows: list[dict], folder: Path, updates: int, context: Context | None = None):
    heard = []
    events = Events(None, [heard.append])
    live = LiveDoctor(events, context or Context(vocabulary=128), folder)
    live(engine.RunStarted(0, 0, updates))
    told_at = []
    for row in rows:
        live(engine.UpdateDone(row))
        if "evaluation.loss" in row:
            live(engine.Evaluated(row["update"], {"loss": row["evaluation.loss"]}, False))
        told_at += [row["update"]] * (len(heard) - len(told_at))
    return live, heard, told_at


def test_a_flat_stage_is_named_long_before_its_end(tmp_path):
    rows = [{"update": i, "loss": math.log(128), "learning_rate": 0.0} for i in range(1, 401)]
    live, heard, told_at = heard_of(rows, tmp_path, 400)
    assert [one.kind for one in heard] == ["doctor"]
    assert heard[0].data["finding"]["name"] == "flat_at_chance"
    assert told_at[0] <= 100
    live.conclude()
    assert len(heard) == 1, "what was told is not told again"
    assert read(tmp_path / "doctor.json")["findings"][0]["name"] == "flat_at_chance"


def test_a_healthy_stage_is_not_talked_about(tmp_path):
    rows = [
        {"update": i, "loss": 2 + 2.8 * math.exp(-i / 40) + 0.03 * math.sin(37.0 * i)}
        for i in range(1, 401)
    ]
    live, heard, _ = heard_of(rows, tmp_path, 400)
    assert live.conclude().healthy and heard == []
    assert read(tmp_path / "doctor.json")["healthy"] is True


PASSED_OVER = [  # beside the update that they did not make
    {"update": 200, "loss": 99.0, "skipped": True, "origins": ["a:1"], "guard.signal": "loss"},
    {"update": 200, "loss": None, "skipped": True, "origins": ["a:2"], "quarantined": True},
    {"update": 200, "loss": None, "skipped": True, "nonfinite": ["loss"], "loss_scale": 65536.0},
]
BROKEN = {"update": 200, "loss": None, "skipped": True, "nonfinite": ["loss"], "origins": ["a:3"]}


def test_what_was_passed_over_on_purpose_is_no_loss_that_is_not_finite(tmp_path):
    def rows(*more):
        usual = [
            {"update": i, "loss": 2 + 2.8 * math.exp(-i / 40) + 0.03 * math.sin(37.0 * i)}
            for i in range(1, 401)
        ]
        return [*usual[:200], *more, *usual[200:]]

    for more, names in ((PASSED_OVER, []), ([BROKEN], ["nan_at_step"])):
        live, heard, _ = heard_of(rows(*more), tmp_path, 400)
        assert [one.name for one in live.conclude().findings] == names, heard
        lines = "".join(json.dumps(row) + "\n" for row in rows(*more)) + '{"skipped": true, "u'
        (tmp_path / "metrics.jsonl").write_text(lines)
        for path in (tmp_path, tmp_path / "metrics.jsonl"):
            assert [one.name for one in examine(path).findings] == names


def test_updates_that_were_undone_are_no_part_of_the_curve(tmp_path):
    live, _, _ = heard_of([{"update": i, "loss": 3.0} for i in range(1, 31)], tmp_path, 400)
    live(engine.WentBack(30, 20, 1, (21,), ("a:1",), "usual updates"))
    live(engine.UpdateDone({"update": 21, "loss": 2.0}))
    assert [row["update"] for row in live.rows] == list(range(1, 22))
    assert live.rows[-1]["loss"] == 2.0


def test_the_status_line_does_not_say_healthy_of_what_the_doctor_found():
    import io

    from lehr.cli.terminal import Terminal
    from lehr.pipeline.events import Event

    said = io.StringIO()
    drawn = Terminal(said)
    drawn(Event("stage_started", "one", data={"updates": 40}))
    finding = {"title": "flat at the loss of guessing"}
    for update in range(1, 41):
        row = {"update": update, "loss": 4.85, "tokens": 10, "seconds": 0.1}
        if update == 10:
            drawn(Event("doctor", "doctor: flat", data={"finding": finding}))
        drawn(Event("update", data=row))
    lines = said.getvalue().splitlines()
    after = lines[next(i for i, line in enumerate(lines) if "doctor: flat" in line) + 1 :]
    assert after and not any("healthy" in line for line in after)


def test_a_run_leaves_a_diagnosis_and_its_context(tmp_path, saved_base):
    import shutil

    from tests.pipeline.small import write_data

    shutil.copytree(saved_base, tmp_path / "base")
    write_data(tmp_path)
    recipe = lora_recipe()
    recipe["stages"] = recipe["stages"][:1]
    recipe["stages"][0]["sft"] |= {"learning_rate": 1e-12, "max_updates": 30}
    recipe["gates"] = {"undetermined": "promote"}
    _, folder, heard = go(write_recipe(tmp_path, recipe))
    record = json.loads((folder / "01-sft" / "doctor.json").read_text())
    assert record["findings"][0]["name"].startswith("flat")
    assert record["context"]["vocabulary"] > 100 and record["context"]["unigram_entropy"] > 0
    assert [one.data["finding"]["name"] for one in heard.of("doctor")] == [
        one["name"] for one in record["findings"]
    ]
    again = examine(folder)
    assert [one.name for one in again.findings] == [one["name"] for one in record["findings"]]
    report = (folder / "report.html").read_text()
    assert record["findings"][0]["decisive_test"][:30] in report


def test_what_lehr_rules_out_is_not_said_of_its_stages(tmp_path):
    """A tiny model learns a small world by heart: to another tool's curve this is a leak."""
    rows = [
        {"update": i, "loss": 0.02 + 4.5 * math.exp(-i / 30), "learning_rate": 1e-3}
        for i in range(1, 401)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    foreign = examine(path, context=Context(vocabulary=128))
    assert [one.name for one in foreign.findings] == ["too_low_too_soon"]
    live, heard, _ = heard_of(rows, tmp_path, 400)
    assert live.conclude().healthy
    assert not heard
    assert examine(path).healthy
