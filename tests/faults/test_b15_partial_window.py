"""B15: the last, smaller update of a pass must not leak, vanish or be divided wrongly."""

import pytest
from rank_workers import Oracle, Weight
from small_runs import Cycle, lines_of, make_engine, make_pack

from lehr.errors import RecipeError
from lehr.training.optimizers import OptimizerSettings
from lehr.training.schedules import Schedule


def run(folder, micro_batches, updates, **changes):
    values = {
        "model": Weight(), "objective": Oracle(), "micro_batch": 1, "evaluate": None, "clip": None,
        "batches": Cycle([make_pack([1, 1])] * micro_batches, 4), "learning_rate": 1.0,
        "optimizer": OptimizerSettings("sgd"), "schedule": Schedule("constant", warmup=0),
    }  # fmt: skip
    engine = make_engine(folder, updates, **(values | changes))
    engine.run()
    return engine


def test_seven_micro_batches_three_passes(tmp_path):
    engine = run(tmp_path, micro_batches=7, updates=6)
    lines = lines_of(tmp_path)
    assert [line["supervised_tokens"] for line in lines] == [4, 3, 4, 3, 4, 3]
    assert [line["epoch"] for line in lines] == pytest.approx([4 / 7, 1, 11 / 7, 2, 18 / 7, 3])
    assert [line["grad_norm"] for line in lines] == [1.0] * 6
    assert engine.model.weight.item() == -6.0


def test_fewer_micro_batches_than_the_window(tmp_path):
    assert run(tmp_path, micro_batches=3, updates=1).model.weight.item() == -1.0


def test_a_window_of_zero_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="micro_batch"):
        run(tmp_path, micro_batches=3, updates=1, micro_batch=0)
