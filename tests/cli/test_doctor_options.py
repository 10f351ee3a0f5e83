"""Options of `lehr doctor` that exclude each other are refused, none is silently ignored."""

from __future__ import annotations

import pytest

from lehr.cli.doctor_options import refuse_mixed
from lehr.errors import RecipeError


@pytest.mark.parametrize(
    "given, said",
    [
        (["--speed", "--spike"], "--spike and --speed|--speed and --spike"),
        (["--run-tests", "--spike"], "one of --spike, --run-tests and --speed"),
        (["--from-start"], "--from-start with --spike"),
        (["--stage"], "--stage with --spike or --run-tests"),
        (["--trace"], "--trace with --speed"),
        (["--speed", "--loss"], "--loss for a curve only"),
        (["--run-tests", "--from-start"], "--from-start with --spike"),
    ],
)
def test_what_would_be_ignored_is_refused(given, said):
    with pytest.raises(RecipeError, match=said):
        refuse_mixed(given)


@pytest.mark.parametrize("given", [[], ["--loss"], ["--spike", "--stage", "--from-start"]])
def test_what_belongs_together_passes(given):
    refuse_mixed(given)


def test_the_command_refuses():
    from typer.testing import CliRunner

    from lehr.cli.main import app

    result = CliRunner().invoke(app, ["doctor", "x.csv", "--speed", "--spike", "3"])
    assert isinstance(result.exception, RecipeError)
