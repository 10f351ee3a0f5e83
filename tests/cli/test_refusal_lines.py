"""A refusal is folded between words, so that it can be read in 80 columns."""

import io
import sys

from lehr.cli.main import report_error
from lehr.errors import Problem, RecipeError

LONG = "a pattern that matches a linear layer: " + ", ".join(["model.layers.0.proj"] * 6)


def test_a_long_problem(monkeypatch):
    problem = Problem("stages.0 fp8.convert", LONG, "nothing.here")
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    assert report_error(RecipeError(problem), as_json=False) == 2
    lines = said.getvalue().splitlines()
    assert " ".join(line.strip() for line in lines) == str(problem)
    assert len(lines) > 2 and max(map(len, lines)) <= 80
    assert all(line.startswith("    ") for line in lines[1:])
