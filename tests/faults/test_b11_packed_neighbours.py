"""B11: a sample in a pack attends to its neighbour although positions restart.

huggingface/nanoVLM#204. The fault itself (one segment over the whole pack with
restarted positions) is put in by the last test.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

for _folder in ("models", ""):
    sys.path.insert(0, str(Path(__file__).parent.parent / _folder))

from families import model_of  # noqa: E402

import oracle  # noqa: E402
from lehr.data.shapes import Pack, Segments  # noqa: E402
from lehr.models.probe import probe_pack  # noqa: E402

A = torch.tensor([11, 23, 8, 41, 3])
B = torch.tensor([5, 17, 60, 33, 9, 72, 28])


def _pack(first: torch.Tensor = A) -> Pack:
    return probe_pack([(first, -1), (B, -1)])


def _scores(model, pack: Pack) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.hidden(pack)
        return model.token_stats(hidden, pack.predict_from, pack.targets).log_probability


def test_targets_and_positions():
    pack = _pack()
    assert len(pack.targets) == 10
    assert pack.positions.tolist() == [*range(5), *range(7)]


def test_packed_equals_alone_and_a_changed_neighbour_changes_nothing():
    model = model_of("Llama")
    pack = _pack()
    packed = _scores(model, pack)
    alone = torch.cat([_scores(model, probe_pack([(ids, -1)])) for ids in (A, B)])
    assert (packed - alone).abs().max() <= 1e-4
    assert (packed.sum() - alone.sum()).abs() <= 1e-4
    assert (packed - oracle.pack_log_probabilities(model.network, pack)).abs().max() <= 1e-4
    changed = _scores(model, _pack(A + 7))
    assert (packed[4:] - changed[4:]).abs().max() <= 1e-6


def test_with_the_fault_the_check_fails():
    model = model_of("Llama")

    def leaking(pack: Pack) -> Pack:
        whole = Segments(torch.tensor([0]), torch.tensor([12]), torch.tensor([-1]))
        return dataclasses.replace(pack, segments=whole)

    packed, changed = (_scores(model, leaking(pack)) for pack in (_pack(), _pack(A + 7)))
    assert (packed[4:] - changed[4:]).abs().max() > 1e-2
