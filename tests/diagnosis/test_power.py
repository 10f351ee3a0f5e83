"""The power of gates: closed forms, monotony, and a simulation of stages that change nothing."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lehr.diagnosis.power import (
    default_limit,
    gate_power,
    items_needed,
    resolved,
    share_deviation,
)


def test_closed_form_of_needed_items() -> None:
    # ((1.9600 + 1.6449) * 1 / 1)^2 = 12.995
    assert items_needed(1.0, 1.0) == 13
    assert items_needed(0.04, share_deviation(0.05)) == 407
    assert items_needed(0.0, 1.0) is None
    assert share_deviation(0.25) == 0.5


def test_more_items_resolve_less() -> None:
    values = [resolved(n, share_deviation(0.05)) for n in (50, 100, 200, 400, 800)]
    assert values == sorted(values, reverse=True)
    assert resolved(1, 0.2) == math.inf
    assert resolved(100, 0.2, "bits/byte") == pytest.approx(0.0726, abs=1e-3)


def test_needed_items_resolve_the_limit_roughly() -> None:
    needed = items_needed(0.04, share_deviation(0.05))
    assert needed is not None
    assert resolved(needed, share_deviation(0.05)) == pytest.approx(0.04, rel=0.1)


def test_stages_that_change_nothing_pass_at_the_resolved_limit() -> None:
    n, discordance = 300, 0.06
    limit = resolved(n, share_deviation(discordance))
    random = np.random.default_rng(0)
    gained_or_lost = random.choice(
        [-1.0, 0.0, 1.0], size=(4000, n), p=[discordance / 2, 1 - discordance, discordance / 2]
    )
    upper = gained_or_lost.mean(1) + 1.96 * gained_or_lost.std(1, ddof=1) / math.sqrt(n)
    assert (upper <= limit).mean() >= 0.94


def test_gate_that_cannot_pass_says_how_many_items_would_do() -> None:
    power = gate_power("over_refusal", -0.04, 100, share_deviation(0.05))
    assert not power.can_pass and power.n_needed == 407
    assert "407 items would be enough" in power.note and "4.0 points" in power.note
    assert gate_power("over_refusal", 0.04, 1000, share_deviation(0.05)).can_pass


def test_default_limit_always_can_pass() -> None:
    for n in (20, 100, 1000):
        limit = default_limit(0.04, n, share_deviation(0.05))
        assert limit >= 0.04
        assert gate_power("over_refusal", limit, n, share_deviation(0.05)).can_pass


def test_improve_budget_and_no_items() -> None:
    assert gate_power("loss", None, 200, 0.4, "nats/token").can_pass
    assert gate_power("refusal", 0.04, 1000, 0.2, budget=50).n == 50
    nothing = gate_power("refusal", 0.04, 0, 0.2)
    assert not nothing.can_pass
    row = json.loads(json.dumps(nothing.as_json(), allow_nan=False))
    assert row["resolves"] is None and row["note"] == "there are no items"
    with pytest.raises(ValueError):
        resolved(10, -1.0)
    with pytest.raises(ValueError):
        share_deviation(1.5)
