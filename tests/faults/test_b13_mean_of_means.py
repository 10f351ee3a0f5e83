"""B13: the mean of micro-batch (or rank) means is not the mean over tokens."""

import pytest
from rank_workers import Oracle, Weight, oracle_work, run_ranks
from small_runs import Cycle, Small, lines_of, make_engine, make_pack, rows

from lehr.training.optimizers import OptimizerSettings
from lehr.training.schedules import Schedule


def test_uneven_micro_batches(tmp_path):
    """1 token at 4.0 and 9 at 1.0: 1.3; the mean of means would be 2.5, the sum 5.0."""
    packs = [make_pack([1, 1], item=4), make_pack([1] * 10, item=1)]
    engine = make_engine(
        tmp_path, 1, model=Weight(), objective=Oracle(), batches=Cycle(packs, 2), micro_batch=1,
        evaluate=None, optimizer=OptimizerSettings("sgd"), learning_rate=1.0, clip=None,
        schedule=Schedule("constant", warmup=0),
    )  # fmt: skip
    engine.run()
    (line,) = lines_of(tmp_path)
    assert line["loss"] == pytest.approx(1.3, rel=1e-6)
    assert line["objective.token_loss"] == pytest.approx(1.3, rel=1e-6)
    assert line["grad_norm"] == pytest.approx(1.0)
    assert engine.model.weight.item() == pytest.approx(-1.0)


def test_three_tokens_and_one(tmp_path):
    """Losses 1, 2, 3 in one micro-batch and 10 in the next: 16 / 4, not (2 + 10) / 2."""
    packs = [make_pack([1, 1], item=loss) for loss in (1, 2, 3, 10)]
    engine = make_engine(
        tmp_path, 1, model=Weight(), objective=Oracle(), batches=InOrder(packs, 4), micro_batch=3,
        evaluate=None, optimizer=OptimizerSettings("sgd"), learning_rate=1.0, clip=None,
        schedule=Schedule("constant", warmup=0),
    )  # fmt: skip
    engine.run()
    means = [(1 + 2 + 3) / 3, 10.0]
    assert lines_of(tmp_path)[0]["loss"] == 4.0 != sum(means) / 2 == 6.0
    assert engine.model.weight.item() == pytest.approx(-1.0), "an update counts once"


class InOrder(Cycle):
    """The rows as they stand."""

    def next(self):
        self.position += self.size
        return self.packs


def test_uneven_ranks(tmp_path):
    """6 tokens at 1.0 on one rank, 2 at 5.0 on the other: 2.0, not 3.0."""
    for result in run_ranks(tmp_path, 2, oracle_work, [6, 2], [1, 5]):
        assert result["loss"] == pytest.approx(2.0)
        assert result["weight"] == pytest.approx(-1.0)
    assert lines_of(tmp_path)[0]["objective.token_loss"] == pytest.approx(2.0)


def test_twelve_rows_cut_in_four_ways(tmp_path):
    lines = []
    for micro_batch in (1, 2, 4, 12):
        folder = tmp_path / str(micro_batch)
        make_engine(
            folder, 4, model=Small(dropout=0.0), batches=Cycle(rows(12), 12),
            micro_batch=micro_batch,
        ).run()  # fmt: skip
        lines.append(lines_of(folder))
    for other in lines[1:]:
        for one, two in zip(lines[0], other, strict=True):
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
            assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
