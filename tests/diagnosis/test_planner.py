"""The forecast of memory and time, against closed forms and against what autograd keeps."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lehr.diagnosis.planner import (
    Load,
    Shape,
    activation_bytes_per_token,
    decoding_bytes,
    forecast,
    head_bytes,
    kv_cache_bytes,
    operations_per_update,
    resident_bytes,
    seconds_per_update,
)
from lehr.models.norms import use_fused_norms

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def plan(trained: int, **changes: object) -> dict[str, int]:
    values: dict[str, object] = {
        "config": CONFIG,
        "parameters": 1_000_000,
        "trained_parameters": trained,
        "precision": "fp32",
        "pack_tokens": 128,
        "micro_batch": 2,
        "vocabulary": 500,
        **changes,
    }
    return forecast(**values)  # type: ignore[arg-type]


def test_shape_reads_names_and_defaults() -> None:
    shape = Shape.of(CONFIG)
    assert (shape.layers, shape.width, shape.inner, shape.query, shape.key_value) == (
        3,
        64,
        160,
        64,
        32,
    )
    gpt = Shape.of({"n_embd": 8, "n_layer": 1, "n_head": 2})
    assert (gpt.inner, gpt.key_value) == (32, 8)
    with pytest.raises(ValueError, match="num_attention_heads"):
        Shape.of({"hidden_size": 4})


def test_products_are_the_weights_of_the_layers() -> None:
    config = LlamaConfig(**CONFIG, vocab_size=50)
    model = LlamaForCausalLM(config)
    linear = [
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    assert Shape.of(config).products == sum(linear)


def test_components_in_closed_form() -> None:
    lora = plan(10_000)
    assert lora["weights"] == 4_000_000 and lora["adapters"] == 40_000
    assert lora["gradients"] == 40_000 and lora["optimizer"] == 80_000
    assert lora["peak"] == sum(value for name, value in lora.items() if name != "peak")
    everything = plan(1_000_000)
    assert everything["adapters"] == 0 and everything["optimizer"] == 8_000_000
    assert plan(10_000, precision="bf16")["weights"] == 2_000_000
    mixed = plan(1_000_000, precision="bf16")
    assert (mixed["weights"], mixed["casts"]) == (4_000_000, 2 * Shape.of(CONFIG).products)
    assert "casts" not in everything and "casts" not in lora
    assert plan(1_000_000, precision="fp8") == plan(1_000_000, precision="bf16")
    pure = plan(1_000_000, precision="pure_bf16")
    assert (pure["weights"], pure["gradients"], pure["update"]) == (2_000_000, 2_000_000, 8_000_000)
    assert plan(10_000, head_chunk=16)["head"] == 16 * 500 * 4 + 256 * 2 * 4 * 64
    # Decoding copies 4 MB of weights, less what only an update needs.
    let_go = sum(lora[name] for name in ("gradients", "activations", "head", "backward"))
    assert lora["decoding"] == max(0, 4_000_000 - let_go)
    small = plan(10_000, head_chunk=16, activation_bytes=1_000)
    # 256 tokens: two tensors of 160 fp32 numbers each, where the head's chunk takes less.
    assert small["head"] + small["backward"] == 256 * 2 * 4 * 160
    assert small["decoding"] == 4_000_000 - 40_000 - 1_000 - 256 * 2 * 4 * 160 > 0
    assert resident_bytes(lora) > lora["peak"]


def test_what_decoding_needs_in_closed_form() -> None:
    # d 64, q 64, k 32, f 160, 3 layers: q/k/v, output, gate and up, down.
    products = 64 * (64 + 2 * 32) + 64 * 64 + 2 * 64 * 160 + 64 * 160
    assert decoding_bytes(CONFIG, "bf16", packed=True) == 3 * products * 2
    assert decoding_bytes(CONFIG, "fp32", packed=False) == 3 * products * 4  # all are small
    wide = {**CONFIG, "hidden_size": 8192}  # heads of 2,048: only gate/up and down stay small
    assert decoding_bytes(wide, "fp32", packed=False) == 3 * 4 * (2 + 1) * 8192 * 160
    assert kv_cache_bytes(CONFIG, 5, 7, "bf16") == 2 * 3 * 32 * 2 * 5 * 7
    small = {"head_chunk": 16, "activation_bytes": 1_000}
    let_go = 40_000 + 1_000 + 256 * 2 * 4 * 160
    found = plan(10_000, decoding_bytes=350_000, kv_cache_bytes=50_000, **small)
    assert (found["decoding"], found["kv_cache"]) == (0, 50_000 - (let_go - 350_000))
    found = plan(10_000, decoding_bytes=400_000, kv_cache_bytes=50_000, **small)
    assert (found["decoding"], found["kv_cache"]) == (400_000 - let_go, 50_000)


def test_the_head_in_closed_form() -> None:
    """10 rows of 300 words of width 8: 3,000 logits, a matrix of 2,400 numbers."""
    frozen = {"rows": 10, "vocabulary": 300, "width": 8, "trained": False}
    assert head_bytes(**frozen, weight_bytes=4, product_bytes=4) == 3000 * 4
    # Nine logits a row are summed again, from two fp32 rows of 8 each and the state itself.
    again = 10 * 4 * 8 * (2 * 9 + 1)
    narrow = {"weight_bytes": 2, "product_bytes": 2}
    assert head_bytes(**frozen, **narrow) == 3000 * 4 + max(3000 * 2, again) == 18_080
    assert head_bytes(**frozen | {"vocabulary": 3000}, **narrow) == 30_000 * (4 + 2)
    assert head_bytes(**frozen, **narrow, pairs=70) == 18_080 + 70 * 2 * 2 * 8
    assert head_bytes(**frozen, weight_bytes=2, product_bytes=4) == 3000 * 4 + 2400 * 4
    trained = frozen | {"trained": True}
    # fp32: the weight's gradient and three tensors of a chunk, or two and what the chunk adds.
    both = (12 * 3000, 8 * 3000 + 4 * 2400)
    assert head_bytes(**trained, weight_bytes=4, product_bytes=4) == 4 * 2400 + max(both)
    late = 10 * 3000 + 6 * 2400
    assert head_bytes(**trained, weight_bytes=4, product_bytes=2) == 6 * 2400 + late


def test_phases_in_closed_form() -> None:
    """What passes lives beside what lasts; the largest phase decides."""
    sizes = {"activation_bytes": 700_000, "head_chunk": 16, "decoding_bytes": 0}
    lasting = 4_000_000 + 4 * 40_000  # weights; adapter, reference, two moments
    first = 256 * 2 * 4 * 160
    many = plan(10_000, **sizes)
    assert many["peak"] == lasting + 700_000 + first + 40_000, "gradients beside activations"
    one = plan(10_000, **sizes, load=Load(256, 256, micro_batches=1))
    assert one["peak"] == lasting + 700_000 + first, "gradients come when activations go"
    assert one["reused"] == -40_000 and many["reused"] == 0
    # All weights: 4 MB of gradients are more than the forward pass.
    little = plan(1_000_000, **sizes, load=Load(8, 8, 1))
    embedding = 500 * 64 * 4
    assert little["peak"] == 4_000_000 * 3 + 4_000_000 + embedding
    # Of 700,000 bytes 300,000 are those of a block computed again, when the head is done.
    again = plan(10_000, **sizes, working_bytes=300_000)
    assert again["peak"] == many["peak"]
    wide = sizes | {"head_chunk": 250}
    head = 250 * 500 * 4 + 256 * 2 * 4 * 64
    assert plan(10_000, **wide)["peak"] == lasting + 40_000 + 700_000 + head
    beside = plan(10_000, **wide, working_bytes=400_000)["peak"]
    assert beside == lasting + 40_000 + 300_000 + max(head, 400_000 + first)
    slack = plan(10_000, **sizes, slack_share=0.5)
    assert slack["slack"] == (many["peak"] - lasting) // 2 == slack["peak"] - many["peak"]


def test_grows_with_the_right_things() -> None:
    assert plan(0, micro_batch=4)["activations"] == 2 * plan(0)["activations"]
    assert plan(0, pack_tokens=256)["activations"] == 2 * plan(0)["activations"]
    assert plan(0, activation_bytes=77)["activations"] == 77
    assert plan(0, precision="bf16")["activations"] < plan(0)["activations"]


@pytest.mark.parametrize(
    "changes",
    [{"pack_tokens": 0}, {"micro_batch": -1}, {"precision": "fp64"}],
)
def test_refuses_what_makes_no_sense(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        plan(0, **changes)
    with pytest.raises(ValueError):
        plan(-1)


@pytest.mark.parametrize("key_value", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_match_what_autograd_keeps(key_value: int, dtype: torch.dtype) -> None:
    """Within 10 % of the bytes of all tensors saved for the backward pass of a real layer stack."""
    config = LlamaConfig(**{**CONFIG, "num_key_value_heads": key_value}, vocab_size=50)
    model = LlamaForCausalLM(config).to(dtype)
    use_fused_norms(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    kept: dict[int, int] = {}
    tokens = 96

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(torch.arange(tokens)[None] % 50).last_hidden_state
    assert hidden.requires_grad
    precision = "fp32" if dtype == torch.float32 else "bf16"
    forecast_bytes = activation_bytes_per_token(Shape.of(config), precision, True)
    measured = sum(kept.values()) / tokens
    assert forecast_bytes == pytest.approx(measured, rel=0.10)


def operations(all_weights: bool, **changes: object) -> float:
    values: dict[str, object] = {
        "tokens": 100,
        "supervised_tokens": 10,
        "vocabulary": 500,
        "all_weights": all_weights,
        **changes,
    }
    return operations_per_update(CONFIG, **values)  # type: ignore[arg-type]


def test_operations_in_closed_form() -> None:
    products = Shape.of(CONFIG).products
    assert operations(True) == 6 * products * 100 + 8 * 64 * 500 * 10
    assert operations(False) == 4 * products * 100 + 4 * 64 * 500 * 10
    assert operations(True, segment_tokens=50) - operations(True) == 3.5 * 2 * 50 * 64 * 3 * 100


def test_seconds() -> None:
    assert seconds_per_update(1e12, 100.0, 1.0) == pytest.approx(10.0)
    for rate, efficiency in ((0.0, 0.5), (10.0, 0.0), (10.0, 1.5)):
        with pytest.raises(ValueError):
            seconds_per_update(1e12, rate, efficiency)
