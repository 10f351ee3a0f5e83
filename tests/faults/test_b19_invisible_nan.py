"""B19: a non-finite update is shown, not applied, and its batch is named."""

import json
import math

import pytest
import torch
from rank_workers import Weight
from small_runs import Cycle, lines_of, make_engine, make_pack, weights_hash

from lehr.errors import Diverged
from lehr.objectives.base import Loss
from lehr.training import events


class Losses:
    """Losses 2, 2, NaN, 2, 2, ... by the row; `until` = rows from there on are all NaN."""

    def __init__(self, bad):
        self.bad = bad

    def weight(self, pack):
        return 1.0

    def loss(self, model, pack):
        value = math.nan if self.bad(pack.items[0]) else 2.0
        return Loss(
            model.weight.sum() * 0.5 + torch.tensor(value) - model.weight.detach().sum() / 2
        )


class InOrder(Cycle):
    def next(self):
        self.position += 1
        return [self.packs[self.position - 1]]


def engine(folder, bad, updates, **changes):
    batches = InOrder([make_pack([1, 1], item) for item in range(20)], 1)
    return make_engine(
        folder, updates, model=Weight(), objective=Losses(bad), batches=batches, evaluate=None,
        **changes,
    )  # fmt: skip


def test_one_nan(tmp_path):
    hashes, named = [], []

    def watch(event):
        if isinstance(event, events.UpdateDone):
            hashes.append(weights_hash(run.model))
        if isinstance(event, events.NonFinite):
            named.append(event)

    run = engine(tmp_path, lambda item: item == 2, 3, observers=[watch])
    result = run.run()
    lines = lines_of(tmp_path)
    assert [line["loss"] for line in lines] == [2.0, 2.0, None, 2.0]
    assert "loss" in lines[2]["nonfinite"] and lines[2]["origins"] == ["small.jsonl:3"]
    assert hashes[2] == hashes[1] and len(set(hashes)) == 3
    assert result.skipped == 1 and result.updates == 3
    assert [event.origins for event in named] == [("small.jsonl:3",)]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_nan_that_stays_stops_the_run_and_keeps_the_good_checkpoint(tmp_path):
    with pytest.raises(Diverged, match=r"3 attempts in a row") as caught:
        engine(tmp_path, lambda item: item in (2, 3, 4), 6).run()
    assert caught.value.exit_status == 4
    good = tmp_path / "checkpoints" / "update-000002" / "state.json"
    assert json.loads(good.read_text())["body"]["update"] == 2
    before = good.read_bytes()
    with pytest.raises(Diverged):  # the same data again: passed over, then the next bad row
        engine(tmp_path, lambda item: item >= 2, 6).run()
    assert good.read_bytes() == before
    result = engine(tmp_path, lambda item: item in (2, 3, 4), 6).run()
    assert result.updates == 6 and result.skipped == 6
