"""The example of a module that is no language model learns, and resumes to the bit."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch
from small_runs import lines_of, weights_hash

EXAMPLE = Path(__file__).parents[2] / "examples" / "convolutional.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("convolutional", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["convolutional"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["convolutional"]


def test_it_learns_and_its_statistics_count_updates(example, tmp_path):
    model = example.train(tmp_path, updates=30)
    line = example.last_line(tmp_path)
    assert line["evaluation.accuracy"] > 0.8 and abs(line["batch_norm.gap"]) < 0.3
    counts = [int(m.num_batches_tracked) for m in model if isinstance(m, torch.nn.BatchNorm2d)]
    assert counts == [30, 30]


def test_it_goes_on_from_a_checkpoint(example, tmp_path):
    whole = example.train(tmp_path / "whole", updates=6)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for path in (tmp_path / "again" / "checkpoints").glob("update-00000[6-9]"):
        shutil.rmtree(path)
    again = example.train(tmp_path / "again", updates=6)
    assert weights_hash(again) == weights_hash(whole)
    assert lines_of(tmp_path / "again") == lines_of(tmp_path / "whole")
