"""One verdict over all ranks: what one rank alone shows, all ranks skip, undo and pass over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_workers import joined, run_ranks
from small_runs import lines_of, weights_hash
from small_runs import rows as rows_of_a_pass
from test_guard_runs import SIZE, InOrder, Pull, engine, record

from lehr import ranks
from lehr.training import events
from lehr.training.quarantine import Quarantined, read_record

KICKED = 21
POISON = SIZE * (KICKED - 1) + 1  # a row of rank 1 alone: with two ranks the odd ones are its own


class Shared(InOrder):
    """This rank's part of every update: of 4n .. 4n + 3 each `world_size`-th row."""

    def next(self):
        return super().next()[ranks.rank() :: ranks.world_size()]


def guarded_work(
    rank: int, size: int, folder: Path, rows: dict[str, Any], given: Path | None
) -> None:
    """Train 60 updates; writes the final hash and what the guard did on this rank."""
    with joined(rank, size, folder):
        seen: list[Any] = []
        record_of: tuple[Quarantined, ...] = () if given is None else tuple(read_record(given))
        one = engine(
            folder,
            objective=Pull(**rows),
            batches=Shared(rows_of_a_pass(13), SIZE),
            quarantine=record_of,
            observers=[seen.append],
        )
        result = one.run()
        done = {
            "hash": weights_hash(one.model),
            "applied": result.updates,
            "skipped": result.skipped,
            "guard": one._store._guard.state(),
            "backs": [
                [event.undone, event.reached, list(event.attempts), list(event.origins)]
                for event in seen
                if isinstance(event, events.WentBack)
            ],
            "nonfinite": [e.attempt for e in seen if isinstance(e, events.NonFinite)],
        }
        (folder / f"result-{rank}.json").write_text(json.dumps(done))


@pytest.fixture
def two_ranks(tmp_path):
    def start(name: str, rows: dict[str, Any], given: Path | None = None):
        folder = tmp_path / name
        folder.mkdir()
        first, second = run_ranks(folder, 2, guarded_work, rows, given)
        assert first == second, "weights, windows and what was done are the same on both ranks"
        return folder, first

    return start


def test_a_record_that_poisons_one_rank_is_undone_on_all(two_ranks):
    poison = {"kicks": [POISON], "kick": 8.0 * SIZE}
    folder, run = two_ranks("run", poison)
    ((undone, reached, attempts, origins),) = run["backs"]
    assert attempts == [KICKED] and reached < KICKED <= undone
    (entry,) = record(folder)
    assert (entry.attempt, entry.rewind) == (KICKED, 1) and list(entry.origins) == origins
    assert set(origins) == {f"small.jsonl:{SIZE * (KICKED - 1) + n + 1}" for n in range(SIZE)}

    never, clean = two_ranks("never", poison, folder / "quarantine.jsonl")
    assert clean["hash"] == run["hash"] and clean["guard"] == run["guard"]
    assert clean["backs"] == [] and clean["skipped"] == 1
    assert lines_of(never) == lines_of(folder)


def test_nan_on_one_rank_is_skipped_on_all(two_ranks):
    _, run = two_ranks("nan", {"broken": [POISON]})
    assert run["nonfinite"] == [KICKED] and run["backs"] == []
    assert (run["applied"], run["skipped"]) == (60, 1)
