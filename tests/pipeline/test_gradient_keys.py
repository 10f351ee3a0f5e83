# ruff: noqa: F811 (fixtures of the other file)
"""Keys that measure gradients show in metrics.jsonl and events.jsonl, and change no loss."""

from __future__ import annotations

import json

import pytest
from tests.pipeline.small import losses, metrics, read
from tests.pipeline.test_keys_have_effects import (  # noqa: F401
    planned,
    run_dir,
    sft,
    trained,
    usual,
)

from lehr.errors import RecipeError

pytestmark = pytest.mark.usefixtures("lean")


def test_the_gradient_flow_shows_in_metrics_and_events(run_dir, usual):
    place = trained(run_dir, "changed", sft(gradient_flow_every=2))
    rows = metrics(place)
    assert [any(key.startswith("flow.") for key in row) for row in rows] == [False, True] * 2
    assert losses(place) == losses(usual)
    events = [json.loads(line) for line in (place.parent / "events.jsonl").read_text().splitlines()]
    (first, _) = [event for event in events if event["kind"] == "gradient_flow"]
    names = [layer["name"] for layer in first["layers"]]
    assert len(names) >= 2 and all("layers." in name for name in names)
    assert not any(event["kind"] == "missing_gradient" for event in events)


def test_the_noise_scale_shows_in_metrics_and_events(run_dir):
    keys = {"noise_scale_every": 1, "max_updates": 6, "packing": False, "precision": "fp32"}
    place = trained(run_dir, "changed", sft(**keys))
    rows = metrics(place)
    assert all("noise.gradient_squared" in row for row in rows)
    assert read(place.parent / "plan.json")["stages"][0]["micro_batch"] == 3
    events = [json.loads(line) for line in (place.parent / "events.jsonl").read_text().splitlines()]
    (said,) = [event["text"] for event in events if event["kind"] == "noise_scale"]
    assert "noise scale" in said and "n 6" in said
    with pytest.raises(RecipeError, match="noise_scale_every: expected at least two micro-batches"):
        planned(run_dir, sft(noise_scale_every=1, pack_length=2048))


def test_the_plan_counts_what_measuring_keeps(run_dir):
    plain, _ = planned(run_dir, sft(packing=False))
    noise, _ = planned(run_dir, sft(packing=False, noise_scale_every=2, micro_batch=3))
    assert plain["stages"][0]["memory"]["watching"] == 0
    one_gradient = noise["stages"][0]["memory"]["gradients"]
    assert noise["stages"][0]["memory"]["watching"] == one_gradient > 0


def test_the_plan_says_that_nothing_can_go_on_from_an_end_at_zero(run_dir):
    for final, said in ((0.0, True), (0.1, False)):
        found, _ = planned(run_dir, sft(schedule={"kind": "linear", "final": final}))
        assert any("nothing can go on" in line for line in found["findings"]) is said
