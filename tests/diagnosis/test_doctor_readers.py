"""Foreign files: what tools export, what people paste, and what is broken."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from lehr.diagnosis.doctor import diagnose, doctor
from lehr.diagnosis.doctor_curve import canonical, curve_of_rows
from lehr.diagnosis.doctor_readers import curve_of_text, read_curve
from lehr.errors import RecipeError

LOSSES = [3.0, 2.5, 2.25, 2.0]

FORMATS = {
    "lehr": "".join(
        json.dumps({"update": i + 1, "loss": v, "evaluation.loss": v, "skipped": False}) + "\n"
        for i, v in enumerate(LOSSES)
    ),
    "trainer_state": json.dumps(
        {
            "epoch": 1.0,
            "log_history": [
                *({"step": i + 1, "loss": v, "learning_rate": 1e-4} for i, v in enumerate(LOSSES)),
                {"step": 4, "eval_loss": 2.1},
                {"step": 4, "train_loss": 2.4, "train_runtime": 10.0},
            ],
        }
    ),
    "wandb": '"Step","calm-1 - train/loss","calm-1 - train/loss__MIN","calm-1 - train/loss__MAX"\n'
    + "".join(f'"{i + 1}","{v}","{v}","{v}"\n' for i, v in enumerate(LOSSES)),
    "tensorboard": "Wall time,Step,Value\n"
    + "".join(f"{1e9 + i},{i + 1},{v}\n" for i, v in enumerate(LOSSES)),
    "tensorboard json": json.dumps([[1e9 + i, i + 1, v] for i, v in enumerate(LOSSES)]),
    "mlflow": "Run ID,key,value,step,timestamp\n"
    + "".join(f"a,loss,{v},{i + 1},0\na,lr,0.1,{i + 1},0\n" for i, v in enumerate(LOSSES)),
    "columns": json.dumps({"loss": LOSSES, "step": [1, 2, 3, 4]}),
    "list": json.dumps(LOSSES),
    "old line ends": "step,loss\r" + "".join(f"{i + 1},{v}\r" for i, v in enumerate(LOSSES)),
    "decimal commas": "step;loss\n1;3,0\n2;2,5\n3;2,25\n4;2,0\n",
    "decimal commas in quotes": 'step,loss\n1,"3,0"\n2,"2,5"\n3,"2,25"\n4,"2,0"\n',
    "decimal commas, pasted": "3,0; 2,5; 2,25; 2,0",
    "decimal commas in a log": "step 1 loss 3,0\nstep 2 loss 2,5\nstep 3 loss 2,25\n"
    "step 4 loss 2,0",
    "mlflow's own files": "".join(
        f"{1_700_000_000_000 + i} {v} {i + 1}\n" for i, v in enumerate(LOSSES)
    ),
    "newest first": "step,loss\n4,2.0\n3,2.25\n2,2.5\n1,3.0\n",
    "pasted": "3.0, 2.5\n2.25 2.0\n",
    "two columns": "".join(f"{i + 1} {v}\n" for i, v in enumerate(LOSSES)),
    "printed": "".join(
        f"{{'loss': {v}, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.{i}}}\n"
        for i, v in enumerate(LOSSES)
    ),
    "log": "".join(
        f"2024-01-01 12:00:0{i} iter {i + 1}: loss {v}, time 12.5ms, mfu 3.1%\n"
        for i, v in enumerate(LOSSES)
    ),
    "log with pipes": "".join(
        f"step: {i + 1} | loss: {v} | lr: 1.00E-05 | grad norm: 0.1\n" for i, v in enumerate(LOSSES)
    ),
    "semicolons": "step;train_loss;val_loss\n"
    + "".join(f"{i + 1};{v};\n" for i, v in enumerate(LOSSES)),
    "tabs and byte order mark": "\ufeffstep\tloss\n"
    + "".join(f"{i + 1}\t{v}\n" for i, v in enumerate(LOSSES)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_loss(name: str, tmp_path: Path):
    path = tmp_path / "curve.png"  # the name of a file says nothing
    path.write_text(FORMATS[name], encoding="utf-8")
    steps, values = read_curve(path).points("loss")
    assert values.tolist() == LOSSES
    assert steps.tolist() == [1, 2, 3, 4]


def test_utf_16_is_read(tmp_path: Path):
    path = tmp_path / "curve.csv"
    path.write_text("step,loss\n1,3.0\n2,2.5\n", encoding="utf-16")
    assert read_curve(path).points("loss")[1].tolist() == [3.0, 2.5]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("train/loss", "loss"),
        ("Loss", "loss"),
        ("eval/loss", "evaluation.loss"),
        ("val_loss", "evaluation.loss"),
        ("train/learning_rate", "learning_rate"),
        ("train/rewards/chosen", "chosen_reward"),
        ("eval_runtime", "eval_runtime"),
        ("eval_rewards/chosen", "eval_rewards/chosen"),
        ("something", "something"),
    ],
)
def test_spellings(name: str, known: str):
    assert canonical(name) == known


def test_the_mean_of_a_finished_run_is_no_curve():
    curve = curve_of_text(FORMATS["trainer_state"])
    assert curve.points("evaluation.loss")[1].tolist() == [2.1]


def test_a_loss_that_was_hidden_as_zero_is_not_finite():
    rows = [{"step": i, "loss": 2.0 - i / 50, "grad_norm": 1.0} for i in range(1, 20)]
    rows[9] = {"step": 10, "loss": 0.0, "grad_norm": math.nan}
    curve = curve_of_text(json.dumps({"log_history": rows}))
    assert [one.name for one in diagnose(curve).findings] == ["nan_at_step"]


# -- what logs do -------------------------------------------------------------


def test_a_restart_keeps_the_later_rows_and_is_known_as_a_resume():
    first = [{"step": i, "loss": 5.0 - i / 100} for i in range(1, 101)]
    again = [{"step": i, "loss": 4.5 - i / 100} for i in range(61, 161)]
    curve = curve_of_rows(first + again)
    assert curve.steps.tolist() == list(range(1, 161))
    assert curve.points("loss")[1][60] == pytest.approx(4.5 - 0.61)
    assert curve.restarts == (61.0,)
    assert "go back once" in curve.notes[0]
    assert [one.name for one in diagnose(curve).findings] == ["jump_at_resume"]


def test_steps_that_stand_twice_count_once():
    curve = curve_of_rows(
        [{"step": s, "loss": v} for s, v in [(1, 3.0), (2, 9.0), (2, 2.0), (3, 1.0)]]
    )
    assert curve.points("loss")[1].tolist() == [3.0, 2.0, 1.0]
    assert "stand twice" in curve.notes[0]


def test_an_evaluation_in_a_row_of_its_own_is_no_second_row():
    curve = curve_of_rows([{"step": 1, "loss": 3.0}, {"step": 1, "eval_loss": 2.9}])
    assert not curve.notes
    assert curve.points("evaluation.loss")[1].tolist() == [2.9]


def test_gaps_and_pauses_are_said():
    steps = [*range(1, 40), *range(5000, 5040)]
    rows = [{"step": s, "loss": 2.0, "wall_time": 10.0 * s} for s in steps]
    notes = " ".join(curve_of_rows(rows).notes)
    assert "a gap" in notes and "clock" in notes


def test_absent_values_are_not_numbers_that_are_not_finite():
    rows = [{"step": i, "loss": 2.0 if i % 2 else None} for i in range(40)]
    assert doctor(rows).healthy or "nan" not in doctor(rows).findings[0].name


def test_two_columns_without_names_keep_their_steps_over_a_restart():
    steps = [*range(0, 200, 5), *range(150, 400, 5)]
    curve = curve_of_text("".join(f"{s} {4.0 - s / 100}\n" for s in steps))
    assert curve.steps.tolist() == list(range(0, 400, 5)) and curve.restarts == (150.0,)
    assert curve.points("loss")[1][-1] == pytest.approx(4.0 - 3.95)


def test_a_list_in_lines_of_equal_length_is_a_list():
    text = "[4.1 3.9 3.8\n 3.7 3.75 3.6\n 3.5 3.4 3.3]"
    assert curve_of_text(text).points("loss")[1].tolist()[:4] == [4.1, 3.9, 3.8, 3.7]


def test_a_table_without_names_asks_for_them():
    with pytest.raises(RecipeError, match="names of the columns"):
        curve_of_text("".join(f"{i},{3 - i / 10},0.001\n" for i in range(10)))


def test_commas_that_may_be_thousands_are_no_loss():
    with pytest.raises(RecipeError, match="loss"):
        curve_of_text('step,loss\n1,"2,345"\n2,"2,211"\n')


def test_an_endless_word_is_no_table_and_does_not_hang():
    with pytest.raises(RecipeError):
        curve_of_text("a,b\n1," + "x" * 200_000 + "\n")


# -- refused, with what was seen ----------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "hello world",
        "{}",
        "[]",
        '{"a": "b"}',
        "a,b\nx,y\nz,w\n",
        "[[1], [2]]",
        "{{{{",
        "[" * 5000,
    ],
)
def test_what_is_no_curve_is_refused(text: str):
    with pytest.raises(RecipeError):
        curve_of_text(text)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\x89PNG\r\n\x1a\n....", "picture"),
        (b"PK\x03\x04....", "zip"),
        (b"\x1f\x8b....", "unpack"),
        (b"PAR1....", "Parquet"),
        (b'\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK"\t\x00brain.Event:2', "event files"),
    ],
)
def test_a_file_that_lies_is_named_for_what_it_is(content: bytes, word: str, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=word):
        read_curve(path)


def test_an_unknown_loss_is_asked_for_with_what_is_there():
    text = "step,alpha,beta\n1,3.0,9\n2,2.0,8\n"
    with pytest.raises(RecipeError) as caught:
        curve_of_text(text)
    assert "'alpha', 'beta'" in str(caught.value) and "--loss" in str(caught.value)
    assert curve_of_text(text, loss="beta").points("loss")[1].tolist() == [9, 8]
    with pytest.raises(RecipeError, match="'alpha'"):
        curve_of_text(text, loss="gamma")


def test_two_runs_in_one_table_are_asked_for():
    names = ["Step", *(f"{r} - {n}" for r in "ab" for n in ("loss", "loss__MIN", "lr"))]
    rows = [f"{i},{3 - i / 10},0,0.1,{5 - i / 10},0,0.2" for i in range(5)]
    text = "\n".join([",".join(names), *rows])
    with pytest.raises(RecipeError, match="'a - loss', 'b - loss'") as caught:
        curve_of_text(text)
    assert "--loss" in str(caught.value) and "__MIN" not in str(caught.value)
    curve = curve_of_text(text, loss="b - loss")
    assert curve.points("loss")[1][0] == 5 and set(curve.points("learning_rate")[1]) == {0.2}


def test_the_only_column_is_taken_and_said():
    curve = curve_of_text("step,ce\n1,3.0\n2,2.0\n")
    assert curve.points("loss")[1].tolist() == [3.0, 2.0]
    assert "'ce' was taken" in curve.notes[0]


def test_a_torn_last_line_is_left_out():
    assert curve_of_text(FORMATS["lehr"] + '{"update": 5, "lo').points("loss")[1].tolist() == LOSSES


def test_a_long_list_of_numbers_is_read(tmp_path: Path):
    path = tmp_path / "curve.csv"
    values = np.linspace(5.0, 2.0, 100_000)
    path.write_text("\n".join(f"{v:.4f}" for v in values))
    found = diagnose(read_curve(path))
    assert found.healthy and found.points == 100_000


@pytest.mark.parametrize("value", [1e308, -1e308, 0.0, -3.0])
def test_extreme_numbers_end_in_no_error(value: float):
    rows = [value if i % 7 == 0 else 1.0 + i / 100 for i in range(200)]
    assert doctor(rows).as_json()["healthy"] in (True, False)
