"""Batch norm: one step an update from pooled statistics, however it is cut or recomputed."""

import shutil

import pytest
import torch
from rank_workers import joined, run_ranks
from small_runs import Cycle, NextToken, Small, lines_of, make_engine, make_pack, rows, weights_hash
from torch import nn
from torch.utils.checkpoint import checkpoint

from lehr.errors import RecipeError
from lehr.streams import generator_for
from lehr.training import events
from lehr.training.averaging import AverageSettings
from lehr.training.batch_norm import (
    ALONE,
    UNLIKE,
    BatchNorms,
    BatchNormSettings,
    Pool,
    batch_norms,
    micro_batch_problems,
    reestimate_batch_norm,
)


def random(*shape, of="data"):
    return torch.randn(*shape, generator=generator_for(of, *shape), dtype=torch.float64)


def run(folder, updates=4, model=None, **changes):
    """A run on a module with a batch norm whose input does not depend on another one."""
    seen = []
    values = {"batches": Cycle(rows(12), 6), "micro_batch": 6, "evaluate": None} | changes
    model = model or Small(dropout=0.0, batch_norm=True)
    engine = make_engine(folder, updates, model=model, observers=[seen.append], **values)
    engine.run()
    return engine, seen


# --- the arithmetic ---------------------------------------------------------------------


def test_pooled_statistics_are_those_of_all_values():
    values = 100 + random(29, 3)
    pool = Pool.empty(values[0])
    for part in values.split([2, 20, 7]):
        pool.add(len(part), part.mean(0), part.var(0))
    mean, variance = pool.statistics()
    torch.testing.assert_close(mean, values.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(variance, values.var(0), rtol=0, atol=1e-10)


def test_the_running_statistics_are_an_average_over_the_unbiased_variance():
    """Closed form after k updates: m sum (1 - m)^(k - i) s_i + (1 - m)^k s_0."""
    model, m = nn.BatchNorm1d(3, momentum=0.3), 0.3
    norms = BatchNorms(model, BatchNormSettings())
    batches = [random(8, 3, of=n).float() * (n + 1) + n for n in range(4)]
    with norms.watched():
        for update, batch in enumerate(batches):
            norms.begin(update)
            for part in batch.split([3, 5]):
                with norms.counting():
                    model(part)
            assert model.num_batches_tracked == update  # nothing moves before the update
            norms.apply()
    k = len(batches)
    for buffer, first, of in (
        (model.running_mean, 0.0, lambda b: b.mean(0)),
        (model.running_var, 1.0, lambda b: b.var(0)),
    ):
        steps = sum(m * (1 - m) ** (k - 1 - i) * of(b) for i, b in enumerate(batches))
        torch.testing.assert_close(buffer, (1 - m) ** k * first + steps)
    assert model.num_batches_tracked == k and model.momentum == 0.3


def test_with_one_micro_batch_it_is_torchs_own_step():
    for momentum in (0.1, None):
        own, other = nn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
        norms = BatchNorms(own, BatchNormSettings())
        with norms.watched():
            for update in range(3):
                batch = random(4, 3, 5, 5, of=update).float()
                norms.begin(update)
                with norms.counting():
                    assert torch.equal(own(batch), other(batch))
                norms.apply()
        torch.testing.assert_close(own.state_dict(), other.state_dict())


def test_equal_micro_batches_equal_the_momentum_that_is_used_elsewhere():
    """k steps with momentum 1 - (1 - m)^(1/k) are one step with m where the batches are equal;
    k plain steps with m, which is what accumulation does in torch, are not."""
    batch, k, m = random(6, 2).float(), 4, 0.1
    own = nn.BatchNorm1d(2, momentum=m)
    adjusted, plain = nn.BatchNorm1d(2, momentum=1 - (1 - m) ** (1 / k)), nn.BatchNorm1d(2)
    norms = BatchNorms(own, BatchNormSettings())
    with norms.watched(), norms.counting():
        norms.begin(0)
        for _ in range(k):
            own(batch), adjusted(batch), plain(batch)
    norms.apply()
    torch.testing.assert_close(own.running_mean, adjusted.running_mean, rtol=0, atol=1e-7)
    # 4 x 6 values pooled have another unbiased variance than 6: 20/24 * 24/23
    biased = (own.running_var - 0.9) * 23 / 24
    torch.testing.assert_close(biased, (adjusted.running_var - 0.9) * 5 / 6, rtol=0, atol=1e-6)
    assert (plain.running_mean - own.running_mean).abs().max() > 0.01
    assert own.num_batches_tracked == 1 and plain.num_batches_tracked == 4


# --- in a run ---------------------------------------------------------------------------


def test_train_and_inference_differ_and_inference_ignores_the_batch():
    model = Small(dropout=0.0, batch_norm=True)
    ids = torch.tensor([1, 2, 3])
    model.eval()
    alone, beside = model(ids[:2]), model(ids)[:2]
    torch.testing.assert_close(alone, beside, rtol=0, atol=1e-6)
    model.train()
    assert (model(ids)[:2] - model(ids[:2])).abs().max() > 0.05


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_statistics_do_not_depend_on_the_cut(tmp_path, micro_batch):
    """Of the first update; later ones see other weights, since the gradient does depend."""
    whole, _ = run(tmp_path / "whole", 1)
    cut, _ = run(tmp_path / "cut", 1, micro_batch=micro_batch)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        one, other = getattr(whole.model.norm, name), getattr(cut.model.norm, name)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert cut.model.norm.num_batches_tracked == 1
    assert not torch.equal(whole.model.up.weight, cut.model.up.weight)


class Recomputed(Small):
    """Computes its normalised part again in the backward pass."""

    reentrant = False

    def forward(self, ids):
        def part(embedded):  # recomputation leaves the norm by an exception: nothing follows
            return self.norm(1.0 * embedded)

        found = checkpoint(part, self.embed(ids), use_reentrant=self.reentrant)
        return self.head(torch.tanh(self.up(found)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_counts_once_and_changes_no_bit(tmp_path, reentrant):
    plain, _ = run(tmp_path / "plain", micro_batch=2)
    model = Recomputed(0.0, batch_norm=True)
    model.reentrant = reentrant
    again, _ = run(tmp_path / "again", model=model, micro_batch=2)
    assert again.model.norm.num_batches_tracked == plain.model.norm.num_batches_tracked == 4
    assert weights_hash(again.model) == weights_hash(plain.model)
    assert lines_of(tmp_path / "again") == lines_of(tmp_path / "plain")
    torchs = Recomputed(0.0, batch_norm=True)  # the fault: torch counts both passes
    torchs.reentrant = reentrant
    torchs(torch.tensor([1, 2, 3])).sum().backward()
    assert torchs.norm.num_batches_tracked == 2


def rank_work(rank, size, folder):
    import json

    class Share(Cycle):
        def next(self):
            return super().next()[rank::size]

    with joined(rank, size, folder):
        model = Small(dropout=0.0, batch_norm=True)
        engine, _ = run(folder, 1, model=model, batches=Share(rows(12), 12), micro_batch=12)
        values = {name: value.tolist() for name, value in engine.model.norm.named_buffers()}
        (folder / f"result-{rank}.json").write_text(json.dumps(values))


def test_statistics_are_pooled_over_ranks(tmp_path):
    found = {}
    for size in (1, 3):
        (tmp_path / str(size)).mkdir()
        found[size] = run_ranks(tmp_path / str(size), size, rank_work)
    for values in found[3]:
        assert values["num_batches_tracked"] == 1
        for name in ("running_mean", "running_var"):
            assert values[name] == pytest.approx(found[1][0][name], rel=1e-5, abs=1e-6)


def test_the_statistics_of_a_skipped_update_are_forgotten(tmp_path):
    class Poison(NextToken):
        def loss(self, model, pack):
            loss = super().loss(model, pack)
            return type(loss)(loss.total * (float("nan") if self.calls == 2 else 1), loss.metrics)

    clean, _ = run(tmp_path / "clean", 2)

    class Twice(Cycle):  # the bad attempt sees the data of the next one
        taken = 0

        def next(self):
            found = super().next()
            self.taken += 1
            if self.taken == 2:
                self.position -= len(found)
            return found

    bad, _ = run(tmp_path / "bad", 2, objective=Poison(), batches=Twice(rows(12), 6))
    assert bad.progress.skipped == 1
    assert weights_hash(bad.model) == weights_hash(clean.model)


@pytest.mark.parametrize("after", [0, 2])
def test_frozen_statistics_stay_and_are_used(tmp_path, after):
    settings = BatchNormSettings(freeze_after=after)
    model = Small(dropout=0.0, batch_norm=True)
    before = {name: value.clone() for name, value in model.norm.named_buffers()}
    engine, _ = run(tmp_path, 5, model=model, batch_norm=settings)
    assert engine.model.norm.num_batches_tracked == after
    assert (engine.model.norm.running_mean.equal(before["running_mean"])) == (after == 0)
    assert engine.model.norm.weight.requires_grad and engine.model.norm.training
    shifts = ["batch_norm.mean_shift" in line for line in lines_of(tmp_path)]
    assert shifts == [index < after for index in range(5)]
    if after == 0:  # then the cut no longer matters
        other, _ = run(tmp_path / "cut", 5, micro_batch=2, batch_norm=settings)
        for one, two in zip(engine.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, at):
    def values():
        model = Small(batch_norm=True)
        return {
            "model": model,
            "evaluate": lambda update: {"loss": held_out(model)},
            "evaluate_every": 2,
            "micro_batch": 2,
            "batches": Cycle(rows(12), 6),
            "batch_norm": BatchNormSettings(freeze_after=4, reestimate_updates=2),
            "ema": AverageSettings(0.8),
            "promote": "best",
        }

    def copy(event):
        if isinstance(event, events.CheckpointWritten) and event.update == at:
            shutil.copytree(tmp_path / "straight", tmp_path / "stopped")

    straight = make_engine(tmp_path / "straight", 6, observers=[copy], **values())
    straight.run()
    seen = []
    resumed = make_engine(tmp_path / "stopped", 6, observers=[seen.append], **values())
    assert resumed.run().resumed_from == at
    assert weights_hash(resumed.model) == weights_hash(straight.model)
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "straight")
    assert not any(isinstance(event, events.ResumeInexact) for event in seen)


# --- averages, the gap, alarms ------------------------------------------------------------


def held_out(model):
    objective, packs = NextToken(), rows(5)
    total = sum(float(objective.loss(model, pack).total.detach()) for pack in packs)
    return total / sum(objective.weight(pack) for pack in packs)


def test_batch_norm_is_measured_anew():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=0.3), nn.Dropout(0.5))
    model.double().train()
    model[2].eval()
    data = random(20, 3)
    model(data * 100)  # statistics of other weights
    parts = data.split([2, 11, 7])
    assert reestimate_batch_norm(model, [lambda part=part: model(part) for part in parts]) == 1
    inner = model[0](data).detach()
    torch.testing.assert_close(model[1].running_mean, inner.mean(0))
    torch.testing.assert_close(model[1].running_var, inner.var(0))
    assert [module.training for module in model] == [True, True, False]
    assert model[1].momentum == 0.3 and model[1].num_batches_tracked == 1
    assert reestimate_batch_norm(nn.Linear(2, 2), []) == 0


def test_averaged_weights_get_statistics_of_their_own(tmp_path):
    """Those of the weights in training do not fit the average: here seen by the layer after."""
    values = {"ema": AverageSettings(0.9), "evaluate_every": 2, "learning_rate": 0.3}
    model = Small(dropout=0.0, batch_norm=True)
    seen = []
    engine, _ = run(
        tmp_path, 6, model=model, evaluate=lambda update: seen.append(held_out(model)) or
        {"loss": seen[-1]}, batch_norm=BatchNormSettings(gap=False), **values,
    )  # fmt: skip
    assert held_out(engine.model.eval()) == seen[-1]  # what is kept was evaluated
    batches, inner = Cycle(rows(12), 6), []
    for _ in range(8):
        ids = torch.cat([pack.ids for pack in batches.next()])
        inner.append(engine.model.embed(ids).detach())
    torch.testing.assert_close(engine.model.norm.running_mean, torch.cat(inner).mean(0))
    torch.testing.assert_close(engine.model.norm.running_var, torch.cat(inner).var(0))


def test_the_gap_between_the_modes_is_reported(tmp_path):
    model = Small(dropout=0.0, batch_norm=True)
    modes = []

    def evaluate(update):
        modes.append(model.norm.running_mean.clone())
        return {"loss": held_out(model)}

    _, seen = run(tmp_path, 4, model=model, evaluate=evaluate, evaluate_every=2)
    found = [event for event in seen if isinstance(event, events.BatchNormGap)]
    lines = lines_of(tmp_path)
    assert [event.update for event in found] == [2, 4]
    model.train()
    by_hand = held_out(model)  # after the measurements: it moves the statistics
    assert found[-1].as_in_training["loss"] == pytest.approx(by_hand, abs=1e-6)
    assert lines[3]["batch_norm.gap"] == pytest.approx(by_hand - lines[3]["evaluation.loss"])
    assert abs(lines[3]["batch_norm.gap"]) > 1e-3
    assert torch.equal(modes[2], modes[3])  # measuring moved nothing
    assert "batch_norm.gap" not in lines[0]
    silent, seen = run(
        tmp_path / "off", 4, evaluate=lambda update: {"loss": 1.0},
        batch_norm=BatchNormSettings(gap=False),
    )  # fmt: skip
    assert not any("batch_norm.gap" in line for line in lines_of(tmp_path / "off"))
    assert weights_hash(silent.model) == weights_hash(run(tmp_path / "none")[0].model)


def alarms(seen):
    return [(e.why, e.names) for e in seen if isinstance(e, events.BatchNormAlarm)]


def test_an_evaluation_in_train_mode_raises_the_alarm_and_moves_nothing(tmp_path):
    model = Small(dropout=0.0, batch_norm=True)

    def forgot(update):
        model.train()
        return {"loss": held_out(model)}

    engine, seen = run(tmp_path / "bad", 4, model=model, evaluate=forgot)
    assert alarms(seen) == [(UNLIKE, ("norm",))]
    plain, seen = run(tmp_path / "good", 4)
    assert alarms(seen) == [] and weights_hash(plain.model) == weights_hash(engine.model)


def test_a_norm_without_running_statistics_raises_the_same_alarm(tmp_path):
    model = Small(dropout=0.0)
    model.norm = nn.BatchNorm1d(8, track_running_stats=False)
    _, seen = run(tmp_path, 2, model=model, evaluate=lambda update: {"loss": held_out(model)})
    assert alarms(seen) == [(UNLIKE, ("norm",))] * len(alarms(seen)) and alarms(seen)


class Spread(Small):
    """Each pack is one image: its tokens are the places of the picture."""

    def __init__(self):
        super().__init__(dropout=0.0, batch_norm=True)

    def forward(self, ids):
        picture = self.embed(ids).T[None]  # [1, channels, places]
        return self.head(torch.tanh(self.up(self.norm(picture)[0].T)))


def test_a_batch_of_one_example_raises_the_alarm_once(tmp_path):
    _, seen = run(tmp_path, 3, model=Spread(), micro_batch=1)
    assert alarms(seen) == [(ALONE, ("norm",))]


def test_one_value_a_channel_is_refused_with_the_remedy(tmp_path):
    packs = [make_pack([1, 2]), make_pack([3, 4])]

    class First(NextToken):
        def loss(self, model, pack):
            one = make_pack([1, 2])
            logits = model(one.ids[:1])
            loss = nn.functional.cross_entropy(logits, one.targets, reduction="sum")
            return type(super().loss(model, pack))(loss, {})

    values = {"objective": First(), "batches": Cycle(packs, 2), "micro_batch": 1}
    with pytest.raises(RecipeError, match=r"batch norm norm, update 1: expected at least 2 values"):
        run(tmp_path / "bad", 1, **values)
    settings = BatchNormSettings(freeze_after=0)
    values["batches"] = Cycle(packs, 2)
    run(tmp_path / "frozen", 1, batch_norm=settings, **values)


def test_automatic_micro_batches_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    (problem,) = micro_batch_problems(model, "auto")
    assert problem.where == "micro_batch" and "batch norms (1)" in problem.expected
    assert micro_batch_problems(model, 4) == micro_batch_problems(nn.Linear(2, 2), "auto") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("freeze_after", -1), ("freeze_after", 1.5), ("freeze_after", True),
     ("reestimate_updates", 0), ("reestimate_updates", None)],
)  # fmt: skip
def test_bad_values_are_refused_before_anything_is_written(tmp_path, name, value):
    with pytest.raises(RecipeError, match=rf"batch_norm\.{name}") as caught:
        run(tmp_path / "run", batch_norm=BatchNormSettings(**{name: value}))
    assert len(caught.value.problems) == 1 and not (tmp_path / "run").exists()


def test_synchronised_norms_are_refused(tmp_path):
    model = Small(dropout=0.0)
    model.norm = nn.SyncBatchNorm(8)
    with pytest.raises(RecipeError, match="norm: expected a plain batch norm"):
        run(tmp_path / "run", model=model)


def test_hooks_are_gone_after_a_run(tmp_path):
    engine, _ = run(tmp_path, 1)
    norm = engine.model.norm
    assert batch_norms(engine.model) == {"norm": norm}
    assert not norm._forward_hooks and not norm._forward_pre_hooks and norm.momentum == 0.1
