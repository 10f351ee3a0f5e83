"""Clipping per tensor and by z-score: values by hand, state, and a run that resumes exactly."""

import math
import shutil

import pytest
import torch
from small_runs import lines_of, make_engine, weights_hash

from lehr.errors import RecipeError
from lehr.training import events
from lehr.training.clipping import AdaptiveClip, AdaptiveClipSettings


def clip(kind, **values):
    return AdaptiveClip(AdaptiveClipSettings(kind, **values))


def test_per_tensor_by_hand():
    one = clip("tensor", limit=1.5, decay=0.5, warmup=2)
    assert one.factors({"a": 4.0, "b": 1.0}) == {"a": 1.0, "b": 1.0}
    assert one.factors({"a": 2.0, "b": 3.0}) == {"a": 1.0, "b": 1.0}  # watched: smallest 2 and 1
    assert one.factors({"a": 6.0, "b": 1.2}) == {"a": 0.5, "b": 1.0}  # 1.5 x 2 = 3 of 6
    # averages: a 0.5 x 2 + 0.5 x 3 = 2.5, b 0.5 x 1 + 0.5 x 1.2 = 1.1
    assert one.factors({"a": 10.0, "b": 1.1}) == {"a": 0.375, "b": 1.0}


def test_z_score_by_hand():
    one = clip("z_score", limit=2.0, decay=0.9, warmup=4)
    for norm in (1.0, 3.0, 1.0, 3.0):  # mean 2, variance 1
        assert one.factors({"a": norm}) == {"a": 1.0}
    assert one.state()["mean"] == 2.0 and one.state()["variance"] == pytest.approx(1.0)
    # z = 8 > 2: kept 2 + 4/8 x 1 = 2.5 of 10
    assert one.factors({"a": 6.0, "b": 8.0}) == {"a": 0.25, "b": 0.25}
    mean = 0.9 * 2.0 + 0.1 * 2.5
    assert one.state()["mean"] == pytest.approx(mean)
    assert one.state()["variance"] == pytest.approx(0.9 + 0.1 * (2.5 - mean) ** 2)
    assert one.factors({"a": 3.0}) == {"a": 1.0}, "below the limit nothing changes"


def test_a_spike_does_not_widen_what_is_usual():
    for kind in ("tensor", "z_score"):
        one = clip(kind, warmup=10)
        for n in range(60):
            one.factors({"a": 1.0 + 0.01 * (-1) ** n})
        first = one.factors({"a": 100.0})["a"]
        again = one.factors({"a": 100.0})["a"]
        assert first < 0.02 and again < 0.02, kind


def test_an_adapters_first_gradient_of_zero_is_no_measure():
    one = clip("tensor", warmup=2)
    one.factors({"a": 0.0})
    one.factors({"a": 2.0})
    assert one.factors({"a": 2.0}) == {"a": 1.0}


def test_a_run_resumes_exactly_and_says_what_it_clipped(tmp_path):
    for kind in ("tensor", "z_score"):
        straight = tmp_path / kind

        def copy(event, straight=straight, kind=kind):
            if isinstance(event, events.CheckpointWritten) and event.update in (3, 6):
                shutil.copytree(straight, tmp_path / f"{kind}-{event.update}")

        values = {"adaptive_clip": AdaptiveClipSettings(kind, limit=1.0, warmup=2), "clip": None}
        run = make_engine(straight, 10, observers=[copy], **values)
        run.run()
        lines = lines_of(straight)
        assert any(line["clipped"] > 0 for line in lines[2:]) and lines[0]["clipped"] == 0
        for at in (3, 6):
            place = tmp_path / f"{kind}-{at}"
            again = make_engine(place, 10, **values)
            again.run()
            assert weights_hash(again.model) == weights_hash(run.model)
            assert lines_of(place) == lines
        plain = make_engine(tmp_path / f"{kind}-plain", 10, clip=None)
        plain.run()
        assert weights_hash(plain.model) != weights_hash(run.model)


def test_the_clipped_norm_is_what_was_promised():
    one = clip("tensor", limit=1.0, warmup=2)
    weight = torch.nn.Parameter(torch.zeros(3))
    for norm in (2.0, 2.0, 8.0):
        weight.grad = torch.tensor([norm, 0.0, 0.0])
        one.apply({"w": weight}, {"w": norm})
    assert weight.grad.norm().item() == pytest.approx(2.0)
    assert not math.isnan(weight.grad.sum().item())


@pytest.mark.parametrize("wrong", [{"limit": 0.5}, {"decay": 1.0}, {"warmup": 1}])
def test_settings_are_checked(tmp_path, wrong):
    (name,) = wrong
    with pytest.raises(RecipeError, match=f"adaptive_clip.{name}"):
        make_engine(tmp_path, 4, adaptive_clip=AdaptiveClipSettings("tensor", **wrong))
    with pytest.raises(RecipeError, match="tensor or z_score"):
        make_engine(tmp_path, 4, adaptive_clip=AdaptiveClipSettings("layer"))
