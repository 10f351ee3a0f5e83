"""A long log by kinds of lines is what it is line by line; tables and logs that mislead."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.diagnosis.test_doctor_strangers import TRAINERS, broken, healthy

from lehr.diagnosis import doctor_logs
from lehr.diagnosis.doctor import diagnose
from lehr.diagnosis.doctor_curve import Curve, curve_of_columns
from lehr.diagnosis.doctor_logs import as_shown, columns_of_log, kind_of_line, row_of_line
from lehr.diagnosis.doctor_readers import curve_of_bytes, curve_of_text
from lehr.errors import RecipeError

ODD_LINES = [
    "iter 5: loss 2,5, time 3ms",
    "iter 1,000: loss 2.25",
    "iter 6: loss 2.5e-3, loss 9",
    "iter 7: loss -inf, time 3ms",
    "iter 8: loss n/a, time 3ms",
    "iter 9: loss +2.5",
    "iter 10: loss 2.",
    "iter 11: loss .5",
    "{'loss': 2.5, 'more': {'loss': 3.0}}",
    "{'loss': None, 'step': 3}",
    "{'loss': 2.5, 'step': 3, 'loss': 4.5}",
    "lm loss: 2.5 | mtp_1 loss: 9.5 | mtp_2 loss: 8.5",
    "a line (of words) with $igns. and 12:30:05,123",
    "",
    "loss 2.5,3 and more",
    "step 12 best val loss 1.5 loss 2.5",
]


def equal(one: Curve, other: Curve) -> None:
    assert one.notes == other.notes and one.restarts == other.restarts
    for mine, theirs in ((one.columns, other.columns), (one.nonfinite, other.nonfinite)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    np.testing.assert_array_equal(one.steps, other.steps)


def by_kinds(text: str, monkeypatch: pytest.MonkeyPatch, long: float) -> dict[str, object]:
    monkeypatch.setattr(doctor_logs, "LONG", long)
    columns = columns_of_log(as_shown(text))
    assert columns is not None
    return columns


@pytest.mark.parametrize("write", TRAINERS)
def test_by_kinds_as_line_by_line(write, monkeypatch: pytest.MonkeyPatch):
    lines = write(broken()).split("\n")
    for place, odd in enumerate(ODD_LINES):
        lines.insert(11 * place + 7, odd)
    text = "\n".join(lines)
    fast = curve_of_columns(by_kinds(text, monkeypatch, 0))
    equal(fast, curve_of_columns(by_kinds(text, monkeypatch, math.inf)))


def test_only_odd_lines(monkeypatch: pytest.MonkeyPatch):
    text = "\n".join(ODD_LINES * 3)
    fast = curve_of_columns(by_kinds(text, monkeypatch, 0))
    equal(fast, curve_of_columns(by_kinds(text, monkeypatch, math.inf)))


def test_a_kind_stands_for_other_numbers_only():
    kind = kind_of_line("iter   100: loss 3.2145, time 45.1ms, gpu0 7")
    assert kind is not None and kind.names == ("iter", "loss")
    found = doctor_logs.re.compile(kind.pattern)
    assert found.fullmatch("iter 7: loss nan, time 5.25ms, gpu12 -3.5e-9").groups() == ("7", "nan")
    assert not found.fullmatch("iter 7: loss 3.2145, time 45.1s, gpu0 7")
    assert not found.fullmatch("iter 7: loss 3,2145, time 45.1ms, gpu0 7")


def test_the_first_loss_of_a_line_is_its_loss():
    row = row_of_line(
        "| lm loss: 6.5E+00 | mtp_1 loss: 9.1 | loss scale: 1.0 | params norm: 99.5 |"
    )
    assert row == {"lm_loss": 6.5, "mtp_1_loss": 9.1}


def test_an_unusual_name_of_a_loss_is_taken_and_said():
    curve = curve_of_text(
        "".join(f"step {i} diffusion_loss={v}\n" for i, v in enumerate(healthy()))
    )
    assert curve.points("loss")[1].tolist() == healthy()
    assert "'diffusion_loss' was taken" in curve.notes[0]


def test_a_comma_in_the_clock_of_the_first_line_makes_no_table():
    lines = [
        f"2024-05-01 12:00:00,{i:03} INFO run, step {i} loss {v}" for i, v in enumerate(healthy())
    ]
    text = "\n".join(["2024-05-01 12:00:00,123 INFO Starting, please wait", *lines])
    for many in (1, 20):  # short, and so long that it is read by columns
        whole = text + "\n" + "\n".join(["2024-05-01 12:00:00,123 INFO saved, now"] * 100 * many)
        curve = curve_of_bytes(whole.encode())
        assert curve.points("loss")[1].tolist() == healthy()


def test_updates_that_another_tool_counts_as_skipped_are_no_missing_loss():
    text = "".join(f"step={i}, skipped=2, loss={v}\n" for i, v in enumerate(healthy()))
    assert not curve_of_text(text).nonfinite
    assert diagnose(curve_of_text(text)).healthy


# -- columns that may be the loss ---------------------------------------------


@pytest.mark.parametrize("rows", [5, 20_000])
def test_two_columns_by_one_name_are_said(rows: int):
    text = "step,loss,loss\n" + "".join(f"{i},{3 - i / rows},9\n" for i in range(rows))
    curve = curve_of_bytes(text.encode())
    assert curve.points("loss")[1][0] == 3.0
    assert curve.notes == (
        "two columns are called 'loss': the first was taken, not 'loss (column 3)'",
    )
    assert curve_of_bytes(text.encode(), loss="loss (column 3)").points("loss")[1][0] == 9.0


@pytest.mark.parametrize("head", ["lm_loss,loss,loss_scale,step", "loss,lm_loss,loss_scale,step"])
def test_the_plainest_name_is_the_loss(head: str):
    place = head.split(",").index("loss")
    rows = "".join(("2.5,9,1,{}\n" if place == 0 else "9,2.5,1,{}\n").format(i) for i in range(9))
    curve = curve_of_text(head + "\n" + rows)
    assert set(curve.points("loss")[1]) == {2.5}
    assert "'loss' was taken, by its name; not 'lm_loss'" in curve.notes[0]


@pytest.mark.parametrize("rows", [5, 5000])
def test_two_runs_in_a_long_table_are_asked_for(rows: int):
    text = "Run ID,key,value,step,timestamp\n" + "".join(
        f"{run},loss,{value - i / rows},{i},0\n"
        for i in range(rows)
        for run, value in (("a", 3), ("b", 5))
    )
    with pytest.raises(RecipeError, match="'a - loss', 'b - loss'"):
        curve_of_bytes(text.encode())
    assert curve_of_bytes(text.encode(), loss="b - loss").points("loss")[1][0] == 5.0


def test_steps_that_begin_again_with_every_epoch_are_no_resume():
    rows = "".join(f"{i // 50},{i % 50},{v}\n" for i, v in enumerate(healthy()))
    curve = curve_of_text("epoch,step,loss\n" + rows)
    assert len(curve.points("loss")[1]) == 300 and not curve.restarts
    assert "counted through" in curve.notes[0]


# -- odd curves ---------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "values",
    [
        [2.5] * 200,
        [0.0] * 200,
        [1e300 * (-1) ** i for i in range(200)],
        [1e308] * 100 + [-1e308] * 100,
        [math.inf] * 200,
        [2.5, math.inf] * 100,
        [math.nan] * 200,
        [2.5] * 199 + [1e308],
        [1e-308 * i for i in range(200)],
    ],
)
def test_odd_curves_end_in_no_warning(values: list[float]):
    columns = dict.fromkeys(("loss", "grad_norm", "eval_loss", "lr", "kl", "reward"), values)
    diagnose(curve_of_columns({"loss": values}))
    diagnose(curve_of_columns({**columns, "step": np.arange(len(values))}))
