import json
import math
from pathlib import Path

import pytest
import torch

from lehr.errors import OutOfResources
from lehr.training.metrics import MetricsFile, MetricSums, strict


def test_sums_of_tensors_and_numbers():
    sums = MetricSums()
    sums.add({"a": (torch.tensor(2.0), 4), "b": (1.0, torch.tensor(2, dtype=torch.int64))})
    sums.add({"a": (torch.tensor(1.0, dtype=torch.float64), 2.0), "none": (0.0, 0.0)})
    assert sums.means() == {"a": 0.5, "b": 0.5}


def test_strict_json():
    row = strict({"loss": math.nan, "norm": math.inf, "x": 1.0, "nonfinite": ["gradient"]})
    assert row == {"loss": None, "norm": None, "x": 1.0, "nonfinite": ["gradient", "loss", "norm"]}
    json.dumps(row, allow_nan=False)


def write(path, attempts):
    file = MetricsFile(path)
    for attempt in attempts:
        file.append({"attempt": attempt, "text": "a\u2028b"})
    file.close()
    return path.read_bytes()


def test_lines_past_the_checkpoint_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    content = write(path, range(1, 8))
    assert MetricsFile(path).cut(5) == (5, 2)
    assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:5])
    assert MetricsFile(path).cut(0) == (0, 5)
    assert MetricsFile(tmp_path / "absent").cut(3) == (0, 0)


def test_a_torn_last_line_is_cut_wherever_it_is_torn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    content = write(path, [1, 2, 3])
    two = len(b"".join(content.splitlines(keepends=True)[:2]))
    for size in range(two, len(content)):
        path.write_bytes(content[:size])
        kept, cut = MetricsFile(path).cut(3)
        assert (kept, cut) == (2, int(size > two)) and path.stat().st_size == two


@pytest.mark.parametrize("junk", [b"[]\n", b"null\n", b'{"attempt": "3"}\n', b"\xff\xfe\n", b"\n"])
def test_junk_in_the_middle_ends_what_is_kept(tmp_path, junk):
    path = tmp_path / "metrics.jsonl"
    content = write(path, [1, 2])
    path.write_bytes(content + junk + content)
    assert MetricsFile(path).cut(9) == (2, 3)
    assert path.read_bytes() == content


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_disk_full_while_logging(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OutOfResources):
        MetricsFile(tmp_path / "metrics.jsonl").append({"attempt": 1})
