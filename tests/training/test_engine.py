import math
import threading

import pytest
import torch
from small_runs import (
    Cycle,
    NextToken,
    Small,
    lines_of,
    make_engine,
    make_pack,
    rows,
    weights_hash,
)
from torch import nn

from lehr.errors import Diverged, RecipeError
from lehr.objectives.base import Loss
from lehr.training import events
from lehr.training.optimizers import OptimizerSettings
from lehr.training.schedules import Schedule
from lehr.training.state import trained_parameters

PLAIN = Schedule("constant", warmup=0)


class Pull:
    """Gradient of the single weight is the number of pairs: closed forms by head."""

    def weight(self, pack):
        return float(pack.weights.sum())

    def loss(self, model, pack):
        return Loss(model.weight.sum() * pack.weights.sum())


def pull_engine(folder, packs, size, **changes):
    values = {
        "model": Weight(), "objective": Pull(), "batches": Cycle(packs, size), "evaluate": None,
        "learning_rate": 1.0, "schedule": PLAIN, "clip": None,
        "optimizer": OptimizerSettings("sgd"),
    }  # fmt: skip
    return make_engine(folder, **(values | changes))


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def test_one_update_is_gradient_of_the_sum_over_the_weight_of_all(tmp_path):
    engine = pull_engine(tmp_path, rows(6), 6, updates=3)
    result = engine.run()
    assert engine.model.weight.item() == -3.0
    assert (result.updates, result.attempts, result.skipped) == (3, 3, 0)
    assert [row["loss"] for row in lines_of(tmp_path)] == [0.0, -1.0, -2.0]


def test_line_of_metrics(tmp_path):
    packs = rows(4)
    make_engine(tmp_path, 1, batches=Cycle(packs, 4)).run()
    (row,) = lines_of(tmp_path)
    assert list(row)[:10] == [
        "stage", "attempt", "update", "epoch", "tokens", "supervised_tokens", "loss",
        "learning_rate", "grad_norm", "skipped",
    ]  # fmt: skip
    assert (row["stage"], row["attempt"], row["update"], row["epoch"]) == ("01-small", 1, 1, 1.0)
    assert row["tokens"] == sum(pack.tokens for pack in packs)
    assert row["supervised_tokens"] == row["tokens"] - 4
    assert row["skipped"] is False and "nonfinite" not in row
    assert {"objective.accuracy", "source.small.loss", "evaluation.loss"} <= row.keys()
    # every weight is 1 here, so the source's loss per token is the loss of the update
    assert row["source.small.loss"] == pytest.approx(row["loss"], rel=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 12])
def test_any_cut_is_the_same_update(tmp_path, micro_batch):
    def gradients(size):
        found = {}
        engine = make_engine(
            tmp_path / str(size), 1, model=Small(dropout=0.0), batches=Cycle(rows(12), 12),
            micro_batch=size,
        )  # fmt: skip
        for name, value in engine.model.named_parameters():
            value.register_post_accumulate_grad_hook(
                lambda p, name=name: found.__setitem__(name, p.grad.clone())
            )
        engine.run()
        return found, lines_of(tmp_path / str(size))[0]

    (one, line_one), (other, line_other) = gradients(4), gradients(micro_batch)
    for name, value in one.items():
        assert (value - other[name]).norm() <= 1e-5 * value.norm(), name
    for column in ("loss", "grad_norm", "evaluation.loss", "source.small.loss"):
        assert line_one[column] == pytest.approx(line_other[column], rel=1e-5)
    for column in ("tokens", "supervised_tokens", "objective.accuracy"):
        assert line_one[column] == line_other[column]


def test_an_update_without_supervision_is_an_error(tmp_path):
    silent = make_pack([1, 2, 3], item=6, weights=[0.0, 0.0])
    with pytest.raises(RecipeError, match=r"small\.jsonl:7.*nothing in this update is supervised"):
        make_engine(tmp_path, 1, batches=Cycle([silent], 1)).run()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_pack_without_supervision_does_not_exist(tmp_path):
    """Its loss would be NaN: it is never computed, and changes nothing."""

    class NanWhereSilent(NextToken):
        def loss(self, model, pack):
            loss = super().loss(model, pack)
            return Loss(loss.total * (1.0 if pack.weights.sum() else math.nan), loss.metrics)

    packs = rows(3)
    silent = make_pack([1, 2, 3], item=9, weights=[0.0, 0.0])
    hashes = []
    for name, these in (("without", packs), ("with", [*packs, silent])):
        engine = make_engine(
            tmp_path / name, 3, model=Small(0.0), objective=NanWhereSilent(),
            batches=Sorted(these), micro_batch=1,
        )  # fmt: skip
        assert engine.run().skipped == 0
        hashes.append(weights_hash(engine.model))
    assert hashes[0] == hashes[1]


class Sorted(Cycle):
    def __init__(self, packs):
        super().__init__(packs, len(packs))

    def next(self):
        self.position += len(self.packs)
        return list(self.packs)


def test_clip(tmp_path):
    engine = pull_engine(tmp_path, rows(4), 4, updates=2, clip=0.25)
    engine.run()
    assert engine.model.weight.item() == pytest.approx(-0.5, rel=1e-6)
    assert [row["grad_norm"] for row in lines_of(tmp_path)] == [1.0, 1.0]  # before clipping
    loose = pull_engine(tmp_path / "loose", rows(4), 4, updates=2, clip=5.0)
    loose.run()
    assert loose.model.weight.item() == -2.0


def test_schedule_is_read_at_the_applied_update(tmp_path):
    schedule = Schedule("linear", warmup=2, final=0.0)
    engine = pull_engine(tmp_path, rows(4), 4, updates=6, schedule=schedule, learning_rate=0.5)
    engine.run()
    assert [row["learning_rate"] for row in lines_of(tmp_path)] == schedule.curve(0.5, 6)
    assert engine.model.weight.item() == pytest.approx(-sum(schedule.curve(0.5, 6)))


def test_dropout_is_a_pure_function_of_update_and_micro_batch(tmp_path):
    hashes = set()
    for name in ("a", "b"):
        engine = make_engine(tmp_path / name, 5, model=Small(0.5))
        engine.run()
        hashes.add(weights_hash(engine.model))
    assert len(hashes) == 1


def test_evaluation_runs_in_eval_mode_and_disturbs_nothing(tmp_path):
    def noisy(model):
        def evaluate(update):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            torch.rand(100)
            return {"loss": 1.0}

        return evaluate

    hashes, model = set(), Small(0.3)
    for name, evaluate in (("with", noisy(model)), ("without", None)):
        engine = make_engine(
            tmp_path / name, 6, model=model if evaluate else Small(0.3), evaluate=evaluate
        )
        engine.run()
        hashes.add(weights_hash(engine.model))
    assert len(hashes) == 1


def test_modes_and_random_state_are_left_as_found(tmp_path):
    model = Small()
    model.eval()
    model.up.train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine = make_engine(tmp_path, 2, model=model)
    torch.set_rng_state(before)
    engine.run()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.up.training and not model.drop.training
    assert all(parameter.grad is None for parameter in model.parameters())


def scripted(values):
    """An evaluation that gives these losses in turn."""
    turn = iter(values)
    return lambda update: {"loss": next(turn), "other": 7.0}


def test_best_is_promoted_bit_for_bit(tmp_path):
    seen = {}
    engine = make_engine(
        tmp_path, 10, evaluate=scripted([3.0, 1.0, 2.0, math.nan, 1.0]), evaluate_every=2,
        promote="best", checkpoints_kept=1,
        observers=[lambda e: seen.setdefault(e.update, weights_hash(engine.model))
                   if isinstance(e, events.Evaluated) else None],
    )  # fmt: skip
    result = engine.run()
    assert (result.best_update, result.best_value, result.promoted_update) == (4, 1.0, 4)
    assert weights_hash(engine.model) == seen[4] != seen[10]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["update-000004", "update-000010"]
    lines = lines_of(tmp_path)
    assert lines[7]["evaluation.loss"] is None and lines[7]["nonfinite"] == ["evaluation.loss"]
    assert result.evaluations[3] == (8, {"loss": None, "other": 7.0})
    # The finished run, asked again, only restores.
    again = make_engine(
        tmp_path, 10, evaluate=scripted([]), evaluate_every=2, promote="best", checkpoints_kept=1
    )
    assert again.run().promoted_update == 4
    assert weights_hash(again.model) == seen[4]


def test_early_stop(tmp_path):
    engine = make_engine(
        tmp_path, 40, evaluate=scripted([3.0, 2.0, 2.0, 2.5, 0.0]), evaluate_every=3, early_stop=2
    )
    result = engine.run()
    assert (result.updates, result.stopped_early, result.promoted_update) == (12, True, 12)
    again = make_engine(tmp_path, 40, evaluate=scripted([]), evaluate_every=3, early_stop=2).run()
    assert (again.updates, again.stopped_early, again.resumed_from) == (12, True, 12)


def test_evaluation_after_the_last_update_only_once(tmp_path):
    at = []
    make_engine(
        tmp_path, 7, evaluate=lambda update: at.append(update) or {"loss": 1.0}, evaluate_every=7
    ).run()
    make_engine(
        tmp_path / "b", 8, evaluate=lambda update: at.append(update) or {"loss": 1.0},
        evaluate_every=3,
    ).run()  # fmt: skip
    assert at == [7, 3, 6, 8]


class Poison(NextToken):
    """The loss or one gradient is not finite at these calls (counted from 1)."""

    def __init__(self, at, gradient_only=False):
        super().__init__()
        self.at, self.gradient_only = set(at), gradient_only

    def loss(self, model, pack):
        loss = super().loss(model, pack)
        if self.calls not in self.at:
            return loss
        if self.gradient_only:  # the square root has no finite slope at 0
            return Loss(loss.total + (model.head.bias - model.head.bias).sum().sqrt(), {})
        return Loss(loss.total * math.inf, loss.metrics)


@pytest.mark.parametrize("gradient_only", [False, True])
def test_a_nonfinite_attempt_moves_nothing(tmp_path, gradient_only):
    seen, bad = [], []

    def watch(event):
        if isinstance(event, events.UpdateDone):
            seen.append(weights_hash(engine.model))
        if isinstance(event, events.NonFinite):
            bad.append(event)

    packs = rows(6)
    engine = make_engine(
        tmp_path, 5, objective=Poison({3}, gradient_only), batches=Cycle(packs, 3), micro_batch=3,
        model=Small(batch_norm=True), evaluate=None, observers=[watch],
    )  # fmt: skip
    result = engine.run()
    lines = lines_of(tmp_path)
    assert (result.updates, result.attempts, result.skipped) == (5, 6, 1)
    assert seen[1] == seen[2] != seen[3]  # weights, and running statistics
    assert [line["update"] for line in lines] == [1, 2, 2, 3, 4, 5]
    assert [line["attempt"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[2]["skipped"] and lines[2]["loss"] is None
    assert {"loss", "grad_norm"} <= set(lines[2]["nonfinite"])
    applied = [line["learning_rate"] for line in lines if not line["skipped"]]
    assert applied == [engine.settings.rate(index) for index in range(5)]
    (event,) = bad
    assert event.names[0] == ("gradient of head.bias" if gradient_only else "loss")
    assert len(event.origins) == 3 and set(event.origins) == set(lines[2]["origins"])
    assert result.tokens == sum(line["tokens"] for line in lines if not line["skipped"])


def test_only_the_micro_batch_that_is_not_finite_is_named(tmp_path):
    bad = []
    make_engine(
        tmp_path, 1, objective=Poison({2}), batches=Cycle(rows(6), 6), micro_batch=2,
        observers=[lambda e: bad.append(e) if isinstance(e, events.NonFinite) else None],
    ).run()  # fmt: skip
    assert [len(event.origins) for event in bad] == [2]


def test_too_many_in_a_row_stop_the_run_and_resume_goes_past_them(tmp_path):
    values = {"batches": Cycle(rows(6), 6), "evaluate": None, "micro_batch": 6}
    with pytest.raises(Diverged, match=r"3 attempts in a row.*update 2 stands"):
        make_engine(tmp_path, 4, objective=Poison({3, 4, 5}), **values).run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("update-*"))
    assert names == ["update-000001", "update-000002"]
    objective = Poison({1})  # computed attempts only: the known ones are not tried again
    result = make_engine(
        tmp_path, 4, objective=objective, **(values | {"batches": Cycle(rows(6), 6)})
    ).run()
    assert (result.updates, result.skipped, result.attempts) == (4, 4, 8)
    assert [line["update"] for line in lines_of(tmp_path)] == [1, 2, 2, 2, 2, 2, 3, 4]


def test_two_in_a_row_twice_are_no_divergence(tmp_path):
    values = {"batches": Cycle(rows(6), 6), "evaluate": None, "micro_batch": 6}
    result = make_engine(tmp_path, 4, objective=Poison({2, 3, 5, 6}), **values).run()
    assert (result.updates, result.skipped) == (4, 4)


def test_bad_settings_are_reported_together(tmp_path):
    with pytest.raises(RecipeError) as caught:
        make_engine(
            tmp_path / "x", 0, learning_rate=-1.0, clip=math.nan, micro_batch=0, promote="first",
            precision="fp12", early_stop=0, checkpoints_kept=0, nonfinite_limit=True,
        )  # fmt: skip
    assert {problem.where for problem in caught.value.problems} == {
        "updates", "learning_rate", "clip", "micro_batch", "promote", "precision", "early_stop",
        "checkpoints_kept", "nonfinite_limit",
    }  # fmt: skip
    assert not (tmp_path / "x").exists()


def test_best_needs_an_evaluation(tmp_path):
    with pytest.raises(RecipeError, match="something to evaluate"):
        make_engine(tmp_path, 1, evaluate=None, promote="best")


def test_what_cannot_be_trained_is_refused(tmp_path):
    frozen = Small()
    frozen.requires_grad_(False)
    with pytest.raises(RecipeError, match="at least one tensor"):
        make_engine(tmp_path, 1, model=frozen)
    with pytest.raises(RecipeError, match=r"fp32 for a trained tensor"):
        make_engine(tmp_path, 1, model=Small().to(torch.bfloat16))

    class Detached(NextToken):
        def loss(self, model, pack):
            return Loss(super().loss(model, pack).total.detach())

    with pytest.raises(RecipeError, match="depends on a trained tensor"):
        make_engine(tmp_path, 1, objective=Detached()).run()


def test_frozen_tensors_stay_and_only_trained_ones_are_saved(tmp_path):
    model = Small()
    model.embed.requires_grad_(False)
    before = model.embed.weight.clone()
    make_engine(tmp_path, 3, model=model).run()
    assert torch.equal(model.embed.weight, before)
    assert "embed.weight" not in trained_parameters(model)


def test_bf16_runs_the_products_in_bf16_and_keeps_fp32_weights(tmp_path):
    dtypes = set()
    model = Small(0.0)
    model.up.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    make_engine(tmp_path, 2, model=model, precision="bf16", evaluate=None).run()
    assert dtypes == {torch.bfloat16}
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_works_outside_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(make_engine(tmp_path, 2).run()))
    thread.start()
    thread.join()
    assert results[0].updates == 2


def test_an_engine_runs_once(tmp_path):
    engine = make_engine(tmp_path, 1)
    engine.run()
    with pytest.raises(RuntimeError, match="once"):
        engine.run()
