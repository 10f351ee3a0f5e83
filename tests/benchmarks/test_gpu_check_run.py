"""The part that runs `lehr run` itself: at toy size on a CPU it is killed, and goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from benchmarks.gpu_check_parts import Where
from benchmarks.gpu_check_rows import TOY
from benchmarks.gpu_check_run import first_difference, kill_half_way, launch, part_run


def test_a_killed_run_goes_on_and_is_said_to_be_equal() -> None:
    (row,) = part_run(Where("cpu", TOY, time.perf_counter() + 300))
    assert not row.wrong, row.note
    assert "on cpu" in row.note and "1 resume" in row.note
    assert "every column equal to the run without a kill" in row.note
    assert row.rate and len(row.losses) == 8


def test_a_run_that_ends_by_itself_is_no_kill(tmp_path: Path) -> None:
    process = launch(["run", str(tmp_path / "no.yaml")])
    process.wait()
    with pytest.raises(RuntimeError, match="ended before it was killed: no ledger"):
        kill_half_way(process, tmp_path, time.perf_counter() + 60)


def test_a_difference_is_named() -> None:
    rows = [{"update": 1, "loss": 2.0}, {"update": 2, "loss": 1.0}]
    assert first_difference(rows, rows) == ""
    assert first_difference(rows, rows[:1]) == "2 and 1 lines"
    assert first_difference(rows, [rows[0], rows[1] | {"x": 1}]) == "x of line 2: None and 1"
