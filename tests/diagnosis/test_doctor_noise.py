"""The noise of a batch as evidence: gradients that add up, single outliers, small real moves."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.diagnosis.test_doctor import evaluations, falling, named

from lehr.diagnosis.doctor import diagnose
from lehr.diagnosis.doctor_curve import curve_of_columns
from lehr.diagnosis.doctor_look import Context


def norms(rough: float, growth: float = 20.0, count: int = 300) -> Any:
    """A norm that grows evenly from 1, with a share of noise from batch to batch."""
    noise = np.random.default_rng(3).normal(0.0, rough, count)
    return np.linspace(1.0, growth, count) * np.exp(noise)


def test_a_growing_norm_without_noise_is_a_sum_of_gradients():
    columns = {"loss": falling(), "grad_norm": norms(0.001)}
    found = diagnose(curve_of_columns(columns), Context(vocabulary=128)).findings
    assert [one.name for one in found] == ["growing_oscillation"]
    assert found[0].causes[0] == "gradients are not cleared between updates"
    assert "differs by only 0.1% from one batch to the next" in found[0].seen


def test_a_growing_norm_with_the_noise_of_a_batch_is_none():
    assert named({"loss": falling(), "grad_norm": norms(0.05)}) == []


def test_a_smooth_norm_that_does_not_grow_is_none():
    assert named({"loss": falling(), "grad_norm": norms(0.001, growth=1.0)}) == []


def test_one_outlier_of_ten_spreads_is_no_spike_and_one_of_twenty_is():
    for spreads, names in ((10.0, []), (20.0, ["spike_that_heals"])):
        loss = falling(spread=0.1)
        loss[200] += 0.1 * spreads
        assert named({"loss": loss}) == names


def test_a_held_out_loss_that_moves_a_little_is_not_flat():
    # Adapters on a trained model: 0.004 of 1.9 nats would be flat in a noisy training loss.
    noise = np.random.default_rng(1).normal(0.0, 0.02, 300)
    for fall, names in ((0.0005, ["flat_from_start"]), (0.005, [])):
        held_out = {30 * i: 1.9 - fall * i / 9 for i in range(1, 10)}
        assert named({"loss": 1.9 + noise, "eval_loss": evaluations(held_out)}) == names


def test_held_out_text_far_below_the_token_frequencies_is_no_shelf_there():
    # A shown mean of the whole run lags: it stands at the entropy while the model is past it.
    loss = np.concatenate([np.linspace(4.85, 3.2, 60), np.full(240, 3.2)])
    held_out = {30 * i: 2.85 for i in range(1, 10)}
    seen = named({"loss": loss, "eval_loss": evaluations(held_out)}, unigram_entropy=3.2)
    assert "flat_at_unigram" not in seen
