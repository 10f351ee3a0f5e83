"""B57: random streams differ between ranks, updates and micro-batches, and repeat with the seed."""

import itertools

import torch
from rank_workers import run_ranks, work
from small_runs import Cycle, NextToken, lines_of, make_engine, rows

from lehr.objectives.base import Loss


class Draws(NextToken):
    def __init__(self):
        super().__init__()
        self.drawn = []

    def loss(self, model, pack):
        if torch.is_grad_enabled():
            self.drawn.append(tuple(torch.rand(4).tolist()))
        loss = super().loss(model, pack)
        return Loss(loss.total)


def drawn(folder, updates=4):
    objective = Draws()
    make_engine(folder, updates, objective=objective, batches=Cycle(rows(6), 6)).run()
    return objective.drawn


def test_every_micro_batch_of_every_update_has_its_own(tmp_path):
    first = drawn(tmp_path / "a")
    assert len(set(first)) == len(first) == 12
    assert drawn(tmp_path / "b") == first


def test_ranks_have_their_own(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    lines = []
    for folder in folders:
        folder.mkdir()
        results = run_ranks(folder, 2, work, 12, False)
        assert len({result["hash"] for result in results}) == 1
        lines.append(lines_of(folder))
    assert lines[0] == lines[1]
    columns = ("objective.draw_0", "objective.draw_1")
    values = [line[column] for line, column in itertools.product(lines[0], columns)]
    assert len(set(values)) == 24
