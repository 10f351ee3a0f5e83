"""The script for a card, at toy size here: it runs, and a part that is wrong cannot hide."""

from __future__ import annotations

import argparse
import sys

import pytest
from benchmarks.gpu_check import BUDGETS, between, guarded, in_own_process, main, table
from benchmarks.gpu_check_parts import PARTS, compare, last_line
from benchmarks.gpu_check_rows import FULL, Row, as_json, from_json, plain_loss

from benchmarks import gpu_check, gpu_check_parts


def test_every_part_runs_and_what_is_equal_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Losses of SFT, DPO and sampling are compared with the plain network's inside."""
    parts = [part for part in PARTS if part != "run"]  # test_gpu_check_run has it
    assert main(["--toy", "--in-process", "--parts", *parts]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("**")  # the machine's name comes first
    for text in ("SFT, LoRA", "fp32 loss", "DPO, LoRA", "GRPO update", "lehr, fp8", "products"):
        assert text in printed
    assert "FAILED" not in printed and "NOT EQUAL" not in printed
    if not gpu_check.installed("trl"):
        assert printed.count("skipped: TRL is not installed here") == 2


def test_no_device_and_no_toy_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "--toy" in capsys.readouterr().out


def test_a_part_that_fails_is_a_row_and_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> list[Row]:
        raise ValueError("no kernel\nmore")

    monkeypatch.setitem(PARTS, "sft", broken)
    assert main(["--toy", "--in-process", "--parts", "sft", "gemm"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: ValueError: no kernel |" in printed
    assert "TFLOP/s" in printed  # the part after it ran


def test_another_loss_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault: a plain network that supervises other tokens."""
    monkeypatch.setattr(gpu_check_parts, "plain_loss", lambda *a: plain_loss(*a) + 0.02)
    assert main(["--toy", "--in-process", "--parts", "sft"]) == 1
    assert "NOT EQUAL: loss" in capsys.readouterr().out


def test_a_part_stops_by_itself_when_its_seconds_are_spent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BUDGETS, "bf16", 0)
    assert main(["--toy", "--in-process", "--parts", "bf16"]) == 0
    assert "stopped by its budget after 1 of 3 updates" in capsys.readouterr().out


def test_a_process_that_does_not_end_is_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    (row,) = guarded("sft", lambda: [Row("sft", "lehr", note=last_line(command, 0.2))])
    assert row.wrong and "not done within its budget of 0.2 s" in row.note


def test_a_process_that_fails_is_named_by_its_last_line() -> None:
    with pytest.raises(RuntimeError, match="gone"):
        last_line([sys.executable, "-c", "raise SystemExit('gone')"], 60)


def test_the_parts_run_in_processes_of_their_own() -> None:
    options = argparse.Namespace(toy=True, peer_python=None)
    (row,) = in_own_process("gemm", options, 600)
    assert row.system == "torch" and "TFLOP/s" in row.note


def test_all_parts_together_take_less_than_ten_minutes() -> None:
    assert BUDGETS.keys() == PARTS.keys()
    assert sum(BUDGETS.values()) <= 8 * 60


def test_the_network_has_a_billion_parameters() -> None:
    # 16 (2048 · 64 · 2 · (32 + 8) + 3 · 2048 · 8192) in the blocks, 2048 · 32768 in the head
    assert FULL.body == 16 * (10_485_760 + 50_331_648)
    assert FULL.body + FULL.head == 1_040_187_392


def test_rows_survive_the_way_between_processes() -> None:
    row = Row("SFT", "lehr", 12.0, 0.5, 1.5, "note", True, 6.25, [6.25, 6.0])
    assert from_json(as_json([row])) == [row]


def test_two_rows_are_compared() -> None:
    ours, peer = Row("SFT", "lehr", first=6.25), Row("SFT", "TRL", first=6.27)
    wide = Row("all", "lehr, bf16", rate=10.0, losses=[6.0, 5.0, 4.0])
    narrow = Row("all", "lehr, fp8", rate=15.0, losses=[6.0, 5.25])
    between([ours, peer, wide, narrow])
    assert peer.wrong and "2e-02 of 1e-02" in peer.note and not ours.wrong
    assert "+0.2500 of bf16's loss after update 2, 1.50 of its speed" in narrow.note


def test_the_table_marks_what_differs() -> None:
    row = Row("SFT", "lehr", 1234.4, 0.41, 2.0)
    compare(row, "loss", 6.0, float("nan"), 1e-2)
    assert table([row])[-1].startswith("| SFT | lehr | 1,234 | 41% | 2.00 | NOT EQUAL: loss 6.0000")
