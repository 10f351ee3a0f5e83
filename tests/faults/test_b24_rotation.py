"""B24: rotation sorts by number, keeps the best, and touches no other run's folder."""

import pytest
import torch
from small_runs import make_engine

from lehr.training import checkpoint, events


def save(root, update, key="run", best=None):
    state = {"best_update": best}
    checkpoint.save(root, update, {"weights": {"w": torch.ones(2)}}, state, key)
    return checkpoint.rotate(root, key, update, KEPT[root.name], ())


KEPT = {"two": 2, "one": 1}


def numbers(root):
    return sorted(int(path.name.split("-")[1]) for path in root.iterdir())


@pytest.mark.parametrize(("best", "expected"), [(None, [10, 11]), (8, [8, 10, 11])])
def test_numbers_not_text(tmp_path, best, expected):
    for update in (8, 9, 10, 11):
        save(tmp_path / "two", update, best=best)
    assert numbers(tmp_path / "two") == expected


def test_numbers_wider_than_the_padding(tmp_path):
    for update in (999_999, 1_000_000, 1_000_001):
        save(tmp_path / "two", update)
    assert numbers(tmp_path / "two") == [1_000_000, 1_000_001]
    assert checkpoint.newest(tmp_path / "two", "run").checkpoint.update == 1_000_001


def test_a_higher_number_of_another_run(tmp_path):
    root = tmp_path / "one"
    checkpoint.save(root, 1000, {"weights": {"w": torch.zeros(2)}}, {}, "older run")
    save(root, 10)
    assert numbers(root) == [10, 1000]
    found = checkpoint.newest(root, "run")
    assert found.checkpoint.update == 10
    assert [(skipped.path.name, skipped.foreign) for skipped in found.skipped] == [
        ("update-001000", True)
    ]


def test_a_lower_number_of_another_run_is_not_rotated_away(tmp_path):
    root = tmp_path / "one"
    checkpoint.save(root, 3, {"weights": {"w": torch.zeros(2)}}, {}, "older run")
    for update in (10, 11):
        save(root, update)
    assert numbers(root) == [3, 11]


def test_the_new_one_is_whole_before_an_old_one_goes(tmp_path, monkeypatch):
    root = tmp_path / "one"
    save(root, 1)

    def fails(*arguments, **named):
        raise RuntimeError("killed here")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(RuntimeError):
        save(root, 2)
    assert numbers(root) == [1]


def test_the_engine_leaves_the_other_run_alone(tmp_path):
    root = tmp_path / "checkpoints"
    checkpoint.save(root, 1000, {"weights": {"w": torch.zeros(2)}}, {}, "older run")
    seen = []
    make_engine(tmp_path, 10, checkpoints_kept=1, observers=[seen.append]).run()
    assert numbers(root) == [10, 1000]
    skipped = [event for event in seen if isinstance(event, events.CheckpointSkipped)]
    assert [event.reason for event in skipped] == ["belongs to another run"]
