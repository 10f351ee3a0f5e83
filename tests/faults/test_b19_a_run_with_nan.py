"""B19, the whole run: a NaN is said, counted and not applied; NaN that stays ends with status 4."""

from __future__ import annotations

import json

import pytest
import torch
from tests.pipeline.fixtures import lean, one_measurement, saved_base, work  # noqa: F401
from tests.pipeline.small import go, lora_recipe, metrics, read, stage, write_recipe

from lehr.errors import Diverged
from lehr.objectives.base import Loss
from lehr.objectives.language import Language

pytestmark = pytest.mark.usefixtures("lean")

HONEST = Language.loss


def poison(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """The loss of the attempts in `bad` is NaN."""
    count = 0

    def loss(self, model, pack):
        nonlocal count
        count += 1
        found = HONEST(self, model, pack)
        factor = torch.tensor(float("nan")) if count in bad else 1.0
        return Loss(found.total * factor, found.metrics)

    monkeypatch.setattr(Language, "loss", loss)


def recipe(guard: str = "rewind") -> dict:
    made = lora_recipe(gates="none", export="adapter")
    keys = stage("chats", packing=True, micro_batch=8, checkpoint_every=1, guard=guard)
    return made | {"stages": [{"sft": keys}]}


def test_one_nan_is_visible_and_not_applied(work, monkeypatch):  # noqa: F811
    poison(monkeypatch, {3})
    _, out, heard = go(write_recipe(work, recipe()))
    rows = metrics(out / "01-sft")
    assert [row["update"] for row in rows] == [1, 2, 2, 3, 4, 5, 6]
    assert rows[2]["loss"] is None and rows[2]["skipped"] and "loss" in rows[2]["nonfinite"]
    assert all("chats.jsonl:" in origin for origin in rows[2]["origins"])
    [event] = heard.of("nonfinite")
    assert "update 3 skipped, no weight changed" in event.text and "chats.jsonl:" in event.text


def test_nan_that_stays_ends_the_run_and_leaves_it_resumable(work, monkeypatch):  # noqa: F811
    path = write_recipe(work, recipe("skip"))
    poison(monkeypatch, set(range(3, 100)))
    with pytest.raises(Diverged) as caught:
        go(path)
    assert caught.value.exit_status == 4 and "3 attempts in a row" in str(caught.value)
    out = work / "out"
    ledger = read(out / "ledger.json")
    assert ledger["verdict"] == "diverged" and "attempts in a row" in ledger["sentence"]
    assert not (out / "model").exists()
    report = (out / "report.html").read_text()
    assert "diverged" in report
    good = out / "01-sft" / "checkpoints" / "update-000002" / "state.json"
    assert json.loads(good.read_text())["body"]["update"] == 2
    monkeypatch.undo()
    ledger, _, heard = go(path)
    assert [event.data["update"] for event in heard.of("resumed")] == [2]
    assert ledger.verdict == "promoted" and ledger.stages[0]["updates"] == 6


def test_going_back_does_not_hide_nan_that_stays(work, monkeypatch):  # noqa: F811
    path = write_recipe(work, recipe())
    poison(monkeypatch, set(range(3, 100)))
    with pytest.raises(Diverged, match="3 attempts in a row") as caught:
        go(path)
    assert caught.value.exit_status == 4
    assert read(work / "out" / "ledger.json")["verdict"] == "diverged"
    monkeypatch.undo()
    ledger, out, _ = go(path)
    assert ledger.verdict == "promoted" and ledger.stages[0]["updates"] == 6
    assert [row["update"] for row in metrics(out / "01-sft") if not row["skipped"]] == [
        *range(1, 7)
    ]
