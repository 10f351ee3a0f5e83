"""What fits a memory limit: arithmetic by hand, and the head's chunks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.pipeline.small import go, lora_recipe, read, stage, write_recipe

from lehr.models.head import chunk_rows
from lehr.pipeline.memory_limits import limit_that_would_do, room_for_activations, settle_chunk
from lehr.pipeline.staging import load_of

PARTS = {"weights": 300, "optimizer": 50, "gradients": 40, "head": 60, "activations": 7}


def test_room_by_hand() -> None:
    room = partial(room_for_activations, PARTS)
    assert room(550, 0.0, several=True) == 550 - 350 - 60 - 40
    assert room(550, 0.0, several=False) == 550 - 350 - 60, "gradients come when activations go"
    assert room(550, 1.0, several=False) == (550 - 350) // 2 - 60, "each byte takes two"


def test_a_chunk_is_halved_until_the_limit_holds() -> None:
    def peak(rows: int | None) -> int:
        return 1000 + 3 * (100 if rows is None else rows)

    assert settle_chunk(500, 100, peak, 1300) is None
    assert settle_chunk(500, 100, peak, 1299) == 50
    assert settle_chunk(500, 100, peak, 1080) == 25
    assert settle_chunk(500, 100, peak, 0) == 16, "the smallest, and it does not fit"
    assert settle_chunk(500, 12, peak, 0) is None, "nothing to halve"
    assert chunk_rows(10**6) == 16


def test_the_largest_micro_batch_of_a_stage() -> None:
    updates = [[(10, 1), (20, 2), (5, 5)], [(8, 8), (8, 9)], []]
    one, two, many = (load_of(updates, packs) for packs in (1, 2, 9))
    assert (one.tokens, one.pairs, one.micro_batches) == (20, 9, 3)
    assert (two.tokens, two.pairs, two.micro_batches) == (30, 17, 2)
    assert (many.tokens, many.pairs, many.micro_batches) == (35, 17, 1)


def test_limits_are_rounded_up() -> None:
    assert limit_that_would_do(2**30) == "1.00" and limit_that_would_do(2**30 + 1) == "1.01"


@pytest.mark.usefixtures("lean")
def test_a_chunk_that_a_limit_asks_for_is_what_trains(work: Any, monkeypatch: Any) -> None:
    """Its rows stand in plan.json, reach the head, and change no loss beyond rounding."""
    from lehr.models import language_model
    from lehr.pipeline import planning

    seen: list[int | None] = []
    own = language_model.token_stats

    def watched(*args: Any, **keys: Any) -> Any:
        seen.append(keys["chunk"])
        return own(*args, **keys)

    monkeypatch.setattr(language_model, "token_stats", watched)
    recipe = lora_recipe(gates="none", export="adapter")
    recipe["stages"] = [{"sft": stage("chats", max_updates=1)}]
    path = write_recipe(work, recipe)
    go(path)
    assert set(seen) == {None}
    usual = (work / "out" / "01-sft" / "metrics.jsonl").read_text()
    monkeypatch.setattr(planning, "settle_chunk", lambda *_: 16)
    go(path, "memory_limit=15", "output=other")
    assert 16 in seen
    assert read(work / "other" / "plan.json")["stages"][0]["head_chunk"] == 16
    losses = [
        float(text.split('"loss": ')[1].split(",")[0])
        for text in (usual, (work / "other" / "01-sft" / "metrics.jsonl").read_text())
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
