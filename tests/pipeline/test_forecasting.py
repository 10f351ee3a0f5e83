"""`lehr plan` of models that fit no machine here, against arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import chat_rows, pair_rows, save_base, stage, write_recipe, write_rows

from lehr.errors import RecipeError
from lehr.pipeline.plan import Plan, plan
from lehr.pipeline.run import run
from lehr.recipe.loading import load_recipe

QWEN3_4B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
# q, k, v, o and the three of the MLP; norms beside them; the embedding, twice where not tied.
QWEN3_LAYER = 2560 * 4096 + 2 * 2560 * 1024 + 4096 * 2560 + 3 * 2560 * 9728
QWEN3_PARAMETERS = 36 * (QWEN3_LAYER + 2 * 2560 + 2 * 128) + 2560 + 151936 * 2560
LLAMA_LAYER = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 + 3 * 4096 * 14336
LLAMA_PARAMETERS = 32 * (LLAMA_LAYER + 2 * 4096) + 4096 + 2 * 128256 * 4096
# rank 16: 16 x (inputs + outputs) of each product.
QWEN3_ADAPTER = 36 * 16 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
LLAMA_ADAPTER = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
# One kind of recomputation is measured, not three.
ONE = [{"sft": stage("chats", precision="bf16", recompute="none")}]


def forecast(folder: Path, config: dict[str, Any], kind: str, **changes: Any) -> Plan:
    (folder / "shape").mkdir(exist_ok=True)
    (folder / "shape/config.json").write_text(json.dumps(config))
    write_rows(folder / "chats.jsonl", chat_rows())
    write_rows(folder / "pairs.jsonl", pair_rows())
    recipe = {
        "model": "./shape",
        "adapter": {"kind": kind},
        "memory_limit": 24,
        "data": {
            "chats": {"path": "chats.jsonl", "holdout": 10},
            "pairs": {"path": "pairs.jsonl", "holdout": 8},
        },
        "stages": [{"sft": stage("chats", precision="bf16")}],
        **changes,
    }
    return plan(load_recipe(write_recipe(folder, recipe)), gflops=600.0)


def test_the_sizes_by_hand_are_those_of_the_models():
    assert QWEN3_PARAMETERS == 4_022_468_096
    assert LLAMA_PARAMETERS == 8_030_261_248


def test_qwen3_4b_with_all_weights(tmp_path):
    memory = forecast(tmp_path, QWEN3_4B, "none", stages=ONE).plan["stages"][0]["memory"]
    assert memory["weights"] == 4 * QWEN3_PARAMETERS
    assert memory["casts"] == 2 * 36 * QWEN3_LAYER  # what products take, while they may
    assert memory["gradients"] + memory["optimizer"] == 12 * QWEN3_PARAMETERS


def test_qwen3_4b_with_an_adapter(tmp_path):
    found = forecast(tmp_path, QWEN3_4B, "lora")
    assert found.plan["model"]["parameters"] == QWEN3_PARAMETERS
    memory = found.plan["stages"][0]["memory"]
    assert memory["weights"] == 2 * QWEN3_PARAMETERS
    assert memory["adapters"] == memory["gradients"] == memory["reference"] == 4 * QWEN3_ADAPTER
    assert memory["optimizer"] == 8 * QWEN3_ADAPTER
    # A chunk holds 8 million logits, in bf16 and in fp32.
    pairs = memory["head"] - 8_000_000 // 151936 * 151936 * (2 + 4)
    assert pairs > 0 and pairs % (2 * 2 * 2560) == 0, "picked states and their gradients"
    # Layers of this size are not joined into one product, so decoding copies none.
    assert memory["decoding"] == 0
    # 64 tokens of keys and values of 1,024 numbers, 36 layers, beyond what an update let go of.
    assert memory["kv_cache"] <= 64 * 64 * 36 * 2 * 1024 * 2
    assert memory["peak"] == sum(v for k, v in memory.items() if k != "peak")
    said = found.plan["findings"]
    assert any("no weights here" in line for line in said)
    assert any("every 3 bytes" in line for line in said)
    assert not (tmp_path / "out").exists()  # nothing is written


def test_what_a_layer_of_qwen3_keeps(tmp_path):
    """Of a token in bf16, in numbers of 2 bytes; and a pair's stage that computes them again."""
    stages = [
        {"sft": stage("chats", precision="bf16")},
        {"preference": stage("pairs", precision="bf16", recompute="full")},
    ]
    found = forecast(tmp_path, {**QWEN3_4B, "num_hidden_layers": 1}, "lora", stages=stages)
    plain, again = found.plan["stages"]
    cost = plain["recompute_costs"]["none"]
    # Only the layer's input remains, and what one layer needs while it is computed again.
    full = again["recompute_costs"]["full"]
    assert full["kept_bytes"] / full["tokens"] < 4 * 2560 * 2
    width, query, key, inner, rank = 2560, 4096, 1024, 9728, 16
    norms = 2 * width + query + key  # inputs of the four norms
    products = 2 * width + query  # inputs of q/k/v, gate/up and o
    attention = query + 2 * key + 32 * cost["tokens"]  # rotated queries, keys, values; shares
    mlp = 3 * inner  # gate, up, and the product that down takes
    rotary, scales = 2 * 128, 2 * (2 + 32 + 8)  # cos and sin; an fp32 number a norm and head
    by_hand = 2 * (norms + products + attention + mlp + 7 * rank + rotary + scales)
    assert cost["kept_bytes"] == cost["tokens"] * by_hand


def test_a_card_that_is_not_here_may_be_planned_for(tmp_path):
    """Nothing trains here: the recipe's device is that of another machine."""
    small = {**LLAMA_8B, "num_hidden_layers": 1, "vocab_size": 1000, "hidden_size": 512}
    plain = forecast(tmp_path, small, "lora")
    found = forecast(tmp_path, small, "lora", device="cuda")
    assert found.as_json()["memory"] == plain.as_json()["memory"]


def test_llama_8b_with_all_weights_does_not_fit_and_says_what_it_needs(tmp_path):
    found = forecast(tmp_path, LLAMA_8B, "none", memory_limit=80, stages=ONE)
    memory = found.as_json()["memory"]
    # fp32 and, for the products, a copy in bf16; gradients and two moments in fp32.
    assert memory["weights"] == 4 * LLAMA_PARAMETERS
    assert memory["casts"] == 2 * 32 * LLAMA_LAYER
    assert memory["gradients"] == 4 * LLAMA_PARAMETERS
    assert memory["optimizer"] == 8 * LLAMA_PARAMETERS
    assert memory["adapters"] == memory["reference"] == 0
    assert any("does not fit" in line and "80.00 GiB" in line for line in found.plan["findings"])
    assert found.plan["stages"][0]["micro_batch"] == 1


def test_llama_8b_with_an_adapter(tmp_path):
    found = forecast(tmp_path, LLAMA_8B, "lora", stages=ONE)
    assert found.plan["model"]["parameters"] == LLAMA_PARAMETERS
    entry = found.plan["stages"][0]
    assert entry["memory"]["weights"] == 2 * LLAMA_PARAMETERS
    assert entry["memory"]["adapters"] == 4 * LLAMA_ADAPTER
    assert not any("does not fit" in line for line in found.plan["findings"])
    # 6 updates at 0.6 Tflop/s, 0.55 of it reached: 4 operations a weight and token, and the head's.
    tokens = entry["tokens_per_update"]
    least = 6 * 4 * 32 * LLAMA_LAYER * tokens / (0.6e12 * 0.55)
    assert least < entry["seconds"] < 1.5 * least + 0.1


def nf4_codes(numbers: int) -> int:
    """Half a byte a weight, a byte every 64 of them and four every 64 x 256."""
    return numbers // 2 + numbers // 64 + 4 * (numbers // (64 * 256))


def test_llama_8b_over_a_base_in_four_bits(tmp_path):
    found = forecast(tmp_path, LLAMA_8B, "qlora", stages=ONE)
    assert found.plan["model"]["parameters"] == LLAMA_PARAMETERS
    memory = found.plan["stages"][0]["memory"]
    # Embedding, head and norms stay in bf16.
    codes, rest = nf4_codes(32 * LLAMA_LAYER), LLAMA_PARAMETERS - 32 * LLAMA_LAYER
    assert memory["weights"] == codes + 2 * rest
    assert memory["dequantised"] == 4096 * 14336 * 2  # the largest layer, while it multiplies
    assert memory["adapters"] == 4 * LLAMA_ADAPTER
    # A dense copy for decoding fits into 24 GiB; what an update needs is free by then.
    assert found.plan["model"]["decodes_in_place"] is False
    of_update = ("gradients", "dequantised", "activations", "head", "backward", "watching")
    let_go = sum(memory[one] for one in of_update)
    assert memory["decoding"] == 2 * 32 * LLAMA_LAYER - let_go
    assert memory["peak"] == sum(v for k, v in memory.items() if k != "peak")


def test_qwen3_4b_over_a_base_in_four_bits_where_little_memory_is(tmp_path):
    found = forecast(tmp_path, QWEN3_4B, "qlora", stages=ONE, memory_limit=6)
    memory = found.plan["stages"][0]["memory"]
    codes, rest = nf4_codes(36 * QWEN3_LAYER), QWEN3_PARAMETERS - 36 * QWEN3_LAYER
    assert memory["weights"] == codes + 2 * rest
    assert memory["adapters"] == 4 * QWEN3_ADAPTER
    assert found.plan["model"]["decodes_in_place"] is True and memory["decoding"] == 0
    assert memory["peak"] < 6 * 2**30
    assert not any("does not fit" in line for line in found.plan["findings"])


def test_with_a_tokenizer_the_tokens_are_counted(tmp_path):
    save_base(tmp_path / "base")
    (tmp_path / "base/model.safetensors").unlink()
    (tmp_path / "base").rename(tmp_path / "shape")
    config = json.loads((tmp_path / "shape/config.json").read_text())
    found = forecast(tmp_path, config, "lora")
    assert not any("every 3 bytes" in line for line in found.plan["findings"])
    assert found.plan["data"][0]["tokens"] > 30 * 10


def test_what_needs_weights_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="target"):
        forecast(tmp_path, {**QWEN3_4B, "num_hidden_layers": 1}, "lora", adapter={"targets": ["x"]})
    recipe = load_recipe(tmp_path / "recipe.yaml", ["adapter.targets=all-linear"])
    with pytest.raises(RecipeError, match="--gradcheck"):
        plan(recipe, gradcheck=True)
    with pytest.raises(RecipeError, match="weights"):
        run(recipe)
