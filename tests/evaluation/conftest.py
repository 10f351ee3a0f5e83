"""A tiny model, a character encoder and stub worlds for the evaluation's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lehr.data.shapes import Encoded, Example, Origin
from lehr.models.language_model import LanguageModel

SYSTEM, USER, ASSISTANT, END = 0, 1, 2, 3
CHARACTERS = "\n " + "".join(chr(code) for code in range(33, 127))
VOCABULARY = 4 + len(CHARACTERS)


@dataclass
class CharacterEncoder:
    """One token a character; role tokens before each message and END after it."""

    fingerprint: str = "characters-1"
    stop_ids: frozenset[int] = frozenset({END})
    calls: list[Example] = field(default_factory=list)

    def text_ids(self, text: str) -> list[int]:
        return [4 + CHARACTERS.index(character) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(CHARACTERS[token - 4] for token in ids if token >= 4)

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> list[int]:
        ids: list[int] = []
        for message in messages:
            role = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}[message["role"]]
            ids += [role, *self.text_ids(message["content"]), END]
        return [*ids, ASSISTANT]

    def encode(
        self,
        example: Example,
        train_on: str = "assistant",
        max_length: int = 1024,
        overflow: str = "truncate",
    ) -> Any:
        self.calls.append(example)
        if example.kind == "text":
            ids = self.text_ids(example.text)
            if len(ids) < 2:
                return SimpleNamespace(encoded=[])
            parts = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
            return SimpleNamespace(
                encoded=[self._part(part, 1, example.origin) for part in parts if len(part) > 1]
            )
        if example.kind == "chat":
            prompt = self.prompt_ids(example.messages[:-1])
            ids = [*prompt, *self.text_ids(example.messages[-1]["content"]), END]
            if len(ids) > max_length:
                return SimpleNamespace(encoded=[])
            return SimpleNamespace(encoded=[self._part(ids, len(prompt), example.origin)])
        prompt = self.prompt_ids(example.messages)
        branches = tuple(
            self._part([*self.text_ids(side[-1]["content"]), END], 0, example.origin)
            for side in (example.chosen, example.rejected)
        )
        ids = torch.tensor(prompt)
        nothing = torch.zeros(len(prompt), dtype=torch.bool)
        return SimpleNamespace(encoded=[Encoded(ids, nothing, example.origin, branches)])

    def _part(self, ids: list[int], first: int, origin: Origin) -> Encoded:
        supervised = torch.zeros(len(ids), dtype=torch.bool)
        supervised[first:] = True
        size = len(self.decode(ids[first:]).encode())
        return Encoded(torch.tensor(ids), supervised, origin, supervised_bytes=size)


@pytest.fixture
def encoder() -> CharacterEncoder:
    return CharacterEncoder()


@pytest.fixture
def tiny() -> LanguageModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    model = LanguageModel(LlamaForCausalLM(config), None, "tiny")
    model.train_all()
    return model


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], str]], None]:
    """Let suites that generate hear `stub(question)` instead of a model."""

    def use(stub: Callable[[str], str]) -> None:
        def answers(model: Any, conversations: Any, encoder: Any, **_: Any) -> list[str]:
            return [stub(messages[-1]["content"]).strip() for messages in conversations]

        for module in ("world_suites", "refusals"):
            monkeypatch.setattr(f"lehr.evaluation.{module}.greedy_answers", answers)

    return use
