"""B17: the schedule counts applied updates, whatever the ranks and micro-batches."""

import math

import pytest
from rank_workers import run_ranks, work
from small_runs import Cycle, lines_of, make_engine, rows

from lehr.errors import RecipeError
from lehr.training.schedules import Schedule

SHAPE = Schedule("linear", warmup=4, final=0.0)


def test_the_same_rates_for_every_accumulation_and_number_of_ranks(tmp_path):
    """(i + 1) / 4 up to the peak at update 3, then ninths down: 0 would be update 12."""
    expected = [0.25, 0.5, 0.75, 1.0] + [n / 9 for n in range(8, 0, -1)]
    assert SHAPE.curve(1.0, 12) == pytest.approx(expected)
    assert SHAPE.curve(1.0, 12).count(1.0) == 1
    for micro_batch in (1, 3):
        folder = tmp_path / f"alone-{micro_batch}"
        values = {"batches": Cycle(rows(12), 12), "micro_batch": micro_batch, "evaluate": None}
        make_engine(folder, 12, schedule=SHAPE, learning_rate=1e-3, **values).run()
        assert [line["learning_rate"] for line in lines_of(folder)] == SHAPE.curve(1e-3, 12)
    for size in (2, 4):
        folder = tmp_path / f"ranks-{size}"
        folder.mkdir()
        run_ranks(folder, size, work, 3, False)
        assert [line["learning_rate"] for line in lines_of(folder)] == SHAPE.curve(1e-3, 12)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd", "constant"])
def test_corners_of_warmup(kind):
    assert Schedule(kind, warmup=0, decay=0.2, final=0.0).curve(1.0, 12)[0] == 1.0
    whole = Schedule(kind, warmup=12, decay=0, final=0.0).curve(1.0, 12)
    assert all(math.isfinite(rate) for rate in whole) and whole[-1] == 1.0
    with pytest.raises(RecipeError, match="no more than the 12 updates"):
        Schedule(kind, warmup=20).curve(1.0, 12)
