"""Problems are sentences in 80 columns, whichever verb has them."""

from __future__ import annotations

import pytest

from lehr.cli.main import main, report_error
from lehr.errors import OutOfResources, Problem, RecipeError


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0), capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "nope"),
        ("doctor", "x.csv", "--spike", "many"),
        ("doctor", "x.csv", "--trace", "t.json", "--set", "a=b", "--from-start"),
        ("doctor", "x.csv", "--nope"),
        ("evaluate", "x", "--items", "1"),
        ("plan", "x.csv"),
        ("run", "no-such-recipe.yaml"),
        ("audit", "no-such-file.jsonl"),
        ("fetch", "no-such-model"),
        ("chat", "x", "--json"),
        ("nope",),
    ],
)
def test_no_line_is_wider_than_80_columns(capsys, arguments):
    status, lines = complaint(capsys, *arguments)
    assert status == 2 and lines
    assert [line for line in lines if len(line) > 80] == []


def test_a_long_path_stays_whole_and_the_rest_is_folded(capsys):
    path = "/a" * 60
    problem = Problem(f"{path} key", "a word " * 20, "x")
    assert report_error(RecipeError([problem, problem]), as_json=False) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "2 problems:" and lines[1] == f"  {path}"
    assert all(len(line) <= 80 for line in lines if path not in line)
    assert all(line.startswith("    ") for line in lines[2:4])


def test_lines_of_a_problem_stay_lines(capsys):
    report_error(OutOfResources(Problem("memory", "one\ntwo", says=True)), as_json=False)
    assert capsys.readouterr().err.splitlines() == ["  memory: one", "    two"]
