"""strategy.md: plain words, numbers only from the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sample_run import audit_of, write_sample_run

from lehr.report.strategy import write_strategy

RECIPE: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "adapter": {"kind": "lora", "rank": 16},
    "stages": [
        {
            "kind": "sft",
            "data": {"chats": 1.0},
            "max_length": 1024,
            "keep": {"replay": {"web": 0.05}},
        },
        {"kind": "preference", "data": {"pairs": 1.0}, "learning_rate": 5e-6},
    ],
}
PLAN: dict[str, Any] = {
    "machine": {"cpu": "A processor", "cores": 2, "memory_gib": 15.6},
    "precision": {"value": "bf16", "why": "bf16 products run 3.1 x as fast as fp32 here"},
    "model": {
        "name": "smollm2-135m-instruct",
        "parameters": 134_515_008,
        "layers": 30,
        "vocabulary": 49_152,
        "assistant": True,
    },
    "stages": [
        {"kind": "sft", "name": "sft", "updates": 60, "tokens_per_update": 3000, "seconds": 480,
         "memory": {"weights": 269 * 10**6, "gradients": 4 * 4_884_480, "peak": 2**31},
         "recompute": {"budget": 0.5}, "recompute_why": "as the recipe says",
         "recompute_operations": {"uncovered": ["layers.0.experts.up"]},
         "recompute_report": [
             {"choice": "none", "kept_bytes": 2**30, "share_added": 0.0},
             {"choice": "budget 0.5", "kept_bytes": 2**29, "share_added": 0.021}]},
        {"kind": "preference", "name": "preference", "updates": 20, "seconds": 300},
    ],
    "gates": [
        {"name": "over_refusal", "limit": 0.04, "resolves": 0.09, "n": 100, "can_pass": False,
         "unit": "share", "note": "about 407 items would be enough"},
    ],
    "data": [audit_of("sft")["sources"][0]],
    "findings": ["the schedule of sft has a tail at zero"],
}  # fmt: skip


def test_says_what_the_plan_says() -> None:
    written = write_strategy(PLAN, RECIPE)
    for words in (
        "already an assistant",
        "13.0 min",
        "2.00 GiB",
        "LoRA, rank 16",
        "4.9 M parameters",
        "bf16 products run 3.1 x",
        "replays 5% web",
        "preference replays nothing",
        "no second model is held",
        "**Recomputation: budget 0.5**, as the recipe says",
        "none 1.00 GiB; budget 0.5 512 MiB, +2.1% operations",
        "1 matrix (layers.0.experts.up",
        "**Cannot pass**: about 407 items would be enough",
        "limit 4 points, 100 items resolve 9 points",
        "2,181 of 2,400 rows train",
        "A falling loss",
        "longer than 1,024 tokens",
        "49,152 numbers",
        "tail at zero",
    ):
        assert words in written, words


def test_is_at_most_two_pages() -> None:
    assert len(write_strategy(PLAN, RECIPE).split()) < 900


def test_every_number_is_in_the_plan_or_recipe(tmp_path: Path) -> None:
    """Without a plan no digit is written."""
    assert not re.search(r"\d", write_strategy({}, {}).replace("0 stages", ""))


def test_reads_recipes_as_written_and_as_resolved(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run", updates_share=0.02)
    plan = json.loads((run / "plan.json").read_text())
    short = {"stages": [{"pretrain": {"data": "text"}}, {"sft": {"data": ["chats", "text"]}}]}
    written = write_strategy(plan, short)
    assert "**pretrain**, from text" in written and "**sft**, from chats, text" in written
    assert "starts from random weights" in written and "All weights train" in written


@pytest.mark.parametrize("wrong", [None, 3, "word", [], [None, "x"], {"a": {"b": None}}])
def test_survives_wrong_kinds(wrong: object) -> None:
    for key in PLAN:
        write_strategy({**PLAN, key: wrong}, RECIPE)
    for key in RECIPE:
        write_strategy(PLAN, {**RECIPE, key: wrong})
