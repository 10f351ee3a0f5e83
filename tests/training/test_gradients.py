import math

import pytest
import torch
from torch.nn import Parameter

from lehr.training import gradients


def trained(**values):
    found = {}
    for name, value in values.items():
        found[name] = Parameter(torch.zeros(len(value)))
        found[name].grad = torch.tensor(value)
    return found


def test_norm_in_closed_form():
    assert gradients.measure(trained(a=[3.0], b=[0.0, 4.0])) == gradients.Measured(5.0, ())


def test_tensors_without_gradient_count_nothing():
    values = trained(a=[3.0])
    values["frozen"] = Parameter(torch.zeros(2))
    assert gradients.measure(values).norm == 3.0
    assert gradients.measure({"frozen": values["frozen"]}) == gradients.Measured(0.0, ())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_and_nothing_is_poisoned(bad):
    values = trained(a=[1.0, 2.0], b=[1.0, bad], c=[3.0])
    measured = gradients.measure(values)
    assert not math.isfinite(measured.norm) and measured.nonfinite == ("b",)
    assert values["a"].grad.tolist() == [1.0, 2.0] and values["c"].grad.tolist() == [3.0]


def test_large_finite_gradients_do_not_overflow_the_total():
    # squares of 1e19 fit in fp32 once, not summed over the tensors
    measured = gradients.measure(trained(**{f"t{i}": [1.5e19] for i in range(9)}))
    assert measured.norm == pytest.approx(4.5e19) and measured.nonfinite == ()


@pytest.mark.parametrize("limit", [0.5, 5.0, 7.0, None])
def test_clipped_norm_is_the_smaller(limit):
    values = trained(a=[3.0], b=[0.0, 4.0])
    gradients.clip_to(values, 5.0, limit)
    expected = 5.0 if limit is None else min(5.0, limit)
    assert gradients.measure(values).norm == pytest.approx(expected, rel=1e-6)
    if expected == 5.0:
        assert values["a"].grad.item() == 3.0  # not multiplied at all
