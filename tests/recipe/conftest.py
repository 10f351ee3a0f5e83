"""A folder with the files of a recipe, and a way to see what is wrong with a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import loads

FULL = """\
model: smollm2-135m-instruct
template: auto
output: runs/assistant
seed: 0
adapter: {kind: lora, rank: 16}
data:
  law:   law.txt
  web:   general.txt
  chats: {path: chats.jsonl, holdout: 200, train_on: assistant}
  pairs: {path: pairs.jsonl, holdout: 200}
stages:
  - pretrain:   {data: {law: 0.75, web: 0.25}, learning_rate: 1e-4}
  - sft:        {data: chats, epochs: 1, learning_rate: 2e-4, keep: {replay: {web: 0.05}}}
  - preference: {data: pairs, loss: dpo, beta: 0.1, learning_rate: 5e-6}
gates:
  improve: {pretrain: law.bits_per_byte, sft: chats.loss, preference: pairs.accuracy}
  protect: {forgetting: 0.02, over_refusal: 0.04, sycophancy: 0.05}
export: [adapter, merged]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("law.txt", "general.txt", "chats.jsonl", "pairs.jsonl", "extra.jsonl"):
        (tmp_path / name).write_text(f"content of {name}\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def full() -> str:
    return FULL


@pytest.fixture
def problems_of(folder: Path) -> Callable[..., list[str]]:
    """Every problem of a recipe text, as a user reads it."""

    def find(text: str, overrides: Sequence[str] = ()) -> list[str]:
        try:
            loads(text, folder, overrides, name="r.yaml")
        except RecipeError as error:
            # What was expected; the words around it are those of every problem.
            return [str(one).replace(": expected ", ": ", 1) for one in error.problems]
        return []

    return find


@pytest.fixture
def sft() -> Callable[[str], str]:
    """A small recipe with one sft stage that has these further keys."""

    def text(keys: str = "", top: str = "", source: str = "chats.jsonl") -> str:
        more = f", {keys}" if keys else ""
        return (
            f"model: m\n{top}\ndata:\n  chats: {source}\n  web: general.txt\n"
            f"stages:\n  - sft: {{data: chats{more}}}\n"
        )

    return text
