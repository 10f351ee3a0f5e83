import errno

import pytest

from lehr.errors import OutOfResources
from lehr.training import resources


def test_disk(tmp_path):
    missing = tmp_path / "not" / "yet"
    assert resources.free_disk(missing) > 0
    resources.require_disk(missing, 1)
    with pytest.raises(OutOfResources, match=r"GiB for checkpoints, .* free"):
        resources.require_disk(missing, 2**60, what="checkpoints")


def test_memory():
    resources.require_memory(1)
    with pytest.raises(OutOfResources, match=r"GiB for training, .* available"):
        resources.require_memory(2**60)


def test_a_control_group_lowers_what_is_available(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    assert resources.available_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert resources.available_memory() > 2000


def test_peak_memory_is_plausible():
    assert 0.01 < resources.peak_memory_gib() < 1000


def test_only_a_full_disk_becomes_out_of_resources(tmp_path):
    with pytest.raises(PermissionError), resources.disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(OutOfResources, match="room on the disk"), resources.disk_errors(tmp_path):
        raise OSError(errno.EDQUOT, "quota")
