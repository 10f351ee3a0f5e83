"""After update 1 a run says what its forecast was worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.pipeline.small import go, lora_recipe, stage, write_recipe

from lehr.pipeline.events import Events
from lehr.pipeline.memory_check import MemoryCheck
from lehr.training import events as engine
from lehr.training import resources


def updates_of(memory: dict[str, int], *rows: dict[str, Any], attempt: int = 0) -> list[Any]:
    heard: list[Any] = []
    check = MemoryCheck(Events(None, [heard.append]), memory, 2.0, torch.device("cpu"))
    check(engine.RunStarted(0, attempt, 3))
    for row in rows:
        check(engine.UpdateDone(row))
    return heard


def test_what_is_taken_and_was_not_forecast_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"seconds": 3.0, "skipped": False}
    monkeypatch.setattr("lehr.pipeline.memory_check.peak_since_mark", lambda: 2**40)
    (said,) = updates_of({"peak": 2**30}, row, row)
    assert said.kind == "forecast_checked" and "times as much" in said.text
    assert said.text.endswith("3.0 s, 2.0 s forecast")
    assert said.data["memory"]["measured"] == 2**40
    monkeypatch.setattr("lehr.pipeline.memory_check.peak_since_mark", lambda: 2**30)
    (said,) = updates_of({"peak": 2**30}, row)
    assert "times" not in said.text
    assert not updates_of({"peak": 1}, row, attempt=4), "a resumed run has no first update"
    assert not updates_of({"peak": 1}, row | {"skipped": True}, row)
    assert not updates_of({}, row), "nothing was forecast"


def test_a_mark_keeps_the_peak_of_the_whole_run() -> None:
    if not resources.reset_peak_memory():
        pytest.skip("this system has no high-water mark that can begin anew")
    block = torch.ones(20 * 2**20)  # 80 MiB
    peak = resources.peak_memory_gib()
    del block
    assert resources.mark_peak_memory()
    assert resources.peak_memory_gib() >= peak - 0.01, "the kernel counts pages in batches"
    assert 0 < resources.peak_since_mark() <= peak * 2**30 * 1.05


@pytest.mark.usefixtures("lean")
def test_a_run_says_it_once_a_stage(work: Any) -> None:
    recipe = lora_recipe(gates="none", export="adapter")
    recipe["stages"] = [{"sft": stage("chats", max_updates=2)}]
    _, _, heard = go(write_recipe(work, recipe))
    (said,) = heard.of("forecast_checked")
    taken, forecast = said.data["memory"]["measured"], said.data["memory"]["forecast"]
    assert said.text.startswith("after update 1:") and 0 < taken < 1.5 * forecast
