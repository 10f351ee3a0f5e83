"""Restarts of the optimizer: its first step is a first step again, the rate climbs as it says,
and a resume or a kill at any place repeats them."""

from __future__ import annotations

import shutil

import pytest
import torch
from small_runs import Cycle, lines_of, make_engine, rows
from test_guard_runs import SIZE, Pull, engine, outcome

from lehr.errors import RecipeError
from lehr.streams import generator_for
from lehr.training import events
from lehr.training.guard import GuardSettings
from lehr.training.optimizers import OptimizerSettings, make_optimizer, set_rate
from lehr.training.restarts import Restarts, RestartSettings, climb
from lehr.training.schedules import Schedule


def of(returned_to=None, **settings):
    return Restarts(RestartSettings(**settings), lambda: returned_to)


def test_where_they_lie_and_how_the_rate_climbs():
    planned = of(every=10, warmup=4, initial=0.2)
    assert [planned.last(update) for update in (0, 9, 10, 19, 20)] == [None, None, 10, 10, 20]
    shares = [planned.share(update) for update in (9, 10, 11, 12, 13, 14)]
    assert shares == pytest.approx([1.0, 0.4, 0.6, 0.8, 1.0, 1.0])
    back = of(returned_to=13, after_rewind=True, warmup=2)
    assert [back.last(update) for update in (12, 13, 40)] == [None, 13, 13]
    assert [back.share(update) for update in (12, 13, 14, 15)] == [1.0, 0.5, 1.0, 1.0]
    both = of(returned_to=13, every=10, after_rewind=True)
    assert [both.last(update) for update in (12, 13, 19, 20)] == [10, 13, 13, 20]
    assert of(returned_to=13, every=10).last(15) == 10, "not asked for"
    assert climb(0, 0, 0.5) == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings("adamw", betas=(0.9, 0.99)),
        OptimizerSettings("sgd", momentum=0.9),
        OptimizerSettings("muon"),
    ],
)
def test_the_first_step_after_one_is_that_of_a_new_optimizer(settings):
    def parameters():
        stream = generator_for("restart")
        return {"up.weight": torch.nn.Parameter(torch.randn(4, 6, generator=stream))}

    old, fresh = parameters(), parameters()
    used, new = (make_optimizer(one, settings) for one in (old, fresh))
    restarts = of(every=5)
    for update in range(12):
        set_rate(used, 0.1)
        stream = generator_for("gradient", update)
        old["up.weight"].grad = torch.randn(4, 6, generator=stream)
        if restarts.begin(used, update):
            fresh["up.weight"].data.copy_(old["up.weight"])
            new.state.clear()
            fresh["up.weight"].grad = old["up.weight"].grad.clone()
            set_rate(new, 0.1)
            new.step()
            used.step()
            assert torch.equal(old["up.weight"], fresh["up.weight"]), update
        else:
            used.step()


def test_adamw_steps_by_its_rate_at_each_one(tmp_path):
    """|first step| of AdamW is the rate in every element, whatever the gradient."""
    values = {"optimizer": OptimizerSettings("adamw"), "learning_rate": 0.1, "ema": None}
    values |= {"restart": RestartSettings(every=7, warmup=3), "guard": GuardSettings("skip")}
    engine(tmp_path, 20, schedule=Schedule("constant", warmup=0), **values).run()
    lines = lines_of(tmp_path)
    assert [row["update"] for row in lines if row.get("restarted")] == [8, 15]
    rates = [row["learning_rate"] for row in lines]
    assert rates[6:11] == pytest.approx([0.1, 0.1 / 3, 0.2 / 3, 0.1, 0.1])
    for at in (0, 7, 14):  # the norm of eight elements
        assert lines[at]["update_norm"] == pytest.approx(rates[at] * 8**0.5, rel=1e-3)
    assert lines[6]["update_norm"] < 0.9 * 0.1 * 8**0.5


def test_without_moments_only_the_rate_changes(tmp_path):
    values = {"restart": RestartSettings(every=10, moments=False, warmup=5), "guard": None}
    engine(tmp_path / "rate", 30, **values).run()
    engine(tmp_path / "plain", 30, guard=None).run()
    first, second = (lines_of(tmp_path / name) for name in ("rate", "plain"))
    assert first[:10] == second[:10] and first[10] != second[10]
    assert first[10]["learning_rate"] == pytest.approx(second[10]["learning_rate"] / 5)


def test_a_resume_at_every_update_repeats_them(tmp_path):
    values = {
        "restart": RestartSettings(every=5, warmup=3, initial=0.1),
        "guard": GuardSettings(),
        "checkpoints_kept": 50,
    }
    straight = make_engine(tmp_path / "straight", 16, batches=Cycle(rows(13), 2), **values)
    straight.run()
    assert sum("restarted" in row for row in lines_of(tmp_path / "straight")) == 3
    for at in (4, 5, 6, 11):
        place = shutil.copytree(tmp_path / "straight", tmp_path / f"at-{at}")
        for path in (place / "checkpoints").glob("update-*"):
            if int(path.name.partition("-")[2]) > at:
                shutil.rmtree(path)
        again = make_engine(place, 16, batches=Cycle(rows(13), 2), **values)
        assert again.run().resumed_from == at
        assert outcome(place, again) == outcome(tmp_path / "straight", straight)


def test_after_a_return_and_after_a_kill_in_the_middle_of_it(tmp_path, monkeypatch):
    values = {
        "objective": Pull(kicks=range(SIZE * 20, SIZE * 21)),
        "restart": RestartSettings(after_rewind=True, warmup=8, initial=0.1),
    }
    seen = []
    run = engine(tmp_path / "run", observers=[seen.append], **values)
    run.run()
    (back,) = [one for one in seen if isinstance(one, events.WentBack)]
    lines = lines_of(tmp_path / "run")
    assert [row["update"] for row in lines if "restarted" in row] == [back.reached + 1]
    plain = engine(tmp_path / "plain", objective=values["objective"])
    plain.run()
    shares = [
        one["learning_rate"] / other["learning_rate"]
        for one, other in zip(lines, lines_of(tmp_path / "plain"), strict=True)
        if back.reached < one["update"] and not one["skipped"]
    ]
    assert shares[:3] == pytest.approx([climb(n, 8, 0.1) for n in range(3)])
    assert shares[7:] == pytest.approx([1.0] * len(shares[7:]))

    def die(*_, **__):
        raise KeyboardInterrupt

    one = engine(tmp_path / "killed", **values)
    monkeypatch.setattr(type(one._metrics), "keep_aside", die)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    monkeypatch.undo()
    again = engine(tmp_path / "killed", **values)
    again.run()
    assert outcome(tmp_path / "killed", again) == outcome(tmp_path / "run", run)


@pytest.mark.parametrize(
    "restart, others, message",
    [
        ({}, {}, "every: updates"),
        ({"every": 0}, {}, r"restart\.every"),
        ({"every": 5, "warmup": 6}, {}, "never gets up"),
        ({"every": 60}, {}, "less than the stage's 60 updates, or nothing restarts"),
        ({"after_rewind": True, "warmup": 60}, {}, "less than the stage's 60 updates"),
        ({"every": 5, "warmup": -1}, {}, r"restart\.warmup"),
        ({"every": 5, "initial": 2.0}, {}, r"restart\.initial"),
        ({"every": 5, "moments": False}, {}, "nothing restarts"),
        ({"every": 5}, {"optimizer": OptimizerSettings("sgd")}, "no moments"),
        ({"after_rewind": True}, {"guard": GuardSettings("skip")}, "guard: rewind"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, restart, others, message):
    with pytest.raises(RecipeError, match=message):
        engine(tmp_path, restart=RestartSettings(**restart), **others)
