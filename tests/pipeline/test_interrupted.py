"""Killed, interrupted, cut: the same command goes on, and ends with the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import (
    Heard,
    go,
    lora_recipe,
    metrics,
    read,
    stage,
    weights,
    weights_recipe,
    write_recipe,
)

from lehr.cli.main import main
from lehr.errors import Interrupted
from lehr.pipeline.run import run
from lehr.recipe.loading import load_recipe


def in_a_child(work: Callable[[], None]) -> int:
    """Exit status of a forked process that does `work`; -9 where it was killed."""
    child = os.fork()
    if child == 0:
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            work()
            os._exit(0)
        except SystemExit as leave:
            os._exit(int(leave.code or 0))
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Moments:
    """Counts the moments of a run (events, and effects on files); kills the process at one."""

    def __init__(self, deadly: int, tally: Path | None = None) -> None:
        self.count, self.deadly, self.tally = 0, deadly, tally

    def __call__(self, *_: Any) -> None:
        self.count += 1
        if self.count == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.tally is not None:
            self.tally.write_text(str(self.count))

    def before(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **keywords: Any) -> Any:
            self()
            return effect(*arguments, **keywords)

        return watched


def run_until(path: Path, deadly: int, tally: Path | None = None) -> int:
    """Run the recipe in a child that dies at moment `deadly`."""

    def work() -> None:
        moments = Moments(deadly, tally)
        os.fsync = moments.before(os.fsync)
        os.rename = moments.before(os.rename)
        os.replace = moments.before(os.replace)
        os.link = moments.before(os.link)
        run(load_recipe(path), listeners=[moments])

    return in_a_child(work)


def adapter_with_dropout() -> dict[str, Any]:
    """Dropout in the first stage: its random stream must be where it was."""
    recipe = lora_recipe(export="adapter")
    recipe["adapter"]["dropout"] = 0.2
    recipe["stages"][1]["preference"]["adapter"] = {"dropout": 0.0}
    recipe["stages"][0]["sft"]["keep"] = {"replay": {"text": 0.3}}
    recipe["data"]["text"] = {"path": "text.jsonl", "holdout": 8}
    return recipe


@pytest.mark.parametrize(("make", "kills"), [(weights_recipe, 2), (adapter_with_dropout, 3)])
def test_killed_at_random_moments_and_the_same_bits(work, make, kills):
    recipe = make()
    for entry in recipe["stages"]:  # two evaluations a stage, and a checkpoint every second update
        next(iter(entry.values())).update(evaluate_every=3, checkpoint_every=2)
    path = write_recipe(work, recipe | {"output": "whole"})
    tally = work / "moments"
    assert run_until(path, -1, tally) == 0
    moments = int(tally.read_text())
    assert moments > 100
    path = write_recipe(work, recipe)
    choose = random.Random(7)
    deaths = [run_until(path, choose.randrange(2, moments)) for _ in range(kills)]
    assert set(deaths) <= {0, -9}
    assert deaths.count(-9) >= 2, "the kills came too late to mean anything"
    ledger, out, _ = go(path)
    whole = work / "whole"
    folders = [entry["folder"] for entry in ledger.stages]
    assert len(folders) == 2
    for folder in folders:
        assert metrics(out / folder) == metrics(whole / folder)
    mine, theirs = weights(out), weights(whole)
    assert mine.keys() == theirs.keys() and len(mine) >= 8
    assert [name for name in mine if mine[name] != theirs[name]] == []
    before = read(whole / "ledger.json")
    assert [s["gates"] for s in before["stages"]] == [s["gates"] for s in ledger.stages]
    assert ledger.sentence == before["sentence"] and ledger.verdict == before["verdict"]
    for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_with_130_and_the_run_can_be_resumed(work, name):
    recipe = weights_recipe(export="merged", gates="none")
    recipe["stages"][0]["pretrain"]["max_updates"] = 400
    path = write_recipe(work, recipe)
    child = os.fork()
    if child == 0:
        status = 99
        with (work / "log").open("w") as sys.stdout:
            sys.stderr = sys.stdout
            try:
                main(["run", str(path)])
            except SystemExit as leave:
                status = int(leave.code or 0)
        os._exit(status)
    rows = work / "out" / "01-pretrain" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (rows.is_file() and rows.stat().st_size > 2000):
        time.sleep(0.02)
    os.kill(child, getattr(signal, name))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130, (work / "log").read_text()
    ledger = read(work / "out" / "ledger.json")
    assert ledger["verdict"] == "interrupted" and "Interrupted" in ledger["sentence"]
    assert name in (work / "log").read_text()
    assert (work / "out" / "report.html").is_file() and not (work / "out" / "model").exists()
    done = metrics(work / "out" / "01-pretrain")[-1]["update"]
    assert 0 < done < 400
    heard = Heard()
    stop_at_once = StopAfter(done + 1)
    with pytest.raises(Interrupted):
        run(load_recipe(path), listeners=[heard, stop_at_once])
    assert [event.data["update"] for event in heard.of("resumed")] == [done]


class StopAfter:
    """A listener that asks for an end after an update, as Ctrl-C would."""

    def __init__(self, update: int) -> None:
        self.update = update

    def __call__(self, event: Any) -> None:
        if event.kind == "update" and event.data["update"] == self.update:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted(path: Path, update: int) -> None:
    with pytest.raises(Interrupted):
        run(load_recipe(path), listeners=[StopAfter(update)])


def test_a_checkpoint_that_was_cut_is_named_and_the_one_before_is_used(work):
    recipe = weights_recipe(export="merged", gates="none")
    recipe["stages"] = recipe["stages"][:1]
    recipe["stages"][0]["pretrain"] |= {"max_updates": 8, "checkpoint_every": 2}
    path = write_recipe(work, recipe | {"output": "whole"})
    _, whole, _ = go(path)
    path = write_recipe(work, recipe)
    interrupted(path, 5)
    newest = work / "out" / "01-pretrain" / "checkpoints" / "update-000005"
    victim = newest / "optimizer.safetensors"
    victim.write_bytes(victim.read_bytes()[:-7])
    _, out, heard = go(path)
    [skipped] = heard.of("checkpoint_skipped")
    assert "update-000005" in skipped.text and "bytes instead of" in skipped.text
    assert [event.data["update"] for event in heard.of("resumed")] == [4]
    assert metrics(out / "01-pretrain") == metrics(whole / "01-pretrain")
    assert weights(out) == weights(whole)
    kinds = [json.loads(line)["kind"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert "checkpoint_skipped" in kinds


def test_a_pickle_in_a_checkpoint_is_refused_by_name(work):
    recipe = weights_recipe(gates="none")
    path = write_recipe(work, recipe)
    interrupted(path, 3)
    [newest] = [
        one
        for one in (work / "out" / "01-pretrain" / "checkpoints").iterdir()
        if one.name == "update-000003"
    ]
    (newest / "optimizer.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(Exception, match=r"optimizer\.pt: expected no pickle in a checkpoint"):
        go(path)
    assert read(work / "out" / "ledger.json")["verdict"] == "failed"
    assert not (work / "out" / "model").exists()


def test_what_auto_settled_is_kept_for_the_rest_of_the_run(work, monkeypatch):
    """Free memory differs from start to start; the micro-batch (and its bits) must not."""
    from lehr.pipeline import planning

    recipe = weights_recipe(gates="none")
    recipe["stages"] = [{"pretrain": stage("text", max_length=128, packing=False)}]
    path = write_recipe(work, recipe)
    monkeypatch.setattr(planning, "available_memory", lambda: 2**36)
    interrupted(path, 3)
    before = read(work / "out" / "plan.json")["stages"]
    assert before[0]["micro_batch"] == 6
    scarce = int(before[0]["memory"]["peak"] * 1.1)  # a new run would take fewer at once
    monkeypatch.setattr(planning, "available_memory", lambda: scarce)
    _, out, heard = go(path, "gates.protect.forgetting=9")
    after = read(out / "plan.json")["stages"]
    assert [one["micro_batch"] for one in after] == [one["micro_batch"] for one in before]
    assert not heard.of("resume_inexact")


def test_a_measured_precision_is_not_measured_again_on_the_same_machine(work, monkeypatch):
    from lehr.pipeline import planning

    path = write_recipe(work, lora_recipe(gates="none", export="merged"))
    interrupted(path, 2)
    known = planning.describe_machine

    def never(measure: bool = False, **device: Any) -> Any:
        assert not measure, "a timing must not decide twice"
        return known(**device)

    monkeypatch.setattr(planning, "describe_machine", never)
    go(path, "show=[something else]")


def test_what_goes_wrong_is_in_the_ledger(work, monkeypatch):
    from lehr.pipeline import stage_run

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(stage_run, "train_stage", break_down)
    with pytest.raises(RuntimeError):
        go(write_recipe(work, weights_recipe(gates="none")))
    ledger = read(work / "out" / "ledger.json")
    assert ledger["verdict"] == "failed" and "the sky fell" in ledger["sentence"]
