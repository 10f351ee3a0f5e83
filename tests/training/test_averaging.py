"""The moving average of the weights: its formula, its clock, its place in a run."""

import math
import shutil

import pytest
import torch
from small_runs import Cycle, Small, lines_of, make_engine, rows, weights_hash

from lehr.errors import RecipeError
from lehr.streams import generator_for
from lehr.training import events
from lehr.training.averaging import Average, AverageSettings


def follow(settings, walk):
    """The average after each of `walk`, which are the weights after updates 1, 2, ..."""
    weight = {"w": walk[0].clone()}
    average = Average(settings, weight, {})
    average.begin()
    seen = []
    for update, value in enumerate(walk[1:], start=1):
        weight["w"].copy_(value)
        average.follow(update)
        seen.append(average.tensors()["parameter.w"].clone())
    return seen, average


def random_walk(length):
    stream = generator_for("walk", length)
    return list(torch.randn(length, 3, generator=stream, dtype=torch.float64).cumsum(0))


def test_equals_the_explicit_sum():
    """b^t w0 + (1 - b) sum b^(t - i) w_i."""
    walk, b = random_walk(41), 0.9
    (*_, last), average = follow(AverageSettings(b, warmup=False), walk)
    t = len(walk) - 1
    expected = b**t * walk[0] + (1 - b) * sum(b ** (t - i) * walk[i] for i in range(1, t + 1))
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-12)
    assert average.count == t


def test_the_decay_warms_up():
    settings = AverageSettings(0.9)
    walk = random_walk(4)
    seen, _ = follow(settings, walk)
    expected = walk[0]
    for n, value in enumerate(walk[1:]):
        d = (1 + n) / (10 + n)
        expected = d * expected + (1 - d) * value
        torch.testing.assert_close(seen[n], expected, rtol=0, atol=1e-12)
    assert settings.decay_at(79) < 0.9 and settings.decay_at(80) == settings.decay_at(10**6) == 0.9


def test_it_starts_after_from_the_weights_then():
    walk = random_walk(6)
    seen, average = follow(AverageSettings(0.5, warmup=False, start_after=3), walk)
    torch.testing.assert_close(seen[3], (walk[3] + walk[4]) / 2)
    torch.testing.assert_close(seen[4], walk[3] / 4 + walk[4] / 4 + walk[5] / 2)
    assert average.count == 2


def test_swapping_keeps_every_bit_and_exceptions_swap_back():
    weight = {"w": torch.tensor([-0.0, 1e-45, 3.0, float("1e-20")])}
    average = Average(AverageSettings(0.3, warmup=False), weight, {})
    average.begin()
    weight["w"].add_(torch.tensor([0.0, 0.0, 1 / 3, 0.1]))
    average.follow(1)
    raw, averaged = weight["w"].clone(), average.tensors()["parameter.w"].clone()
    with pytest.raises(KeyError), average.swapped():
        assert weight["w"].numpy().tobytes() == averaged.numpy().tobytes()
        raise KeyError
    assert weight["w"].numpy().tobytes() == raw.numpy().tobytes()
    assert average.tensors()["parameter.w"].numpy().tobytes() == averaged.numpy().tobytes()


@pytest.mark.parametrize("policy", ["copy", "average", "measure"])
def test_buffers(policy):
    buffers = {"mean": torch.zeros(2), "count": torch.tensor(0)}
    average = Average(AverageSettings(0.5, warmup=False, buffers=policy), {}, buffers)
    average.begin()
    buffers["mean"] += 4
    buffers["count"] += 1
    average.follow(1)
    with average.swapped():
        assert buffers["mean"].tolist() == ([2.0, 2.0] if policy == "average" else [4.0, 4.0])
        assert buffers["count"].item() == 1
    assert buffers["mean"].tolist() == [4.0, 4.0]


# --- in a run -------------------------------------------------------------------------


def weights_after_each_update(folder, updates, **changes):
    """Weights of every update from its checkpoint, and the engine."""
    from safetensors.torch import load_file

    engine = make_engine(folder, updates, checkpoints_kept=99, **changes)
    engine.run()
    paths = sorted((folder / "checkpoints").glob("update-*"))
    return [load_file(path / "weights.safetensors") for path in paths], engine


def test_a_run_ends_with_the_average_of_its_weights(tmp_path):
    ema = AverageSettings(0.8, start_after=2)
    start = {f"parameter.{name}": v.detach().clone() for name, v in Small().named_parameters()}
    walk, engine = weights_after_each_update(tmp_path, 8, ema=ema)
    expected = walk[1]  # after update 2
    for n, weights in enumerate(walk[2:]):
        d = ema.decay_at(n)
        expected = {k: d * v + (1 - d) * weights[k] for k, v in expected.items()}
    assert start.keys() == expected.keys()
    for name, value in engine.model.named_parameters():
        torch.testing.assert_close(value.detach(), expected[f"parameter.{name}"])


def test_without_it_the_training_itself_is_the_same_bit_for_bit(tmp_path):
    plain, _ = weights_after_each_update(tmp_path / "plain", 6)
    averaged, _ = weights_after_each_update(tmp_path / "ema", 6, ema=AverageSettings(0.9))
    for one, other in zip(plain, averaged, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_evaluations_are_of_the_average_only_where_asked(tmp_path):
    values = {"evaluate_every": 2, "promote": "best"}
    seen = []
    plain = make_engine(tmp_path / "plain", 8, **values)
    plain.run()
    watched = make_engine(
        tmp_path / "watched", 8, ema=AverageSettings(0.9, evaluate=False), **values
    )
    assert watched.run().averaged == 0
    used = make_engine(
        tmp_path / "used", 8, ema=AverageSettings(0.9), observers=[seen.append], **values
    )
    result = used.run()
    losses = [[line.get("evaluation.loss") for line in lines_of(tmp_path / name)]
              for name in ("plain", "watched", "used")]  # fmt: skip
    assert losses[0] == losses[1] != losses[2]
    assert weights_hash(plain.model) == weights_hash(watched.model) != weights_hash(used.model)
    (promoted,) = [event for event in seen if isinstance(event, events.PromotedAverage)]
    assert promoted.count == result.averaged == promoted.update == result.promoted_update
    assert losses[2][result.best_update - 1] == pytest.approx(result.best_value)
    # What the model holds is what was evaluated.
    again = make_engine(
        tmp_path / "again", 1, model=used.model, learning_rate=0.0, evaluate_every=1
    )
    again.run()
    assert lines_of(tmp_path / "again")[0]["evaluation.loss"] == result.best_value


def test_skipped_updates_do_not_count(tmp_path):
    class Poisoned:
        """Its loss is NaN on the third attempt."""

        calls = 0

        def weight(self, pack):
            return float(pack.weights.sum())

        def loss(self, model, pack):
            from small_runs import NextToken

            loss = NextToken().loss(model, pack)
            Poisoned.calls += 1
            bad = Poisoned.calls == 3
            return type(loss)(loss.total * math.nan if bad else loss.total, loss.metrics)

    engine = make_engine(tmp_path, 4, objective=Poisoned(), ema=AverageSettings(0.9), micro_batch=5)
    result = engine.run()
    assert (result.skipped, result.attempts, result.averaged) == (1, 5, 4)


@pytest.mark.parametrize("at", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("promote", ["last", "best"])
def test_a_resumed_run_has_the_same_average(tmp_path, at, promote):
    values = {"ema": AverageSettings(0.9, start_after=2), "promote": promote, "evaluate_every": 2}

    def copy(event):
        if isinstance(event, events.CheckpointWritten) and event.update == at:
            shutil.copytree(tmp_path / "straight", tmp_path / "stopped")

    straight = make_engine(tmp_path / "straight", 8, observers=[copy], **values)
    straight.run()
    seen = []
    resumed = make_engine(tmp_path / "stopped", 8, observers=[seen.append], **values)
    assert resumed.run().resumed_from == at
    assert weights_hash(resumed.model) == weights_hash(straight.model)
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "straight")
    assert not any(isinstance(event, events.ResumeInexact) for event in seen)
    finished = make_engine(tmp_path / "stopped", 8, **values)  # nothing is left to do
    assert finished.run().resumed_from == 8
    assert weights_hash(finished.model) == weights_hash(straight.model)


def test_a_checkpoint_without_an_average_withdraws_the_promise(tmp_path):
    make_engine(tmp_path, 3).run()
    seen = []
    engine = make_engine(tmp_path, 5, ema=AverageSettings(0.9), observers=[seen.append])
    assert engine.run().averaged == 2
    (event,) = [event for event in seen if isinstance(event, events.ResumeInexact)]
    assert "settings.ema was None" in str(event)


@pytest.mark.parametrize(
    "changes",
    [
        {"decay": 1.0},
        {"decay": 0.0},
        {"decay": math.nan},
        {"decay": True},
        {"start_after": 12},
        {"start_after": -1},
        {"start_after": 1.5},
        {"buffers": "forget"},
    ],
)
def test_bad_values_are_refused_before_anything_is_written(tmp_path, changes):
    with pytest.raises(RecipeError, match=r"ema\.") as caught:
        make_engine(tmp_path / "run", 12, ema=AverageSettings(**changes))
    assert len(caught.value.problems) == 1 and not (tmp_path / "run").exists()


def test_running_statistics_of_a_run_follow_the_policy(tmp_path):
    hashes = set()
    for policy in ("copy", "average", "measure"):
        model = Small(batch_norm=True)
        values = {"batches": Cycle(rows(12), 6), "micro_batch": 6, "evaluate": None}
        ema = AverageSettings(0.9, buffers=policy)
        make_engine(tmp_path / policy, 4, model=model, ema=ema, **values).run()
        hashes.add(model.norm.running_mean.sum().item())
        assert model.norm.num_batches_tracked == 4
    assert len(hashes) == 3
