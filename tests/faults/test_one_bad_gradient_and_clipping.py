"""One gradient that is not finite: torch's clipping spreads it, ours leaves it where it is."""

from __future__ import annotations

import math

import pytest
import torch
from small_runs import NextToken, Small, lines_of, make_engine
from torch.nn import Parameter

from lehr.objectives.base import Loss
from lehr.training import events, gradients

GOOD = [3.0, 4.0]


def with_gradients(bad: float) -> dict[str, Parameter]:
    found = {"healthy": Parameter(torch.zeros(2)), "sick": Parameter(torch.zeros(2))}
    found["healthy"].grad = torch.tensor(GOOD)
    found["sick"].grad = torch.tensor([1.0, bad])
    return found


@pytest.mark.parametrize(("bad", "left"), [(math.nan, math.nan), (math.inf, 0.0)])
def test_the_verdict_comes_before_the_multiplication(bad: float, left: float) -> None:
    """torch: a NaN makes all gradients NaN; an infinity makes the healthy ones 0."""
    ours, theirs = with_gradients(bad), with_gradients(bad)
    measured = gradients.measure(ours)
    assert measured.nonfinite == ("sick",) and not math.isfinite(measured.norm)
    assert ours["healthy"].grad.tolist() == GOOD
    torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
    assert theirs["healthy"].grad.tolist() == pytest.approx([left, left], nan_ok=True)
    assert theirs["sick"].grad[1].isnan(), "the infinity is a NaN now"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_such_an_update_is_refused(tmp_path, bad: float) -> None:
    """With clipping on: not one weight moves, the tensor is named, the next update is applied."""
    model = Small(dropout=0.0)

    class Spoiled(NextToken):
        """The gradient of one tensor is not finite in the first attempt; its loss is."""

        def loss(self, model: Small, pack: object) -> Loss:
            found = super().loss(model, pack)
            factor = bad if self.calls == 1 else 1.0
            spoil = model.up.weight.register_hook(lambda grad: grad * factor)
            handles.append(spoil)
            return found

    handles: list[object] = []
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    after: dict[str, torch.Tensor] = {}
    said: list[tuple[str, ...]] = []

    def look(event: object) -> None:
        if isinstance(event, events.NonFinite):
            said.append(event.names)
            after.update({n: v.detach().clone() for n, v in model.named_parameters()})
            for handle in handles:
                handle.remove()

    engine = make_engine(
        tmp_path, 1, model=model, objective=Spoiled(), micro_batch=5, clip=0.1, observers=[look]
    )
    engine.run()
    assert said == [("gradient of up.weight",)]
    assert [row["skipped"] for row in lines_of(tmp_path)] == [True, False]
    assert all(torch.equal(after[name], start[name]) for name in start)
    assert not torch.equal(model.up.weight, start["up.weight"])


@pytest.mark.parametrize("limit", [0.5, 5.0, 100.0])
def test_a_gradient_in_parts_is_clipped_as_the_whole(limit: float) -> None:
    """The norm is that of all tensors together, however they are cut: not one limit each."""
    values = torch.randn(60, generator=torch.Generator().manual_seed(0))
    whole = {"all": Parameter(torch.zeros(60))}
    whole["all"].grad = values.clone()
    parts = {str(index): Parameter(torch.zeros(part)) for index, part in enumerate((7, 50, 3))}
    for parameter, part in zip(parts.values(), values.split([7, 50, 3]), strict=True):
        parameter.grad = part.clone()
    for trained in (whole, parts):
        gradients.clip_to(trained, gradients.measure(trained).norm, limit)
    joined = torch.cat([parameter.grad for parameter in parts.values()])
    torch.testing.assert_close(joined, whole["all"].grad, rtol=1e-6, atol=0)
    expected = min(limit, float(values.norm()))
    assert float(joined.norm()) == pytest.approx(expected, rel=1e-6)
    each = torch.cat([part * min(1.0, limit / float(part.norm())) for part in
                      values.split([7, 50, 3])])  # fmt: skip
    if limit == 0.5:
        assert float(each.norm()) > 1.5 * limit, "the fault: each part to the limit"
