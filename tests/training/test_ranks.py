"""One process or several: the same update."""

import pytest
from rank_workers import precision_work, run_ranks, work
from small_runs import lines_of

from lehr.training.float8_recipe import Float8Settings
from lehr.training.loss_scale import LossScaleSettings
from lehr.training.schedules import Schedule


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    def start(size, micro_batch=2, unequal=False):
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        return folder, run_ranks(folder, size, work, micro_batch, unequal)

    return start


@pytest.fixture(scope="module")
def by_size(train):
    return {1: train(1, 12), 2: train(2, 3), 4: train(4, 1)}


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_and_micro_batches_do_not_change_the_update(by_size, size):
    alone, many = lines_of(by_size[1][0]), lines_of(by_size[size][0])
    assert len(many) == len(alone) == 12
    for one, other in zip(alone, many, strict=True):
        for name in ("loss", "grad_norm", "objective.accuracy", "source.small.loss"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), name
        for name in ("attempt", "update", "tokens", "supervised_tokens", "learning_rate"):
            assert one[name] == other[name]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_schedule_has_one_clock(by_size, size):
    rates = [line["learning_rate"] for line in lines_of(by_size[size][0])]
    assert rates == Schedule("linear", warmup=4, final=0.0).curve(1e-3, 12)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_the_same_weights_and_draw_other_numbers(by_size, size):
    folder, results = by_size[size]
    assert len({result["hash"] for result in results}) == 1
    for line in lines_of(folder):
        draws = [line[f"objective.draw_{rank}"] for rank in range(size)]
        assert len(set(draws)) == size


def test_metrics_that_only_one_rank_has_are_kept(by_size):
    line = lines_of(by_size[4][0])[0]
    assert {f"source.rank{rank}.loss" for rank in range(4)} <= line.keys()


def test_only_one_rank_writes(by_size):
    checkpoints = sorted(path.name for path in (by_size[4][0] / "checkpoints").iterdir())
    assert checkpoints == ["update-000006", "update-000012"]


def test_unequal_starts_are_refused(train):
    _, results = train(2, unequal=True)
    assert all("the same weights on every rank" in result["error"] for result in results)


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_ranks_agree_on_scales_and_on_what_is_skipped(tmp_path, name):
    """A scale that only one rank's packs overflow is lowered on all; amax is the largest of all."""
    fp8 = Float8Settings(scaling="delayed", window=2, convert=("up", "head"))
    keys = {
        "fp16": {"precision": "fp16", "loss_scale": LossScaleSettings(2.0**24)},
        "fp8": {"precision": "fp8", "fp8": fp8},
    }[name]
    first, second = run_ranks(tmp_path, 2, precision_work, keys)
    assert first == second
    rows = lines_of(tmp_path)
    assert rows[-1]["update"] == 6 and len(rows) == first["attempts"]
    assert (first["attempts"] > 6) == (name == "fp16")
