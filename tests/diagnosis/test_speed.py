"""Shares of an update by hand, the bottleneck they name, and a profile's events to a table."""

from __future__ import annotations

import pytest

from lehr.diagnosis.speed import (
    CLASSES,
    Group,
    Speed,
    Trial,
    bottleneck_of,
    doubled,
    gain_without,
    largest,
    seconds_by_class,
    shares,
)
from lehr.diagnosis.speed_events import with_shapes
from lehr.diagnosis.speed_operations import (
    BACKWARD,
    MODULE,
    OPTIMIZER,
    OUTSIDE,
    UPDATE,
    Event,
    Overheads,
    idle_after_waits,
    kind_of,
    operations_of,
    table,
)


def test_every_second_is_in_one_class():
    spans = {"data": 2.0, "log": 0.5, "checkpoint": 0.25, "evaluation": 0.25, "communication": 1.0}
    work = {"compute": 3.0, "memory": 1.0, "recompute": 0.5}
    found = seconds_by_class(6.0, spans, work)
    assert list(found) == list(CLASSES)
    assert found["host"] == 1.5, "what is left of the update"
    assert sum(found.values()) == 10.0 and sum(shares(found).values()) == pytest.approx(1.0)
    assert shares(found)["data"] == 0.2


def test_a_profile_that_found_more_than_there_is_is_scaled():
    found = seconds_by_class(2.0, {}, {"compute": 3.0, "memory": 1.0})
    assert (found["compute"], found["memory"], found["host"]) == (1.5, 0.5, 0.0)


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        ({"data": 0.09, "compute": 0.91}, "compute"),
        ({"data": 0.11, "compute": 0.89}, "data"),
        ({"host": 0.4, "memory": 0.2, "compute": 0.4}, "host"),
        ({"host": 0.3, "memory": 0.3, "compute": 0.4}, "compute"),
        ({"data": 0.15, "host": 0.5, "compute": 0.35}, "host"),
        ({"communication": 0.3, "host": 0.25, "compute": 0.45}, "communication"),
        ({"memory": 0.0, "compute": 0.0}, "compute"),
    ],
)
def test_the_bottleneck(seconds, name):
    assert bottleneck_of(seconds) == name


def test_gains_by_hand():
    assert gain_without(10.0, 2.0) == 1.25
    block = Group("block", 10, 4.0, compute=2.0, memory=1.0)
    step = Group("optimizer", 4, 2.0, memory=1.5, fixed=True)
    assert block.host == 1.0 and step.host == 0.5
    seconds = {"data": 9.0, "log": 9.0, "host": 1.5, "compute": 2.0, "memory": 2.5}
    # The block's 3 seconds of work come twice; overhead and the step once; no data, no log.
    assert doubled(seconds, [block, step]) == 9.0
    assert largest([block, step], "host") == block and largest([block, step], "memory") == step
    assert largest([block, step], "compute") is None
    spread = [Group(name, 1, 1.0) for name in "abc"]
    assert largest(spread, "host") is None, "no part has half of it"


def test_a_trial_agrees_within_a_seventh():
    assert Trial("x", 1.0, 1.1, 2.0).agrees and not Trial("x", 1.0, 1.3, 2.0).agrees
    twice = Trial("twice the batch", 1.5, 1.25, 1.0, batches=2)
    assert twice.measured_gain == 1.6 and twice.predicted_gain == pytest.approx(4 / 3)


def test_the_object_for_programs():
    found = Speed({"data": 1.0, "compute": 3.0}, "data", 0.5, 0.5, None, 1.0, tokens=8.0).as_json()
    assert found["shares"] == {"data": 0.25, "compute": 0.75}
    assert found["tokens_per_second"] == 2.0 and found["counterfactual"] is None


def events() -> list[Event]:
    """One update: a module's forward, a recomputed forward in the backward pass, a step."""
    product = ((2, 3), (3, 4))
    return [
        Event(f"{UPDATE} 1", 0.0, 20.0),
        Event(f"{MODULE}Linear layers.*.a", 1.0, 5.0),
        Event("aten::mm", 2.0, 4.0, sequence=7, shapes=product),
        Event("aten::t", 4.0, 4.5, sequence=8),
        Event(f"{BACKWARD}: MmBackward0", 8.0, 12.0, sequence=7),
        Event("aten::mm", 9.0, 11.0, shapes=product),
        Event(f"{BACKWARD}: CheckpointBackward", 13.0, 16.0, sequence=3),
        Event(f"{MODULE}Linear layers.*.b", 13.5, 15.5),
        Event("aten::mm", 14.0, 15.0, shapes=product),
        Event("Optimizer.step#AdamW.step", 17.0, 19.0),
        Event("aten::add_", 17.5, 18.5, shapes=((5,), (5,))),
    ]


def test_a_profile_by_hand():
    found = table(events(), clean=20.0, aside=0.0)
    assert found.work == {"compute": 4.0, "recompute": 1.0, "memory": 1.0}
    assert found.operations == 3 * 48.0 and found.recomputed == 48.0
    assert found.calls == 5 and found.bytes == 4 * 15
    by = {one.owner: one for one in found.groups}
    assert sum(one.seconds for one in found.groups) == pytest.approx(20.0)
    # Linear a: 4 forward, 4 backward, and its half of the engine's 3 + 1 around the two nodes.
    a = by["Linear layers.*.a"]
    assert (a.compute, a.calls) == (4.0, 3) and a.seconds == pytest.approx(10.0, abs=0.6)
    assert by[OPTIMIZER].memory == 1.0 and by[OPTIMIZER].fixed and by[OUTSIDE].fixed


def test_what_a_profile_adds_is_taken_off():
    """The same with each operation's overhead, and less time without the profile."""
    found = table(events(), clean=10.0, aside=2.0, overheads=Overheads(call=0.5, module=0.5))
    assert found.work == {"compute": 3.0, "recompute": 0.5, "memory": 0.5}
    assert sum(one.seconds for one in found.groups) == pytest.approx(10.0)


def test_another_programs_time_is_cut_off():
    """Of ten equal operations one took a hundred times as long: ten times the median."""
    several = [Event(f"{UPDATE} 1", 0.0, 200.0)]
    several += [Event("aten::mul", 2.0 * n, 2.0 * n + 1.0, shapes=((4,),)) for n in range(9)]
    several.append(Event("aten::mul", 50.0, 150.0, shapes=((4,),)))
    assert table(several, clean=20.0, aside=0.0).work["memory"] == 10.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::bmm", "compute"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "compute"),
        ("aten::convolution_backward", "compute"),
        ("aten::_softmax", "memory"),
        ("aten::mul_", "memory"),
        ("aten::transpose", "view"),
        ("c10d::allreduce_", "communication"),
        ("torch::autograd::AccumulateGrad", ""),
        ("MmBackward0", ""),
    ],
)
def test_kinds_of_operations(name, kind):
    assert kind_of(name) == kind


def test_operations_of_products():
    assert operations_of("aten::bmm", [[5, 2, 3], [5, 3, 4]]) == 240.0
    assert operations_of("aten::baddbmm", [[5, 2, 4], [5, 2, 3], [5, 3, 4]]) == 240.0
    assert operations_of("aten::mul", [[2, 3], [2, 3]]) == 0.0
    query, keys = [1, 2, 5, 8], [1, 2, 7, 8]
    name = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert operations_of(name, [query, query, keys, keys]) == 10 * 2 * 5 * 7 * 8


def test_idle_time_of_an_accelerator():
    kernels = [(0.0, 1.0), (3.0, 4.0), (4.0, 5.0), (7.0, 8.0)]
    assert idle_after_waits(kernels, [(0.2, 1.2)]) == (2.0, 2.0)
    assert idle_after_waits(kernels, []) == (0.0, 4.0)
    assert idle_after_waits([], []) == (0.0, 0.0)


def test_operations_take_their_shapes_from_another_profile_of_the_same_updates():
    def profiled(began: float, shapes: bool) -> list[Event]:
        def event(name: str, at: float, size: int) -> Event:
            return Event(name, began + at, began + at + 1, shapes=[[size, size]] * shapes)

        return [
            Event("lehr update 3", began, began + 10),
            event("aten::add", 3, 8),
            event("aten::mm", 1, 2),
            event("aten::mm", 5, 4),
            Event("lehr update 4", began + 10, began + 20),
            event("aten::mm", 11, 6),
            event("aten::mm", 25, 9),  # after the updates
        ]

    timed, shaped = profiled(100.0, False), profiled(0.0, True)
    found = with_shapes(timed, shaped)
    sizes = [list(one.shapes[0])[:1] if one.shapes else [] for one in found]
    assert sizes == [[], [8], [2], [4], [], [6], []]
    assert [one.began for one in found] == [one.began for one in timed]
    fewer = with_shapes(timed, shaped[:2])  # what the other does not have stays without
    assert [bool(one.shapes) for one in fewer] == [False, True, *[False] * 5]
