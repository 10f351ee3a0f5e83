import errno
import json
import os

import pytest
import torch

from lehr.errors import OutOfResources, RecipeError
from lehr.training import checkpoint

KEY = "this run"


def save(root, update, key=KEY, **state):
    tensors = {"w": torch.full((3, 2), float(update)), "b": torch.arange(4)}
    return checkpoint.save(root, update, {"weights": tensors, "optimizer": {}}, state, key)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_what_is_saved_is_read_back(tmp_path):
    path = save(tmp_path, 120, epoch=1.5, pair=(1, 2), by_number={2: "a", 10: "b"})
    assert path.name == "update-000120" and names(tmp_path) == ["update-000120"]
    found = checkpoint.newest(tmp_path, KEY).checkpoint
    assert found.update == 120
    expected = {"epoch": 1.5, "pair": [1, 2], "by_number": {"2": "a", "10": "b"}}
    assert found.state == expected
    assert torch.equal(found.tensors("weights")["w"], torch.full((3, 2), 120.0))
    assert found.tensors("optimizer") == {}


def test_tensors_that_share_a_storage(tmp_path):
    flat = torch.arange(6.0)
    files = {"weights": {"a": flat[:2], "b": flat[2:], "t": flat.view(2, 3).t()}}
    checkpoint.save(tmp_path, 1, files, {}, KEY)
    read = checkpoint.newest(tmp_path, KEY).checkpoint.tensors("weights")
    assert all(torch.equal(read[name], value) for name, value in files["weights"].items())


def test_nothing_yet(tmp_path):
    assert checkpoint.newest(tmp_path / "absent", KEY) == checkpoint.Found(None, ())
    assert checkpoint.clean(tmp_path / "absent") == []


@pytest.mark.parametrize("name", ["state.json", "weights.safetensors", "optimizer.safetensors"])
def test_cut_at_any_byte_or_changed_the_previous_one_is_used(tmp_path, name):
    save(tmp_path, 9)
    path = save(tmp_path, 10)
    whole = (path / name).read_bytes()
    damages = [whole[:size] for size in range(0, len(whole), 7)] + [whole[:-1], whole + b"\n "]
    damages += [
        whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, len(whole), 11)
    ]
    for content in damages:
        (path / name).write_bytes(content)
        found = checkpoint.newest(tmp_path, KEY)
        if name == "state.json" and json_equal(content, whole):
            continue  # white space or the case of an escape: the same state
        assert found.checkpoint.update == 9
        (skipped,) = found.skipped
        assert skipped.path == path and name in skipped.reason
    (path / name).unlink()
    assert name in checkpoint.newest(tmp_path, KEY).skipped[0].reason
    (path / name).write_bytes(whole)
    assert checkpoint.newest(tmp_path, KEY).checkpoint.update == 10


def json_equal(a, b):
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


def test_a_folder_where_a_file_should_be(tmp_path):
    path = save(tmp_path, 1)
    (path / "state.json").unlink()
    (path / "state.json").mkdir()
    assert "cannot be read" in checkpoint.newest(tmp_path, KEY).skipped[0].reason


@pytest.mark.parametrize("name", ["pytorch_model.bin", "deep/optimizer.pt", "x.pkl"])
def test_a_pickle_is_refused_by_name(tmp_path, name):
    path = save(tmp_path, 3)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(RecipeError, match=name):
        checkpoint.newest(tmp_path, KEY)


def test_a_damaged_one_is_replaced_by_the_new(tmp_path):
    path = save(tmp_path, 3)
    (path / "weights.safetensors").write_bytes(b"x")
    save(tmp_path, 3)
    assert checkpoint.newest(tmp_path, KEY).checkpoint.update == 3
    assert names(tmp_path) == ["update-000003"]


def test_leftovers_of_a_killed_process_are_cleaned_and_never_read(tmp_path):
    save(tmp_path, 3)
    (tmp_path / ".tmp-update-000004-77").mkdir()
    (tmp_path / ".tmp-old-update-000001-77").mkdir()
    assert checkpoint.newest(tmp_path, KEY).checkpoint.update == 3
    assert len(checkpoint.clean(tmp_path)) == 2
    assert names(tmp_path) == ["update-000003"]


@pytest.mark.parametrize("where", ["save_file", "fsync", "write_text"])
def test_disk_full_leaves_nothing_half_done(tmp_path, monkeypatch, where):
    save(tmp_path, 1)

    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = {
        "save_file": "safetensors.torch.save_file",
        "fsync": "os.fsync",
        "write_text": "pathlib.Path.write_text",
    }[where]
    monkeypatch.setattr(target, full)
    with pytest.raises(OutOfResources, match=r"needed, .* free"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["update-000001"]


def test_the_text_of_safetensors_own_error_is_understood(tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise RuntimeError("Error: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutOfResources):
        save(tmp_path, 2)


def test_too_little_room_is_seen_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("lehr.training.resources.free_disk", lambda folder: 1000)
    with pytest.raises(OutOfResources, match=r"1\.00 MiB for checkpoint update-000002, 0\.00 MiB"):
        save(tmp_path, 2)
    assert names(tmp_path) == []


def test_best_of_those_that_stay_stays_too(tmp_path):
    for update, best in ((2, 2), (4, 4), (6, 4), (8, 8)):
        save(tmp_path, update, best_update=best)
        checkpoint.rotate(tmp_path, KEY, update, 2, ())
    assert names(tmp_path) == ["update-000004", "update-000006", "update-000008"]


def test_the_one_just_written_stays_whatever_the_numbers_say(tmp_path):
    for update in (50, 10):
        save(tmp_path, update)
    checkpoint.rotate(tmp_path, KEY, 10, 1, [tmp_path / "update-000050"])
    assert names(tmp_path) == ["update-000010"]
