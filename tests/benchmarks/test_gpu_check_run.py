"""The part that runs `lehr run` itself: at toy size on a CPU it is killed, and goes on."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.gpu_check_parts import Where
from benchmarks.gpu_check_rows import TOY
from benchmarks.gpu_check_run import first_difference, kill_half_way, launch, part_run

from lehr.cli.main import main


class Forked:
    """`lehr` with these words in a forked process: nothing is imported again."""

    def __init__(self, words: Sequence[str]) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                os._exit(main(list(words)))
            except SystemExit as leave:
                os._exit(int(leave.code or 0))
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if found else None
        return self.status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)

    def wait(self, timeout: float | None = None) -> int:
        until = time.perf_counter() + (timeout or 300)
        while self.poll() is None:
            if time.perf_counter() > until:
                raise subprocess.TimeoutExpired("lehr", timeout or 300)
            time.sleep(0.01)
        assert self.status is not None
        return self.status


def test_a_killed_run_goes_on_and_is_said_to_be_equal() -> None:
    (row,) = part_run(Where("cpu", TOY, time.perf_counter() + 300), Forked)
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
