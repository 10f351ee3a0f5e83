"""Objects in a JSON array (HF's trainer_state.json): by columns, and the same as row by row."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tests.diagnosis.test_doctor_large import same

from lehr.diagnosis.doctor import diagnose
from lehr.diagnosis.doctor_curve import curve_of_columns
from lehr.diagnosis.doctor_large import columns_of_bytes
from lehr.diagnosis.doctor_readers import curve_of_text

ROWS: list[dict[str, Any]] = [
    {"epoch": i / 50, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 4.0 - i / 100, "step": i}
    for i in range(1, 121)
]
MIXED = [
    *ROWS[:50],
    {"epoch": 1.0, "eval_loss": 2.5, "eval_runtime": 3.0, "step": 50},
    *ROWS[50:],
    {"epoch": 2.4, "step": 120, "train_loss": 3.1, "train_runtime": 9.0},
]
HIDDEN = [
    row | ({"loss": 0.0, "grad_norm": math.nan} if i > 99 else {}) for i, row in enumerate(MIXED)
]


def state(rows: list[Any], indent: int | None = 2, **more: Any) -> str:
    around = {"best_metric": None, "log_history": rows, "max_steps": 120, **more}
    return json.dumps(around, indent=indent, sort_keys=True)


PLAIN = {
    "one line": state(MIXED, None),
    "indented": state(MIXED),
    "tabs": json.dumps({"log_history": MIXED}, indent="\t"),
    "Windows": state(MIXED).replace("\n", "\r\n"),
    "whole numbers first": state([row | {"loss": 4} for row in ROWS[:3]] + ROWS[3:]),
    "a key that comes late": state(ROWS[:60] + [row | {"note": "x"} for row in ROWS[60:]]),
    "null": state([row | {"grad_norm": None} for row in ROWS]),
    "NaN and infinity": state([row | {"loss": math.nan if i > 50 else -math.inf if i == 9 else 2.5}
                              for i, row in enumerate(ROWS)]),
    "a loss that is hidden as zero": state(HIDDEN),
    "texts": state([row | {"loss": str(row["loss"])} for row in ROWS]),
    "lists around": state(MIXED, stateful_callbacks={"a": [1, {"b": [2]}]}),
    "an array": json.dumps(MIXED),
    "an array, indented": json.dumps(MIXED, indent=1),
}  # fmt: skip
NOT_PLAIN = {
    "objects in a row": state([row | {"more": {"loss": 9.0}} for row in ROWS]),
    "lists in a row": state([row | {"more": [1, 2]} for row in ROWS]),
    "braces in a text": state([row | {"more": "{"} for row in ROWS]),
    "the end of a row in a text": state([row | {"more": "},"} for row in ROWS]),
    "a row that is no object": state([None, *ROWS]),
    "a row among them that is no object": state([*ROWS, None, *ROWS]),
    "a row at the end that is no object": state([*ROWS, None]),
    "nothing between two rows": state(ROWS).replace("},", "}", 1),
    "two histories": state(ROWS, trial={"log_history": []}),
    "numbers and texts": state([ROWS[0], ROWS[1] | {"loss": "3"}, *ROWS[2:]]),
    "an array of arrays": json.dumps([[1, 2.5], [2, 2.25], [3, 2.0]]),
    "broken": state(ROWS)[:-20],
}


@pytest.mark.parametrize("name", PLAIN)
def test_by_columns_as_row_by_row(name: str):
    columns = columns_of_bytes(PLAIN[name].encode())
    assert columns is not None
    exact = curve_of_text(PLAIN[name])
    same(curve_of_columns(columns), exact)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_flat_is_left_to_the_exact_reader(name: str):
    assert columns_of_bytes(NOT_PLAIN[name].encode()) is None


def test_what_hf_hides_is_found_and_the_evaluation_stands_apart():
    columns = columns_of_bytes(PLAIN["a loss that is hidden as zero"].encode())
    assert columns is not None
    curve = curve_of_columns(columns)
    assert len(curve.points("loss")[1]) == 99
    assert curve.points("evaluation.loss")[1].tolist() == [2.5]
    found = diagnose(curve).findings[0]
    assert (found.name, found.first) == ("nan_at_step", 100)
