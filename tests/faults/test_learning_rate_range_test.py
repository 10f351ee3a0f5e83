"""Known faults of a learning-rate range test: for what its curve is read."""

from __future__ import annotations

import math

from lehr.diagnosis.learning_rate_finder import judged

RATES = [10 ** (-5 + n / 20) for n in range(101)]  # 1e-5 to 1


def _quadratic(curvature: float) -> list[float]:
    """Change of c w² / 2 at w = 1 after one step of each rate, as in gradient descent."""
    return [curvature * ((1 - rate * curvature) ** 2 - 1) / 2 for rate in RATES]


def test_the_rate_of_the_lowest_loss_is_not_what_is_recommended() -> None:
    """At the lowest point the next steps already climb: a rate is taken well before it."""
    found = judged(RATES, _quadratic(10.0), 5.0, "")
    lowest = RATES[min(range(len(RATES)), key=lambda n: _quadratic(10.0)[n])]
    assert abs(lowest - 0.1) < 0.02, "1 / c, where the loss is lowest"
    assert found.recommended is not None and found.recommended < 0.6 * lowest
    assert found.recommended < 2 / 10.0, "the limit of stability"


def test_a_loss_that_falls_by_itself_is_not_a_rate_that_works() -> None:
    """Curves of raw loss fall along the test whatever the rate; a change of 0 recommends none."""
    found = judged(RATES, [0.0] * len(RATES), 5.0, "")
    assert found.recommended is None and found.why


def test_a_divergence_at_the_end_does_not_decide_the_steepest_place() -> None:
    """The explosion is the steepest part of any raw curve, upwards; it must not be chosen."""
    changes = _quadratic(10.0)
    exploded = [
        value if rate < 0.4 else 1e6 * rate for rate, value in zip(RATES, changes, strict=True)
    ]
    calm, wild = judged(RATES, changes, 5.0, ""), judged(RATES, exploded, 5.0, "")
    assert calm.recommended is not None and wild.recommended is not None
    assert abs(math.log(calm.recommended / wild.recommended)) < math.log(1.5)


def test_a_scale_of_the_loss_moves_no_rate() -> None:
    """Thresholds in nats would read a loss summed over tokens otherwise than its mean."""
    one = judged(RATES, _quadratic(1.0), 5.0, "")
    thousand = judged(RATES, [1000 * y for y in _quadratic(1.0)], 5000.0, "")
    assert one.recommended == thousand.recommended
