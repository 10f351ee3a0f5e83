"""What reaches each layer: closed forms, the verdicts, dead units, missing gradients."""

import json
import math
import shutil

import pytest
import torch
from rank_workers import joined, run_ranks
from small_runs import Cycle, NextToken, Small, lines_of, make_engine, rows, weights_hash
from torch import nn

from lehr.errors import RecipeError
from lehr.streams import generator_for
from lehr.training import events
from lehr.training.gradient_flow import GradientFlow, missing
from lehr.training.layers import LIMIT, judge, layers_of


def flow_of(model, backward, update=1, every=1, step=None):
    """(layers by name, verdict) of one update."""
    seen = []
    trained = dict(model.named_parameters())
    flow = GradientFlow(model, trained, every, seen.append)
    backward()
    begun = flow.begin(update)
    if step is not None:
        step()
    columns = flow.end(begun)
    if not seen:
        return None, None, columns
    (event,) = seen
    return {layer.name: layer for layer in event.layers}, event.verdict, columns


class Chain(nn.Module):
    """h_i = a h_(i-1) + b_i: the gradient of b_i is a^(n - i) exactly."""

    def __init__(self, length, factor):
        super().__init__()
        self.factor = factor
        self.layers = nn.ModuleList(nn.Module() for _ in range(length))
        for layer in self.layers:
            layer.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self):
        h = torch.zeros(1, dtype=torch.float64)
        for layer in self.layers:
            h = self.factor * h + layer.bias
        return h


@pytest.mark.parametrize(
    ("factor", "kind"),
    [(0.25, "vanishing"), (1.0, "healthy"), (0.6, "healthy"), (4.0, "exploding")],
)
def test_a_chain_has_the_factor_of_its_links(factor, kind):
    model = Chain(9, factor)
    layers, verdict, columns = flow_of(model, lambda: model().backward())
    for i in range(9):
        assert layers[f"layers.{i}"].gradient == pytest.approx(factor ** (8 - i))
    assert verdict.kind == kind and verdict.factor == pytest.approx(factor**8)
    assert columns["flow.factor"] == pytest.approx(factor**8)


def test_the_limit_is_the_factor_between_the_ends():
    def of(factor):
        return judge({f"{i}": factor ** (3 - i) for i in range(4)}).kind

    assert (
        of((LIMIT * 1.01) ** (1 / 3)) == "exploding" and of((LIMIT * 0.99) ** (1 / 3)) == "healthy"
    )
    assert of((LIMIT * 1.01) ** (-1 / 3)) == "vanishing"
    assert judge({"0": 1.0, "1": 1.0}).kind == "short"
    blocked = judge({"0": 0.0, "1": 1.0, "2": 1.0})
    assert (blocked.kind, blocked.layers) == ("blocked", ("0",)) and math.isnan(blocked.factor)


def deep(activation, spread, depth=30):
    model = nn.Sequential()
    stream = generator_for("deep", spread)
    for index in range(depth):
        linear = nn.Linear(32, 32)
        with torch.no_grad():
            linear.weight.copy_(spread * torch.randn(32, 32, generator=stream) / 32**0.5)
            linear.bias.zero_()
        model.add_module(str(2 * index), linear)
        model.add_module(str(2 * index + 1), activation())
    return model


@pytest.mark.parametrize(
    ("activation", "spread", "kind"),
    [(nn.Sigmoid, 1.0, "vanishing"), (nn.ReLU, 2**0.5, "healthy"), (nn.Tanh, 3.0, "exploding")],
)
def test_known_networks_get_their_known_verdict(activation, spread, kind):
    """Sigmoids shrink a gradient at least fourfold a layer; He's spread keeps it."""
    model = deep(activation, spread)
    batch = torch.randn(64, 32, generator=generator_for("x"))
    _, verdict, _ = flow_of(model, lambda: model(batch).square().mean().backward())
    assert verdict.kind == kind, verdict


def test_layers_are_ordered_by_number_not_by_name():
    names = ["norm.weight", *(f"h.{i}.w" for i in (10, 2, 0)), "h.2.b", "head.weight"]
    assert list(layers_of(names)) == ["norm", "h.0", "h.2", "h.10", "head"]
    assert layers_of(names)["h.2"] == ["h.2.w", "h.2.b"]


def test_dead_units_are_counted_and_absent_tokens_are_not():
    table, first, second = nn.Embedding(50, 4), nn.Linear(4, 10), nn.Linear(10, 3)
    model = nn.Sequential(table, first, nn.ReLU(), second)
    with torch.no_grad():
        first.bias.zero_()
        first.bias[:3] = -100.0  # these never fire
        first.bias[3:] = 100.0
    layers, _, _ = flow_of(model, lambda: model(torch.tensor([1, 2])).square().sum().backward())
    assert layers["1"].dead == pytest.approx(0.3) and layers["3"].dead == 0.0
    assert layers["0"].dead == 0.0


def test_the_ratio_is_change_over_weight():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        model[1].weight.zero_()

    def step():
        with torch.no_grad():
            model[0].weight[0, 1] += 0.5
            model[1].weight[0, 0] += 1.0

    layers, _, _ = flow_of(model, lambda: model(torch.ones(1, 2)).sum().backward(), step=step)
    assert layers["0"].ratio == pytest.approx(0.1) and layers["1"].ratio == math.inf


# --- in a run ---------------------------------------------------------------------------


class Unused(Small):
    """One layer is forgotten, one is cut off by a detach, one is used."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.forgotten = nn.Linear(2, 2)
        self.cut = nn.Linear(8, 8)

    def forward(self, ids):
        embedded = self.embed(ids)
        return self.head(torch.tanh(self.up(self.norm(embedded + self.cut(embedded).detach()))))


def missing_events(folder, model):
    seen = []
    make_engine(folder, 3, model=model, observers=[seen.append]).run()
    return [event for event in seen if isinstance(event, events.MissingGradient)]


def test_tensors_without_a_gradient_are_named_once(tmp_path):
    (event,) = missing_events(tmp_path / "bad", Unused())
    assert event.names == ("forgotten.weight", "forgotten.bias", "cut.weight", "cut.bias")
    assert event.of == len(list(Unused().parameters()))
    assert missing_events(tmp_path / "good", Small()) == []


def rank_work(rank, size, folder):
    with joined(rank, size, folder):
        model = nn.Linear(2, 2)
        if rank == 0:
            model.weight.grad = torch.zeros(2, 2)
        found = missing(dict(model.named_parameters()))
        (folder / f"result-{rank}.json").write_text(json.dumps(found))


def test_a_tensor_that_one_rank_reached_is_not_missing(tmp_path):
    assert run_ranks(tmp_path, 2, rank_work) == [["bias"], ["bias"]]


def test_measuring_changes_no_bit_and_is_due_every_so_many_updates(tmp_path):
    seen = []
    plain = make_engine(tmp_path / "plain", 6)
    plain.run()
    watched = make_engine(tmp_path / "watched", 6, gradient_flow_every=2, observers=[seen.append])
    watched.run()
    assert weights_hash(plain.model) == weights_hash(watched.model)
    lines = lines_of(tmp_path / "watched")
    for line in lines:
        assert ("flow.up.ratio" in line) == (line["update"] % 2 == 0)
    found = [event for event in seen if isinstance(event, events.GradientFlowMeasured)]
    assert [event.update for event in found] == [2, 4, 6]
    # All layers together are the norm of the metrics: nothing is left out or counted twice.
    model = plain.model
    trained = dict(model.named_parameters())
    flow = GradientFlow(model, trained, 1, lambda event: None)
    NextToken().loss(model, rows(4)[0]).total.backward()
    total = sum(flow._rms([name]) ** 2 * value.numel() for name, value in trained.items())
    by_hand = sum(float(value.grad.square().sum()) for value in trained.values())
    assert total == pytest.approx(by_hand)


def test_a_resumed_run_measures_the_same(tmp_path):
    def copy(event):
        if isinstance(event, events.CheckpointWritten) and event.update == 3:
            shutil.copytree(tmp_path / "straight", tmp_path / "stopped")

    def engine(name, *observers):
        batches = Cycle(rows(12), 6)
        return make_engine(
            tmp_path / name, 6, gradient_flow_every=2, observers=observers, batches=batches
        )

    straight = engine("straight", copy)
    straight.run()
    resumed = engine("stopped")
    assert resumed.run().resumed_from == 3
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "straight")


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_bad_interval_is_refused(tmp_path, every):
    with pytest.raises(RecipeError, match="gradient_flow_every: expected a whole number"):
        make_engine(tmp_path / "run", 6, gradient_flow_every=every)
