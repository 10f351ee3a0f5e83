"""Recomputation of real decoders: every family, every choice, the same bits."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, model_of, tree_pack
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lehr.data.shapes import Pack
from lehr.models.attention_short import Layout, lay_out
from lehr.models.language_model import LanguageModel
from lehr.models.recompute import Recomputation
from lehr.models.replay import measuring
from lehr.models.segments import plan_segments


def trained(family: str, what: str, **changes: object) -> LanguageModel:
    model = model_of(family, **changes)
    if what == "all weights":
        model.train_all()
    else:
        model.add_adapter(rank=2, dropout=0.3 if what == "dropout" else 0.0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in model.trained().values():
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    model.train()
    return model


def gradient(model: LanguageModel, pack: Pack) -> dict[str, torch.Tensor]:
    for tensor in model.trained().values():
        tensor.grad = None
    torch.manual_seed(3)
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    stats.log_probability.sum().backward()
    return {name: t.grad for name, t in model.trained().items() if t.grad is not None}


def kept(model: LanguageModel, pack: Pack) -> int:
    own = [*model.network.parameters(), *model.network.buffers()]
    model.hidden(pack)
    with measuring(own) as meter:
        hidden = model.hidden(pack)
    assert hidden.requires_grad
    return meter.kept_bytes


@pytest.mark.parametrize("what", ["all weights", "adapter", "dropout"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_and_fewer_bytes(family: str, what: str) -> None:
    """The adapters sit on a frozen embedding: the input of the first block needs no gradient."""
    model, pack = trained(family, what), tree_pack()
    expected, plain = gradient(model, pack), kept(model, pack)
    assert all(bool(grad.abs().sum() > 0) for grad in expected.values())
    layers = model.config.num_hidden_layers
    some = [None, *[["attention"]] * (layers - 1)]
    bytes_of = {}
    for choice in ("full", "selective", some):
        model.recompute(choice)  # type: ignore[arg-type]
        for _ in range(2):
            found = gradient(model, pack)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        bytes_of[str(choice)] = kept(model, pack)
    assert bytes_of["full"] < 0.4 * plain
    # Two layers of width 32: what the adapters keep beside the products weighs much here.
    assert bytes_of["full"] < bytes_of["selective"] < 0.7 * plain
    model.recompute("none")
    assert kept(model, pack) == plain


def test_bf16_with_fp32_weights_keeps_no_casts() -> None:
    model, pack = model_of("Llama", precision="bf16"), tree_pack()
    model.train_all()
    model.train()
    expected, plain = gradient(model, pack), kept(model, pack)
    for choice, share in (("full", 0.3), ("selective", 0.6)):
        model.recompute(choice)  # type: ignore[arg-type]
        found = gradient(model, pack)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert kept(model, pack) < share * plain


def test_bytes_of_a_llama_in_closed_form() -> None:
    """Floats of a token and layer with all weights trained (d width, q and k of the heads, f):

    none       4 d (two norms: input, scaled) + 2 (two statistics) + q (output of attention) + 3 f,
               and of attention its padded rows of queries, keys and values, and its shares
    selective  d (input) + q + 2 k + d (output of attention) + 2 f
    full       d
    """
    model, pack = trained("Llama", "all weights"), tree_pack()
    config = model.config
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    query, key = width, config.num_key_value_heads * config.head_dim
    wanted = {
        "none": 4 * width + 2 + query + 3 * inner,
        "selective": 2 * width + query + 2 * key + 2 * inner,
        "full": width,
    }
    attention = _attention_floats(model, pack)
    found = {}
    for choice in wanted:
        model.recompute(choice)  # type: ignore[arg-type]
        found[choice] = kept(model, pack)
    for choice in ("selective", "full"):
        fewer = pack.tokens * (wanted["none"] - wanted[choice]) + attention
        # Blocks computed again need the position ids: 8 bytes a token, once for all blocks.
        assert found["none"] - found[choice] == 4 * layers * fewer - 8 * pack.tokens


def _attention_layout(model: LanguageModel, pack: Pack) -> Layout:
    config, plan = model.config, plan_segments(pack.segments, pack.tokens)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return lay_out(plan.spans, plan.tokens, heads, groups, None, torch.device("cpu"))


def _attention_floats(model: LanguageModel, pack: Pack) -> int:
    layout, config = _attention_layout(model, pack), model.config
    rows = len(layout.query_rows) + 2 * len(layout.seen_rows)
    pairs = sum(batch.count * batch.length * batch.seen for batch in layout.batches)
    return int(rows * config.head_dim + config.num_attention_heads * pairs)


def test_operations_that_are_repeated() -> None:
    """Counted by torch over forward and backward passes: full adds the products but the last.

    Both add the two products of attention.
    """
    model, pack = trained("Llama", "all weights", num_key_value_heads=4), tree_pack()
    counts = {}
    for choice in ("none", "full", "selective"):
        model.recompute(choice)  # type: ignore[arg-type]
        gradient(model, pack)
        with FlopCounterMode(display=False) as counter:
            gradient(model, pack)
        counts[choice] = counter.get_total_flops()
    config = model.config
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    products = 2 * pack.tokens * (4 * width * width + 2 * width * inner)
    layout = _attention_layout(model, pack)
    pairs = sum(batch.count * batch.length * batch.seen for batch in layout.batches)
    attention = 4 * width * pairs
    assert counts["full"] - counts["none"] == (products + attention) * layers
    assert counts["selective"] - counts["none"] == attention * layers


def test_a_count_of_the_forward_pass_sees_no_recomputation() -> None:
    """The known fault: what is repeated is repeated while going back. Backward is two forwards,
    and with `full` almost three."""
    model, pack = trained("Llama", "all weights", num_key_value_heads=4), tree_pack()
    forward, both = {}, {}
    for choice in ("none", "full"):
        model.recompute(choice)  # type: ignore[arg-type]
        gradient(model, pack)
        with FlopCounterMode(display=False) as counter:
            hidden = model.hidden(pack)
        forward[choice] = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            hidden.sum().backward()
        both[choice] = forward[choice] + counter.get_total_flops()
    assert forward["none"] == forward["full"]
    backward = {choice: both[choice] / forward[choice] - 1 for choice in both}
    assert backward["none"] == pytest.approx(2.0, abs=0.05)
    assert 2.6 < backward["full"] < 3.0


def test_the_operation_list() -> None:
    model = trained("Llama", "adapter")
    listed = Recomputation(model.network, "none")
    assert listed.operations()["products"] == [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    assert listed.operations()["between"][:2] == ["SiLUActivation", "LlamaRMSNorm"]
    assert listed.uncovered() == []
    listed.stop()


def test_what_is_no_known_product_is_named() -> None:
    class Own(nn.Linear):
        pass

    model = trained("Llama", "all weights")
    pack = tree_pack()
    expected = gradient(model, pack)
    layer = model.network.model.layers[1].mlp
    layer.up_proj.__class__ = Own
    recomputation = Recomputation(model.network, "selective")
    assert recomputation.uncovered() == ["model.layers.1.mlp.up_proj.weight"]
    found = gradient(model, pack)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    recomputation.stop()


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("some", "none, full, selective"),
        ([None], "2 blocks"),
        ([None, ["mlp.q"]], "no product mlp.q"),
    ],
)
def test_refusals(choice: object, words: str) -> None:
    model = trained("Llama", "adapter")
    with pytest.raises(ValueError, match=words):
        model.recompute(choice)  # type: ignore[arg-type]
    model.recompute("none")
    assert "forward" not in model.network.model.layers[0].__dict__


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no blocks"):
        Recomputation(nn.Sequential(nn.Linear(2, 2)), "full")


def test_generation_with_a_cache_under_recompute() -> None:
    model = trained("Llama", "adapter").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with model.attention("sdpa"):
        plain = model.network.generate(ids, max_new_tokens=4, do_sample=False)
        model.recompute("full")
        model.train()
        assert torch.equal(model.network.generate(ids, max_new_tokens=4, do_sample=False), plain)
        with pytest.raises(ValueError, match="twice"):
            model.network(ids, use_cache=True)
