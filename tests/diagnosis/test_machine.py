"""Describing a machine and choosing its precision; no test depends on how fast it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lehr.diagnosis import machine
from lehr.diagnosis.machine import choose_precision, describe_machine, measure_gemm
from lehr.pipeline.planning import machine_line


def test_describes_this_machine_as_json() -> None:
    found = describe_machine()
    assert found.cpu and found.cores >= 1 and found.threads >= 1
    assert 0 < found.memory_gib < 100_000
    row = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert {"cpu", "cores", "memory_gib", "device", "gemm_gflops"} <= set(row)


@pytest.mark.parametrize("system", ["Linux", "Darwin", "Windows", "Plan9", ""])
def test_never_fails_on_another_system(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(machine.platform, "system", lambda: system)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.delattr(machine.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(machine, "_first_line", lambda path: "")
    monkeypatch.setattr(machine, "_linux_cpu_name", lambda: "")
    found = describe_machine()
    assert found.cpu and found.cores >= 1


def test_container_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"memory.max": "1073741824", "cpu.max": "150000 100000"}
    monkeypatch.setattr(machine, "_first_line", lambda path: lines.get(Path(path).name, ""))
    assert describe_machine().memory_gib == 1.0
    assert describe_machine().cores <= 2
    lines["memory.max"] = "max"
    assert describe_machine().memory_gib > 1.0


def test_measures_a_rate() -> None:
    assert measure_gemm(torch.float32, seconds=0.01) > 0
    assert measure_gemm(torch.float32, seconds=0.0) > 0


def test_a_failing_product_is_rate_zero() -> None:
    assert measure_gemm(torch.bool, seconds=0.01) == 0.0


@pytest.mark.parametrize(
    ("single", "brain", "expected"),
    [
        (100.0, 120.0, "bf16"),
        (100.0, 119.0, "fp32"),
        (100.0, 400.0, "bf16"),
        (0.0, 400.0, "fp32"),
        (100.0, 0.0, "fp32"),
    ],
)
def test_bf16_only_where_it_gains(single: float, brain: float, expected: str) -> None:
    precision, why = choose_precision("auto", {"fp32": single, "bf16": brain})
    assert precision == expected and why


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_the_recipe_decides(asked: str) -> None:
    assert choose_precision(asked, {"fp32": 1.0, "bf16": 100.0})[0] == asked


def test_a_rate_is_that_of_a_quiet_machine_where_others_interrupt(monkeypatch) -> None:
    """Every product is interrupted for ten times its own time; the forecast must not be."""

    def interrupted(*_: object) -> None:
        until = machine.time.thread_time() + 0.002
        while machine.time.thread_time() < until:
            pass
        machine.time.sleep(0.02)

    monkeypatch.setattr(machine, "_product", interrupted)
    operations = 2.0 * math.prod(machine.GEMM_SIZES) / 1e9
    rate = measure_gemm(torch.float32, seconds=0.05)
    assert operations / 0.0025 < rate < operations / 0.0019
    found = describe_machine(measure=True)
    assert found.processor_share < machine.BUSY
    row = found.as_json() | {"threads": 1}
    said = machine_line(row, {"value": "fp32", "why": "x"})
    assert "busy: other programs had the processor" in said
    quiet = machine_line(row | {"processor_share": 0.95}, {"value": "fp32", "why": "x"})
    assert "busy" not in quiet
