"""Guarded runs: a bad batch is skipped, or its damage undone, and the run ends bit for bit as
one that never saw it."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from small_runs import Cycle, lines_of, make_engine, make_pack, rows, weights_hash

from lehr.errors import Diverged, RecipeError
from lehr.objectives.base import Loss
from lehr.streams import generator_for
from lehr.training import events
from lehr.training.averaging import AverageSettings
from lehr.training.guard import GuardSettings
from lehr.training.optimizers import OptimizerSettings
from lehr.training.quarantine import read_record
from lehr.training.schedules import Schedule

REWIND, SKIP = GuardSettings("rewind"), GuardSettings("skip")
WIDTH, SIZE = 8, 4


class Point(torch.nn.Module):
    """A point that is pulled to the mean of the rows; a dropout beside it draws numbers."""

    def __init__(self):
        super().__init__()
        self.at = torch.nn.Parameter(torch.zeros(WIDTH))
        self.drop = torch.nn.Dropout(0.1)


class Pull:
    """L = ½ |at − x|² of each row. `kicks`: rows whose loss is as usual, but whose gradient is
    another: six times a row's, and wrong. `loud`: rows that lie far away. `broken`: NaN."""

    def __init__(self, kicks=(), loud=(), broken=(), kick=8.0):
        self.kicks, self.loud, self.broken, self.kick = kicks, loud, broken, kick

    def weight(self, pack):
        return float(len(pack.items))

    def loss(self, model, pack):
        total = torch.zeros(())
        for item in pack.items:
            x = torch.randn(WIDTH, generator=generator_for("x", item))
            x = model.drop(x) + (40.0 if item in self.loud else 0.0)
            one = 0.5 * (model.at - x).square().sum()
            if item in self.kicks:
                kick = self.kick * model.at.sum()
                one = one.detach() + kick - kick.detach()
            if item in self.broken:
                one = one * math.nan
            total = total + one
        return Loss(total)


class InOrder(Cycle):
    """Update n has the rows 4n .. 4n + 3, without end."""

    def next(self):
        self.position += 1
        first = SIZE * (self.position - 1)
        return [make_pack([1, 1], item) for item in range(first, first + SIZE)]


def engine(folder, updates=60, objective=None, **changes):
    values = {
        "model": Point(),
        "objective": objective or Pull(),
        "batches": InOrder(rows(13), SIZE),
        "optimizer": OptimizerSettings("sgd", momentum=0.5),
        "schedule": Schedule("cosine", warmup=4),
        "learning_rate": 0.5,
        "clip": None,
        "evaluate": None,
        "ema": AverageSettings(0.9),
        "checkpoint_every": 10,
        "micro_batch": SIZE,
        "guard": REWIND,
    }
    return make_engine(folder, updates, **(values | changes))


def outcome(folder, one):
    return weights_hash(one.model), lines_of(folder)


def record(folder):
    return read_record(folder / "quarantine.jsonl")


def test_the_guard_changes_nothing_of_a_healthy_run(tmp_path):
    plain = engine(tmp_path / "plain", guard=None)
    plain.run()
    guarded = engine(tmp_path / "guarded")
    guarded.run()
    first, second = outcome(tmp_path / "plain", plain), outcome(tmp_path / "guarded", guarded)
    assert first[0] == second[0]
    assert all(row.pop("update_norm") > 0 for row in second[1])
    assert first[1] == second[1]


def test_a_loud_batch_is_skipped_and_named(tmp_path):
    seen = []
    loud = Pull(loud=(4 * 29 + 2,))  # in the batch of attempt 30
    run = engine(tmp_path / "loud", objective=loud, guard=SKIP, observers=[seen.append])
    result = run.run()
    assert result.skipped == 1 and result.updates == 60
    row = lines_of(tmp_path / "loud")[29]
    assert (
        row["skipped"] and row["update"] == 29 and row["guard.signal"] in ("loss", "gradient norm")
    )
    assert row["guard.value"] > row["guard.limit"] > row["guard.usual"] and row["loss"] > 30
    assert "small.jsonl:119" in row["origins"]
    (event,) = [one for one in seen if isinstance(one, events.UpdateUnusual)]
    assert event.attempt == 30 and "limit" in event.why
    # nothing moved: the run of the other batches alone, from a record of this one
    entry = json.dumps(
        {"key": "", "attempt": 30, "update": 0, "why": "", "origins": [], "rewind": 0}
    )
    (tmp_path / "given.jsonl").write_text(entry + "\n")
    given = tuple(read_record(tmp_path / "given.jsonl"))
    other = engine(tmp_path / "other", objective=loud, guard=SKIP, quarantine=given)
    other.run()
    assert weights_hash(other.model) == weights_hash(run.model)


@pytest.mark.parametrize("kicked", [15, 21, 38])
def test_a_poisoned_batch_is_undone_bit_for_bit(tmp_path, kicked):
    """Its loss is as usual, so it is applied; what follows tells. The run goes back to a
    checkpoint and ends as the run that left it out from the start, and no other batch."""
    objective = Pull(kicks=range(SIZE * (kicked - 1), SIZE * kicked))
    seen = []
    run = engine(tmp_path / "run", objective=objective, observers=[seen.append])
    run.run()
    (back,) = [one for one in seen if isinstance(one, events.WentBack)]
    assert back.attempts == (kicked,) and back.reached < kicked <= back.undone
    (entry,) = record(tmp_path / "run")
    assert (entry.attempt, entry.rewind) == (kicked, 1)
    assert entry.origins == tuple(f"small.jsonl:{SIZE * (kicked - 1) + n + 1}" for n in range(SIZE))
    assert "3 of the last 8" in entry.why

    never = engine(tmp_path / "never", objective=objective, quarantine=(entry,))
    result = never.run()
    assert result.skipped == 1
    assert outcome(tmp_path / "run", run) == outcome(tmp_path / "never", never)
    undone = [json.loads(line) for line in (tmp_path / "run" / "undone.jsonl").open()]
    assert undone[-1]["rewind"] == 1 and undone[-1]["guard.signal"] == "loss"
    assert any(row["attempt"] == kicked and not row["skipped"] for row in undone)

    hurt = engine(tmp_path / "hurt", objective=objective, guard=None)
    hurt.run()
    assert weights_hash(hurt.model) != weights_hash(run.model), "the poison matters"


def test_a_run_that_went_back_resumes_exactly(tmp_path):
    """Stopped at every checkpoint, before and after: the same end, line by line."""
    objective = Pull(kicks=range(SIZE * 20, SIZE * 21))
    copies = []

    def copy(event):
        if isinstance(event, events.CheckpointWritten):
            place = tmp_path / f"copy-{len(copies)}"
            copies.append(shutil.copytree(tmp_path / "run", place))

    values = {"objective": objective, "checkpoint_every": 5}
    run = engine(tmp_path / "run", observers=[copy], **values)
    run.run()
    assert len(copies) > 12
    for place in copies:
        seen = []
        resumed = engine(place, observers=[seen.append], **values)
        resumed.run()
        assert outcome(place, resumed) == outcome(tmp_path / "run", run)
        assert record(place) == record(tmp_path / "run")
        assert not any(isinstance(one, events.ResumeInexact) for one in seen)


def test_killed_between_the_record_and_the_return(tmp_path, monkeypatch):
    objective = Pull(kicks=range(SIZE * 20, SIZE * 21))
    straight = engine(tmp_path / "straight", objective=objective)
    straight.run()

    def die(*_, **__):
        raise KeyboardInterrupt

    one = engine(tmp_path / "killed", objective=objective)
    monkeypatch.setattr(type(one._metrics), "keep_aside", die)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert [entry.attempt for entry in record(tmp_path / "killed")] == [21]
    assert (tmp_path / "killed" / "checkpoints" / "update-000020").exists()
    monkeypatch.undo()
    again = engine(tmp_path / "killed", objective=objective)
    again.run()
    assert outcome(tmp_path / "killed", again) == outcome(tmp_path / "straight", straight)


def test_going_back_is_bounded_and_ends_with_status_4(tmp_path):
    """From row 80 on every row is far away: no batch is to blame, so going back never helps."""
    seen = []
    objective = Pull(loud=range(80, 10_000))
    with pytest.raises(Diverged, match=r"3 of the last 8 .* went back 2 time") as caught:
        engine(
            tmp_path, objective=objective, guard=replace(REWIND, rewinds=2), observers=[seen.append]
        ).run()
    assert caught.value.exit_status == 4
    back = [one for one in seen if isinstance(one, events.WentBack)]
    assert [one.attempts for one in back] == [(20,), (18, 19, 21, 22, 23)]
    assert {entry.rewind for entry in record(tmp_path)} == {0, 1, 2}


def test_nan_that_stays_goes_back_too(tmp_path):
    """Three NaN in a row: the first return blames the batch before, the second them as well."""
    seen = []
    run = engine(tmp_path, objective=Pull(broken=range(80, 92)), observers=[seen.append])
    run.run()
    back = [one for one in seen if isinstance(one, events.WentBack)]
    assert [one.attempts for one in back] == [(20,), (18, 19, 21, 22, 23)]
    assert run.progress.update == 60 and torch.isfinite(run.model.at).all()


def test_skip_stops_where_skipping_does_not_help_and_the_same_command_goes_on(tmp_path):
    objective = Pull(loud=range(80, 92))
    with pytest.raises(Diverged, match="3 of the last 8"):
        engine(tmp_path, objective=objective, guard=SKIP).run()
    assert [entry.attempt for entry in record(tmp_path)] == [21, 22, 23]
    again = engine(tmp_path, objective=objective, guard=SKIP)
    assert again.run().skipped == 3


def test_stop_stops_at_the_first_one(tmp_path):
    objective = Pull(loud=(80,))
    with pytest.raises(Diverged, match=r"attempt 21 \(small.jsonl:81.*a usual update"):
        engine(tmp_path, objective=objective, guard=GuardSettings("stop")).run()
    assert lines_of(tmp_path)[-1]["attempt"] == 21


def test_no_saved_state_is_old_enough(tmp_path):
    objective = Pull(kicks=range(SIZE * 19, SIZE * 20))  # in the checkpoint of update 20
    values = {"objective": objective, "checkpoints_kept": 1}
    with pytest.raises(Diverged, match="no saved state is older"):
        engine(tmp_path, **values).run()


def test_a_record_of_other_rows_is_refused(tmp_path):
    engine(tmp_path / "run", objective=Pull(kicks=range(SIZE * 20, SIZE * 21))).run()
    given = (replace(record(tmp_path / "run")[0], origins=("other.jsonl:7",)),)
    with pytest.raises(RecipeError, match=r"guard\.quarantine.*other\.jsonl:7 in batch 21"):
        engine(tmp_path / "other", quarantine=given).run()
    (tmp_path / "bad.jsonl").write_text('{"attempt": 1}\n')
    with pytest.raises(RecipeError, match=r"bad\.jsonl:1"):
        read_record(tmp_path / "bad.jsonl")


def test_a_record_whose_files_were_moved_is_taken(tmp_path):
    first = engine(tmp_path / "run", objective=Pull(kicks=range(SIZE * 20, SIZE * 21)))
    first.run()
    (found,) = record(tmp_path / "run")
    origins = tuple(f"C:\\elsewhere\\{origin}" for origin in found.origins)
    moved = engine(tmp_path / "moved", quarantine=(replace(found, origins=origins),))
    moved.run()
    assert outcome(tmp_path / "moved", moved) == outcome(tmp_path / "run", first)


def test_not_finite_from_the_first_update_on_says_where_to_look(tmp_path):
    broken = {"objective": Pull(broken=range(10**4))}
    with pytest.raises(Diverged, match=r"(?s)loss.*no update of this run was finite.*--run-tests"):
        engine(tmp_path / "all", **broken).run()
    later = {"objective": Pull(broken=range(SIZE * 20, 10**4)), "checkpoints_kept": 1}
    with pytest.raises(Diverged, match=r"More checkpoints_kept \(now 1\)") as ended:
        engine(tmp_path / "later", **later).run()
    assert "no update of this run" not in str(ended.value)


def test_another_runs_record_is_kept_out(tmp_path):
    entry = {"key": "another", "attempt": 2, "update": 0, "why": "", "origins": [], "rewind": 0}
    (tmp_path / "quarantine.jsonl").write_text(json.dumps(entry) + "\n")
    assert engine(tmp_path, 4).run().skipped == 0


def test_the_guard_of_a_network_resumes_exactly(tmp_path):
    """AdamW, dropout, uneven updates: windows come back with the checkpoint."""
    values = {"guard": replace(REWIND, limit=1.0), "checkpoints_kept": 50, "learning_rate": 0.2}
    straight = make_engine(tmp_path / "straight", 40, batches=Cycle(rows(13), 2), **values)
    straight.run()
    assert straight.progress.skipped > 0, "a low limit finds something"
    for at in (10, 17, 30):
        place = tmp_path / f"at-{at}"
        shutil.copytree(tmp_path / "straight", place)
        for path in (place / "checkpoints").glob("update-*"):
            if int(path.name.partition("-")[2]) > at:
                shutil.rmtree(path)
        again = make_engine(place, 40, batches=Cycle(rows(13), 2), **values)
        assert again.run().resumed_from == at
        assert outcome(place, again) == outcome(tmp_path / "straight", straight)


def test_a_model_that_shows_no_attention_logits_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"guard\.attention_queries.*does not show"):
        engine(tmp_path, guard=replace(REWIND, attention_queries=1))
