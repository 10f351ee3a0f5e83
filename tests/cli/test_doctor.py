"""`lehr doctor`: the contract's object, status 0, and 2 for what is no curve."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from lehr.cli.doctor import patch_lines
from lehr.cli.main import main
from lehr.diagnosis.doctor_table import TABLE
from lehr.recipe.loading import load_recipe


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in arguments])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def write_stage(folder: Path, values: list[float | None]) -> None:
    folder.mkdir(parents=True)
    rows = [
        {"update": i, "loss": v, **({} if v else {"nonfinite": ["loss"]})}
        for i, v in enumerate(values, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_file_and_the_object_of_the_contract(capsys, tmp_path):
    path = tmp_path / "curve.txt"
    path.write_text("4.1 3.0 2.9 nan nan nan")
    status, out, _ = call(capsys, "doctor", path, "--json")
    value = json.loads(out)
    assert status == 0 and value["healthy"] is False
    finding = value["findings"][0]
    assert finding["name"] == "nan_at_step"
    assert finding["causes"] and finding["decisive_test"] and finding["fix"]["do"]


def test_prose_names_causes_test_and_fix(capsys, tmp_path):
    path = tmp_path / "curve.txt"
    path.write_text("4.1 3.0 2.9 nan nan nan")
    status, out, _ = call(capsys, "doctor", path)
    assert status == 0
    assert "not finite at a later step" in out and "test:" in out and "fix:" in out


def test_what_the_file_does_not_have_is_said_of_a_healthy_curve(capsys, tmp_path):
    falling = [3 * 0.99**i for i in range(60)]
    path = tmp_path / "curve.txt"
    path.write_text(" ".join(map(str, falling)))
    _, out, _ = call(capsys, "doctor", path)
    flat = " ".join(out.split())
    assert "nothing suspicious in 60 points of the loss" in flat
    assert "without a held-out loss, the gradient norm and the learning rate" in flat
    path = tmp_path / "curve.csv"
    rows = [f"{i},{v},{v + 0.1},1.0,1e-3" for i, v in enumerate(falling, 1)]
    path.write_text("\n".join(["step,loss,eval_loss,grad_norm,lr", *rows]))
    _, out, _ = call(capsys, "doctor", path)
    assert "nothing suspicious" in out and "without" not in out


def test_further_lines_stand_below_the_first_word(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    path = tmp_path / "curve.txt"
    path.write_text("4.1 3.0 2.9 nan nan nan")
    _, out, _ = call(capsys, "doctor", path)
    lines = out.splitlines()
    assert max(map(len, lines)) <= 60 and not any(line != line.rstrip() for line in lines)
    below = lines[next(i for i, line in enumerate(lines) if "  test: " in line) + 1]
    assert below.startswith(" " * 8) and below[8] != " "


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry.patch])
def test_a_fix_can_be_pasted_into_a_stage(tmp_path, name):
    factors = {"learning_rate": 6e-5}
    patch = {key: factors.get(key, value) for key, value in TABLE[name].patch.items()}
    keys = "".join(f"      {line}\n" for line in patch_lines(patch))
    (tmp_path / "p.jsonl").touch()
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: tiny:1m\ntemplate: chatml\ndata:\n  pairs: {path: p.jsonl, holdout: 8}\n"
        f"stages:\n  - preference:\n      data: pairs\n{keys}"
    )
    stage = load_recipe(path).stages[0].model_dump()
    for key, value in patch.items():
        assert _within(value, stage.get(key)), key


def _within(part, whole):
    if not isinstance(part, dict):
        return part == whole
    return all(_within(value, whole[key]) for key, value in part.items())


def test_every_stage_of_a_run(capsys, tmp_path):
    write_stage(tmp_path / "01-pretrain", [3 - i / 100 for i in range(60)])
    write_stage(tmp_path / "02-sft", [*[2 - i / 100 for i in range(60)], None])
    status, out, _ = call(capsys, "doctor", tmp_path, "--json")
    value = json.loads(out)
    assert status == 0
    assert [one["name"] for one in value["findings"]] == ["nan_at_step"]
    assert value["findings"][0]["where"].startswith("02-sft: ")


def test_the_resumes_of_a_run_are_known(capsys, tmp_path):
    write_stage(tmp_path / "01-sft", [*[2.0] * 40, *[2.6] * 40])
    line = {"kind": "resumed", "stage": "01-sft", "update": 40, "text": ""}
    (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
    _, out, _ = call(capsys, "doctor", tmp_path, "--json")
    assert json.loads(out)["findings"][0]["name"] == "jump_at_resume"


def test_a_pasted_list_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"2.0 1.9 inf")))
    status, out, _ = call(capsys, "doctor", "-", "--json")
    assert status == 0 and json.loads(out)["findings"]


@pytest.mark.parametrize("content", [None, "", "no curve here"])
def test_what_is_no_curve_ends_with_2(capsys, tmp_path, content):
    path = tmp_path / "curve.txt"
    if content is not None:
        path.write_text(content)
    status, out, _ = call(capsys, "doctor", path, "--json")
    assert status == 2
    assert json.loads(out)["error"]["kind"] == "recipe"


def test_an_empty_folder_ends_with_2(capsys, tmp_path):
    status, _, err = call(capsys, "doctor", tmp_path)
    assert status == 2 and "metrics.jsonl" in err


def test_a_column_can_be_named(capsys, tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text("step,a,b\n1,2,3\n2,1,2\n")
    assert call(capsys, "doctor", path)[0] == 2
    assert call(capsys, "doctor", path, "--loss", "a")[0] == 0


def test_what_is_known_of_the_training_helps(capsys, tmp_path):
    path = tmp_path / "curve.txt"
    path.write_text(" ".join(["6.93"] * 40))
    _, out, _ = call(capsys, "doctor", path, "--vocabulary", 1024, "--json")
    assert json.loads(out)["findings"][0]["name"] == "flat_at_chance"


def test_a_recipe_without_a_question_is_told_the_questions(capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: tiny:1m")
    status, _, said = call(capsys, "doctor", path)
    assert status == 2 and "--speed" in said and "--run-tests" in said and str(path) in said


@pytest.mark.parametrize("option", ["--spike", "--run-tests", "--speed", "--trace"])
def test_the_page_names_every_question(capsys, option):
    assert option in call(capsys, "explain", "doctor")[1]
