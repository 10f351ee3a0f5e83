"""`lehr doctor RECIPE --speed`: every stage is measured, nothing is kept, refusals are clear."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from tests.pipeline.small import lora_recipe, write_recipe

from lehr.cli.main import main
from lehr.diagnosis import speed_probe
from lehr.errors import RecipeError
from lehr.pipeline import speeding
from lehr.pipeline.speeding import speed_of_file

pytestmark = pytest.mark.usefixtures("lean")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(speed_probe, "measure_limits", lambda *_: {"gflops": 50.0, "gbytes": 9.0})
    monkeypatch.setattr(speed_probe, "MOST", 5)


def test_every_stage_is_measured_and_nothing_is_left(work, capsys):
    path = write_recipe(work, lora_recipe())
    before = sorted(work.rglob("*"))
    trace = work.parent / "trace.json"
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(path), "--speed", "--trace", str(trace), "--json"])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)["stages"]
    assert list(found) == ["01-sft", "02-preference"]
    for one in found.values():
        assert sum(one["shares"].values()) == pytest.approx(1.0)
        assert one["bottleneck"] in one["shares"] and one["fix"] and 0 < one["mfu"] < 1
        assert any("LlamaAttention" in part["owner"] for part in one["parts"])
    assert json.loads(trace.read_text())["traceEvents"]
    assert sorted(work.rglob("*")) == before


def test_a_stage_whose_products_take_most_is_tried_at_half_the_width(work, monkeypatch):
    monkeypatch.setattr(speed_probe, "bottleneck_of", lambda _: "compute")
    found = speed_of_file(write_recipe(work, lora_recipe()))
    changes = {name: one.trial.change for name, one in found.items()}
    assert changes == {"01-sft": "half the width", "02-preference": "twice the batch"}
    assert found["01-sft"].trial.predicted < found["01-sft"].trial.before


def test_a_run_that_is_under_way_is_left_alone(work):
    path = write_recipe(work, lora_recipe())
    (work / "out").mkdir()
    with (work / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RecipeError, match="no other lehr process is at work"):
            speed_of_file(path)


def test_what_is_no_recipe_is_refused(work, tmp_path):
    with pytest.raises(RecipeError, match=r"its recipe\.yaml"):
        speed_of_file(work)
    with pytest.raises(RecipeError, match="a curve does not say"):
        speed_of_file(Path("metrics.jsonl"))
    broken = tmp_path / "r.yaml"
    broken.write_text("model: [")
    with pytest.raises(RecipeError):
        speed_of_file(broken)


def test_trace_belongs_to_speed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", "x.csv", "--trace", "t.json"])
    assert end.value.code == 2 and "--speed" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["", "there.json", "there.json/t.json", "bad\0name"])
def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_measured(
    work, monkeypatch, place
):
    (work / "there.json").write_text("{}")
    monkeypatch.setattr(speeding, "prepare", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(RecipeError):
        speed_of_file(write_recipe(work, lora_recipe()), trace=work / place)
    assert (work / "there.json").read_text() == "{}"
