"""A run that is stopped at any moment ends as the run that was not: bit for bit."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time

import pytest
import torch
from small_runs import Cycle, Small, lines_of, make_engine, rows, run_in_process, weights_hash

from lehr.errors import Interrupted, OutOfResources, RecipeError
from lehr.training import checkpoint, events

UPDATES = 12


def outcome(folder, model):
    return weights_hash(model), lines_of(folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run without a stop; `at(n)` is a copy of its folder as it was after update n."""
    folder = tmp_path_factory.mktemp("straight")
    copies = {}

    def watch(event):
        if isinstance(event, events.CheckpointWritten):
            copy = folder.parent / f"at-{event.update}"
            shutil.copytree(folder, copy)
            copies[event.update] = copy

    engine = make_engine(folder, UPDATES, observers=[watch], promote="best")
    engine.run()
    return folder, outcome(folder, engine.model), copies


@pytest.mark.parametrize("at", range(1, UPDATES))
def test_stopped_after_any_update(straight, at, tmp_path):
    _, expected, copies = straight
    folder = shutil.copytree(copies[at], tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"attempt": 13, "loss": 7.0}\n{"att')  # past the checkpoint, and torn
    seen = []
    engine = make_engine(folder, UPDATES, observers=[seen.append], promote="best")
    assert engine.run().resumed_from == at
    assert outcome(folder, engine.model) == expected
    (resumed,) = [event for event in seen if isinstance(event, events.ResumedFrom)]
    assert (resumed.update, resumed.lines_cut) == (at, 2)
    assert not any(isinstance(event, events.ResumeInexact) for event in seen)


def test_any_number_of_times(straight, tmp_path):
    _, expected, _ = straight

    def stop_at(update):
        def watch(event):
            if isinstance(event, events.UpdateDone) and event.row["update"] == update:
                os.kill(os.getpid(), signal.SIGINT)

        return watch

    for update in (1, 2, 5, 6, 11):
        engine = make_engine(tmp_path, UPDATES, observers=[stop_at(update)], promote="best")
        with pytest.raises(Interrupted, match=f"update {update}: SIGINT"):
            engine.run()
    engine = make_engine(tmp_path, UPDATES, promote="best")
    assert engine.run().resumed_from == 11
    assert outcome(tmp_path, engine.model) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_an_update_gives_it_up_after_the_micro_batch(straight, tmp_path, number):
    _, expected, _ = straight
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    model = Small()
    calls = []

    def forward(module, inputs, output):
        if module.training:
            calls.append(1)
            if len(calls) == 10:  # 3 micro-batches an update: the first of update 4
                os.kill(os.getpid(), number)

    model.register_forward_hook(forward)
    engine = make_engine(tmp_path, UPDATES, model=model, promote="best")
    with pytest.raises(Interrupted, match=f"update 3: {signal.Signals(number).name}"):
        engine.run()
    assert len(calls) == 10
    assert [line["update"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    resumed = make_engine(tmp_path, UPDATES, promote="best")
    assert resumed.run().resumed_from == 3
    assert outcome(tmp_path, resumed.model) == expected


def test_the_second_signal_stops_at_once(tmp_path):
    def twice(event):
        if isinstance(event, events.UpdateDone) and event.row["update"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    engine = make_engine(tmp_path, UPDATES, observers=[twice], checkpoint_every=100)
    with pytest.raises(Interrupted, match="second time"):
        engine.run()
    assert not (tmp_path / "checkpoints").exists()


def test_an_interrupt_in_the_last_update_still_ends_the_program(tmp_path):
    def last(event):
        if isinstance(event, events.UpdateDone) and event.row["update"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        make_engine(tmp_path, 2, observers=[last]).run()
    assert make_engine(tmp_path, 2).run().resumed_from == 2


def test_a_damaged_checkpoint_is_named_and_the_previous_used(straight, tmp_path):
    _, expected, copies = straight
    folder = shutil.copytree(copies[8], tmp_path / "run")
    path = folder / "checkpoints" / "update-000008" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    seen = []
    engine = make_engine(folder, UPDATES, observers=[seen.append], promote="best")
    assert engine.run().resumed_from == 7
    assert outcome(folder, engine.model) == expected
    (skipped,) = [event for event in seen if isinstance(event, events.CheckpointSkipped)]
    assert skipped.path.name == "update-000008" and "100 bytes" in skipped.reason


def test_no_checkpoint_left_starts_over(straight, tmp_path):
    _, expected, copies = straight
    folder = shutil.copytree(copies[5], tmp_path / "run")
    for path in folder.glob("checkpoints/update-*/state.json"):
        path.write_text("{")
    engine = make_engine(folder, UPDATES, promote="best")
    assert engine.run().resumed_from == 0
    assert outcome(folder, engine.model) == expected


def test_running_statistics_resume_too(tmp_path):
    hashes = []
    for name, stop in (("straight", None), ("stopped", 3)):
        values = {"batches": Cycle(rows(12), 6), "micro_batch": 6, "evaluate": None}
        folder = tmp_path / name
        if stop:
            make_engine(folder, 6, model=Small(batch_norm=True), **values).run()
            for update in (4, 5, 6):
                shutil.rmtree(folder / "checkpoints" / f"update-00000{update}", ignore_errors=True)
        values["batches"] = Cycle(rows(12), 6)
        engine = make_engine(folder, 6, model=Small(batch_norm=True), checkpoints_kept=9, **values)
        engine.run()
        hashes.append(outcome(folder, engine.model))
    assert hashes[0] == hashes[1]


def inexact(folder, monkeypatch=None, **changes):
    seen = []
    make_engine(folder, UPDATES, observers=[seen.append], promote="best", **changes).run()
    (event,) = [event for event in seen if isinstance(event, events.ResumeInexact)]
    return str(event)


def test_a_changed_environment_withdraws_the_promise(straight, tmp_path, monkeypatch):
    folder = shutil.copytree(straight[2][11], tmp_path / "run")
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "FUTURE")
    text = inexact(folder, micro_batch=1)
    assert text.startswith("resume is not bit-exact because ")
    assert f"threads was {threads}, is {threads + 1}" in text
    assert "cpu_capability was" in text and "settings.micro_batch was 2, is 1" in text


def test_lost_lines_withdraw_the_promise(straight, tmp_path):
    folder = shutil.copytree(straight[2][11], tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:8]))
    assert "metrics.jsonl lost 3 line(s)" in inexact(folder)


def test_checkpoints_of_another_run_are_in_the_way(straight, tmp_path):
    folder = shutil.copytree(straight[2][5], tmp_path / "run")
    with pytest.raises(RecipeError, match="another run's checkpoints") as caught:
        make_engine(folder, UPDATES, key="another").run()
    assert len(caught.value.problems) == len(list(folder.glob("checkpoints/update-*")))


def test_another_model_is_refused(straight, tmp_path):
    folder = shutil.copytree(straight[2][5], tmp_path / "run")
    model = Small()
    model.head = torch.nn.Linear(16, 12)
    with pytest.raises(RecipeError, match=r"head\.bias with shape \(12,\)"):
        make_engine(folder, UPDATES, model=model).run()


def test_no_room_for_the_checkpoints_is_said_before_the_first_update(tmp_path, monkeypatch):
    monkeypatch.setattr("lehr.training.resources.free_disk", lambda folder: 2 << 20)
    seen = []
    with pytest.raises(OutOfResources, match=r"3 checkpoint\(s\), 2\.00 MiB free"):
        make_engine(tmp_path, UPDATES, observers=[seen.append]).run()
    assert not any(isinstance(event, events.UpdateDone) for event in seen)


# --- fresh processes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh():
    """Starts `run_in_process` in a process that has run nothing yet."""
    context = multiprocessing.get_context("forkserver")
    # torch imports its compiler with the first optimizer: once here, not in every process
    context.set_forkserver_preload(["torch._dynamo", "lehr.training.engine"])

    def start(folder, stop_after=None, pause=0.0, die_at=None):
        arguments = (folder, UPDATES, stop_after, pause, die_at)
        process = context.Process(target=run_in_process, args=arguments)
        process.start()
        return process

    return start


def finish(process):
    process.join(60)
    return process.exitcode


@pytest.fixture(scope="module")
def uninterrupted(fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert finish(fresh(folder)) == 0
    return (folder / "hash").read_text(), lines_of(folder)


def test_five_and_seven_in_fresh_processes_are_twelve(fresh, uninterrupted, tmp_path):
    assert finish(fresh(tmp_path, stop_after=5)) == 1
    assert len(lines_of(tmp_path)) == 5
    assert finish(fresh(tmp_path)) == 0
    assert ((tmp_path / "hash").read_text(), lines_of(tmp_path)) == uninterrupted


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_a_random_moment(fresh, uninterrupted, tmp_path, seed):
    process = fresh(tmp_path, pause=0.01)
    moment = random.Random(seed)
    lines = moment.randrange(UPDATES)
    path = tmp_path / "metrics.jsonl"
    while process.is_alive() and not (path.exists() and path.read_bytes().count(b"\n") >= lines):
        time.sleep(0.001)
    time.sleep(moment.random() * 0.02)
    process.kill()
    finish(process)
    assert finish(fresh(tmp_path)) == 0
    assert ((tmp_path / "hash").read_text(), lines_of(tmp_path)) == uninterrupted


@pytest.mark.parametrize("operation", [1, 3, 5, 6, 7, 24])
def test_killed_inside_a_checkpoint(fresh, uninterrupted, tmp_path, operation):
    """Before the n-th fsync or rename of the run: every kind of step is met."""
    assert finish(fresh(tmp_path, die_at=operation)) == -signal.SIGKILL
    assert finish(fresh(tmp_path)) == 0
    assert ((tmp_path / "hash").read_text(), lines_of(tmp_path)) == uninterrupted
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_a_kill_between_saving_and_deleting_leaves_no_checkpoint_too_many(tmp_path):
    """The last save of a run has no later one that would tidy up after it."""
    make_engine(tmp_path, 4, checkpoint_every=1, checkpoints_kept=2).run()
    root = tmp_path / "checkpoints"
    names = sorted(path.name for path in root.glob("update-*"))
    assert names == ["update-000003", "update-000004"]
    body = json.loads((root / "update-000003" / "state.json").read_text())["body"]
    checkpoint.save(root, 2, {"weights": {}, "optimizer": {}}, body["state"], body["key"])
    assert checkpoint.folder_of(root, 2).is_dir()
    make_engine(tmp_path, 4, checkpoint_every=1, checkpoints_kept=2).run()
    assert sorted(path.name for path in root.glob("update-*")) == names
