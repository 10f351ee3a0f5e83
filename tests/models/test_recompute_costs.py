"""What choices cost, and what a budget buys: measured on real decoders."""

from __future__ import annotations

import pytest
import torch
from families import model_of, tree_pack
from test_recompute import gradient, kept, trained
from test_replay import Live

from lehr.models.probe import probe_pack
from lehr.models.recompute_costs import BlockCosts, BudgetTooSmall, Costs, spend

LAYERS = {"GPT2": {"n_layer": 4}}


def deep(family: str, what: str):
    return trained(family, what, **LAYERS.get(family, {"num_hidden_layers": 4}))


def test_spending_in_closed_form() -> None:
    """A byte of `up` saves 20 operations, one of `core` 5: up comes first, in block order."""
    one = BlockCosts(100, 10, {"up": (20, 400.0), "core": (20, 100.0)})
    assert spend([one, one], 19) == [(), ()]
    assert spend([one, one], 20) == [("up",), ()]
    assert spend([one, one], 60) == [("core", "up"), ("up",)]
    # What a block left alone keeps besides: 100 - 10 - 40.
    assert spend([one, one], 129) == [("core", "up"), ("core", "up")]
    assert spend([one, one], 130) == [None, ("core", "up")]
    # What does not fit does not hide what does.
    wide = BlockCosts(100, 10, {"wide": (70, 7000.0), "thin": (5, 5.0)})
    assert spend([wide], 10) == [("thin",)]


@pytest.mark.parametrize("what", ["adapter", "all weights", "dropout"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_a_budget_is_kept_and_used(family: str, what: str) -> None:
    """Never 5 % over it; another, independent count of the bytes agrees; the bits stay."""
    model, pack = deep(family, what), tree_pack()
    expected = gradient(model, pack)
    plain = kept(model, pack)
    costs = Costs(model, pack)
    assert costs.of("none").kept_bytes == plain
    operations = []
    chosen = {}
    for share in (0.2, 0.35, 0.5, 0.8):
        chosen[share], cost = costs.keeps_within(share)
        assert 0.7 * share * plain < cost.kept_bytes <= 1.05 * share * plain
        operations.append(cost.operations_per_token(38))
    assert operations == sorted(operations, reverse=True), "more bytes, fewer operations"
    assert operations[0] < costs.of("full").operations_per_token(38)
    costs.stop()
    for share, keeps in chosen.items():
        model.recompute(keeps)
        found = gradient(model, pack)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        fixed = 5056 * 4 if what == "dropout" else 0
        assert kept(model, pack) <= 1.05 * share * plain + fixed


def test_a_budget_below_full_is_refused() -> None:
    model, pack = deep("Llama", "adapter"), tree_pack()
    costs = Costs(model, pack)
    full = costs.of("full").kept_bytes / costs.of("none").kept_bytes
    with pytest.raises(BudgetTooSmall) as error:
        costs.keeps_within(0.5 * full)
    assert error.value.smallest == pytest.approx(full)


def test_few_tokens_say_what_many_cost() -> None:
    """In segments of one length: what attention keeps of a token depends on that."""
    model = deep("Llama", "adapter")
    ids = torch.arange(96) + 1
    found = []
    for count in (24, 96):
        costs = Costs(model, probe_pack([(part, -1) for part in ids[:count].split(24)]))
        found.append([costs.of("none"), costs.of("selective"), costs.of("full")])
        with pytest.raises(RuntimeError, match="another choice"):
            Costs(model, tree_pack())
        costs.stop()
    for few, many in zip(*found, strict=True):
        assert few.bytes_of(96) == pytest.approx(many.bytes_of(96), rel=0.01)
        said, seen = few.operations_per_token(96), many.operations_per_token(96)
        assert said == pytest.approx(seen, rel=0.05)


def test_cast_copies_of_weights_are_no_activations() -> None:
    """bf16 with fp32 weights: a copy of every weight lives as well, whatever the tokens."""
    model = model_of("Llama", precision="bf16", hidden_size=64, intermediate_size=192)
    model.train_all()
    model.train()
    found = []
    for count in (8, 32):
        segments = [(part, -1) for part in (torch.arange(count) + 1).split(8)]
        costs = Costs(model, probe_pack(segments))
        found.append([costs.of("none"), costs.of("selective"), costs.of("full")])
        costs.stop()
    for few, many in zip(*found, strict=True):
        assert few.bytes_of(32) == pytest.approx(many.bytes_of(32), rel=0.01)


def test_a_measurement_leaves_nothing_alive() -> None:
    """A hook that hands back what it was given ties a saved output to its own node for good."""
    model, pack = deep("Llama", "adapter"), tree_pack()
    own = [*model.network.parameters(), *model.network.buffers()]
    live = Live()
    with live:
        costs = Costs(model, pack)
        plain = costs.of("none").kept_bytes
        costs.keeps_within(0.4)
    assert live.bytes(own) < 0.01 * plain
    costs.stop()


def test_operations_of_full_in_closed_form() -> None:
    """All products of a block but the last, and the attention core: 2 operations a weight."""
    model = deep("Llama", "all weights")
    config = model.config
    width, inner, tokens = config.hidden_size, config.intermediate_size, 32
    costs = Costs(model, probe_pack([(torch.arange(tokens) + 1, -1)]))
    products = 2 * width * width + 2 * width * (width // 2) + 2 * width * inner
    pairs = tokens * (tokens + 1) // 2
    assert costs.of("full").operations == 4 * 2 * tokens * products
    assert costs.of("full").attention_operations == 4 * 2 * 2 * pairs * width
    assert costs.of("selective").operations == 0
    assert costs.of("selective").attention_operations == 4 * 2 * 2 * pairs * width
    assert costs.of("none").operations_per_token(32) == 0
