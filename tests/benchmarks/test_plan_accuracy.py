"""Forecast live bytes within a tenth of what torch's allocator books, at tiny size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.plan_accuracy import comparisons, measured
from tests.pipeline.small import chat_rows, pair_rows, save_base, write_rows

from lehr.pipeline import four_bits, planning

COMMON = {"max_length": 64, "max_updates": 3, "learning_rate": 1e-4, "batch_size": 24}
CASES = {
    "lora": ({"sft": {"data": "chats", "precision": "fp32", **COMMON}}, "lora"),
    "lora in bf16, several micro-batches": (
        {"sft": {"data": "chats", "precision": "bf16", "micro_batch": 2, **COMMON}},
        "lora",
    ),
    "full": ({"sft": {"data": "chats", "precision": "fp32", **COMMON}}, "none"),
    "full in bf16": ({"sft": {"data": "chats", "precision": "bf16", **COMMON}}, "none"),
    "dpo": ({"preference": {"data": "pairs", "precision": "bf16", **COMMON}}, "lora"),
    "recomputed": ({"sft": {"data": "chats", "recompute": "full", **COMMON}}, "lora"),
}


OF_ANOTHER = torch.zeros(5_000_000)  # what else the process holds is not counted


@pytest.mark.parametrize("case", CASES)
def test_live_bytes_are_those_of_the_forecast(
    tmp_path: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((planning, "DECODED"), (four_bits, "decoding_bytes")):
        monkeypatch.setattr(module, name, getattr(module, name))  # the benchmark sets them
    # Wide enough that masks and places, 8 bytes a number, are the small part that they are.
    wide = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
    save_base(tmp_path / "base", num_hidden_layers=4, num_key_value_heads=2, **wide)
    write_rows(tmp_path / "chats.jsonl", chat_rows(80))
    write_rows(tmp_path / "pairs.jsonl", pair_rows(60))
    stage, kind = CASES[case]
    recipe = {
        "model": "./base",
        "adapter": {"kind": kind},
        "data": {
            "chats": {"path": "chats.jsonl", "holdout": 4},
            "pairs": {"path": "pairs.jsonl", "holdout": 4},
        },
        "stages": [stage],
    }
    found = comparisons(measured(recipe, tmp_path, live=True))
    print({name: f"{a:,} / {b:,} {a / b - 1:+.1%}" for name, (a, b) in found.items()})
    # 2 % in a process of its own, as the benchmark measures it; what other tests left to be
    # collected lives beside it here.
    assert found["live"][0] == pytest.approx(found["live"][1], rel=0.25)
    assert found["lasting"][0] == pytest.approx(found["lasting"][1], rel=0.25)
    if case == "recomputed":  # its forecast holds a block of the backward pass as well
        return
    assert abs(found["head"][0] - found["head"][1]) < 0.02 * found["live"][1]
    assert found["activations"][0] == pytest.approx(found["activations"][1], rel=0.15)
