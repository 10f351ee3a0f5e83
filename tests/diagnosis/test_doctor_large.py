"""The reader of large files gives what the exact one gives, and leaves to it what is not plain."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from lehr.diagnosis.doctor_curve import Curve, curve_of_columns, is_known
from lehr.diagnosis.doctor_large import MANY, columns_of_bytes
from lehr.diagnosis.doctor_readers import LARGE, curve_of_bytes, curve_of_text
from lehr.diagnosis.doctor_tables import long_table, table_of
from lehr.errors import RecipeError


def same(one: Curve, other: Curve) -> None:
    assert one.notes == other.notes and one.restarts == other.restarts
    assert one.columns.keys() == {name for name in other.columns if is_known(name)}
    np.testing.assert_array_equal(one.steps, other.steps)
    for name in one.columns:
        np.testing.assert_array_equal(one.columns[name], other.columns[name], err_msg=name)
    assert one.nonfinite.keys() == {name for name in other.nonfinite if is_known(name)}
    for name in one.nonfinite:
        np.testing.assert_array_equal(one.nonfinite[name], other.nonfinite[name], err_msg=name)


def rows_of(*cells: str) -> str:
    """A table of step, loss and evaluation with these cells of the loss, over and over."""
    lines = [f"{i + 1},{cells[i % len(cells)]},{'' if i % 3 else 2.5}" for i in range(200)]
    return "step,loss,eval_loss\n" + "\n".join(lines) + "\n"


def lines_of(*values: Any, **more: Any) -> str:
    rows = [{"step": i + 1, "loss": values[i % len(values)], **more} for i in range(200)]
    return "".join(json.dumps(row) + "\n" for row in rows)


WIDE = {f"gpu{i}": i / 2 for i in range(MANY)}
PLAIN = {
    "numbers": rows_of("2.5", "+2.25", "3", "1e-2", ".5", "4."),
    "absent cells": rows_of("2.5", "", "2.25"),
    "words for absent": rows_of("2.5", "None", "null", "-", "n/a"),
    "quoted": rows_of('"2.5"', '""', "3"),
    "not finite": rows_of("2.5", "NaN", "inf", "-Infinity", "nan"),
    "Windows": rows_of("2.5", "", "nan").replace("\n", "\r\n"),
    "old line ends": rows_of("2.5", "2").replace("\n", "\r"),
    "byte order mark": "\ufeff" + rows_of("2.5", "2"),
    "semicolons": rows_of("2.5", "2").replace(",", ";"),
    "tabs": rows_of("2.5", "2").replace(",", "\t"),
    "torn row": rows_of("2.5", "2") + "201,2",
    "blank lines": rows_of("2.5", "2").replace("\n", "\n\n"),
    "rows too long": rows_of("2.5", "2") + "201,2,,,\n\n203,1,\n",
    "twice and back": rows_of("2.5", "2") + "150,1.5,\n150,1.25,\n151,1,\n",
    "spaces": rows_of(" 2.5", "2 ", "3"),
    "a clock in words": "step,loss,timestamp\n"
    + "".join(f"{i},2.5,2026-01-01 00:00:{i % 60:02}\n" for i in range(200)),
    "lines in a cell": 'note,step,loss\n"a\nb",1,2.5\n' + 'x,2,"2.25"\n' * 60,
    "too large": rows_of("1e400", "2"),
    "decimal commas": "step;loss\n" + "".join(f"{i};2,{i}\n" for i in range(200)),
    "TensorBoard": "Wall time,Step,Value\n"
    + "".join(f"{1e9 + i},{i},{2 + 1 / (i + 1)}\n" for i in range(200)),
    "mlflow": "Run ID,key,value,step\n"
    + "".join(f"a,loss,{2 + i / 9},{i % 90}\na,lr,,{i % 90}\n" for i in range(200)),
    "the loss is empty": "step,loss,other\n" + "".join(f"{i},,{2 + i / 9}\n" for i in range(200)),
    "JSON": lines_of(2.5, 3, 1e-9),
    "JSON with null": lines_of(2.5, None),
    "JSON not finite": lines_of(2.5, math.nan, math.inf, -math.inf),
    "JSON of lehr": lines_of(2.5, 3, skipped=False, stage="sft")
    + '{"step": 201, "loss": null, "nonfinite": ["loss", "grad_norm"], "skipped": true}\n',
    "JSON in texts": lines_of("2.5", "nan", "2.25"),
    "JSON torn": lines_of(2.5, 3) + '{"step": 201, "lo',
    "JSON of two kinds": lines_of(2.5) + '{"step": 200, "eval_loss": 2.0, "when": "2026-01-01"}\n',
    "JSON nested": lines_of(2.5, more={"loss": 3}, list=[1, 2]),
    "JSON, many keys": lines_of(2.5, 3.25, **WIDE),
    "JSON, a key once": lines_of(2.5, **WIDE)
    + json.dumps({"step": 201, "loss": 2, **WIDE, "eval_loss": 3.0})
    + "\n",
    "JSON, many keys, one null": lines_of(2.5, None, **WIDE),
}
NOT_PLAIN = {
    "words": rows_of("2.5", "skipped"),
    "underscores": rows_of("1_000"),
    "thousands": rows_of('"2,345"', "2"),
    "a name over two lines": 'step,loss,"a\nb"\n' + "1,2,3\n" * 60,
    "JSON, a row is a list": lines_of(2.5) + "[1, 2]\n" + lines_of(2),
    "JSON, a row is null": lines_of(2.5) + "null\n" + lines_of(2),
    "JSON, a line is torn": lines_of(2.5) + '{"step": 2' + "\n" + lines_of(2.5),
    "JSON, blank lines": lines_of(2.5).replace("\n", "\n\n"),
    "JSON, a key twice": '{"step": 1, "loss": 2, "loss": 3}\n' * 60,
    "JSON, two in a line": lines_of(2.5)
    + '{"step": 201, "loss": 2} {"step": 202, "loss": 3}\n'
    + lines_of(2),
    "JSON, numbers and texts": lines_of(2.5, "2.25"),
    "a list": "[3.0,\n2.5,\n2.0]",
    "bare numbers": "1,3.0\n2,2.5\n3,2.0\n",
    "a log": "step 1, loss 2.5\nstep 2, loss 2.25\n",
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_file_gives_the_same_curve(name: str):
    columns = columns_of_bytes(PLAIN[name].encode())
    assert columns is not None
    same(curve_of_columns(columns), curve_of_text(PLAIN[name].removeprefix("\ufeff")))


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_the_exact_reader(name: str):
    text = NOT_PLAIN[name]
    assert columns_of_bytes(text.encode()) is None


@pytest.mark.parametrize("loss", ["eval_loss", "loss"])
def test_the_loss_that_is_asked_for(loss: str):
    text = rows_of("2.5", "", "3")
    columns = columns_of_bytes(text.encode(), loss)
    assert columns is not None
    same(curve_of_columns(columns, loss=loss), curve_of_text(text, loss=loss))


@pytest.mark.parametrize("text", [rows_of("2.5"), lines_of(2.5, gpu=1.0)])
def test_columns_that_say_nothing_are_not_read(text: str):
    wide = text.replace("eval_loss", "gpu") if text.startswith("step") else text
    columns = columns_of_bytes(wide.encode())
    assert columns is not None and list(columns) == ["step", "loss"]
    asked = columns_of_bytes(wide.encode(), "gpu")
    assert asked is not None and "gpu" in asked


def test_an_unknown_loss_lists_every_column_of_a_large_file():
    text = "step,alpha,beta\n" + "".join(f"{i},2.5,3.5\n" for i in range(10_000))
    assert len(text) > LARGE
    with pytest.raises(RecipeError, match="'alpha', 'beta'"):
        curve_of_bytes(text.encode())


def test_a_long_table_without_a_step_in_a_row_leaves_that_row_out():
    table = table_of("key,value,step\nloss,3,1\nloss,9,\nloss,2,2\n")
    assert table is not None and table["step"].tolist() == [1, 2]
    assert table["loss"].tolist() == [3, 2]
    assert long_table({"key": ["a"], "value": ["x"], "step": [1.0]}) is None
