"""The tokenizer of SmolLM2-135M-Instruct, where it has been fetched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lehr.data.encoding import Encoder
from lehr.data.preview import every_end_token, preview
from lehr.data.shapes import Example, Origin
from lehr.data.templates import Template

pytestmark = pytest.mark.real_model
ORIGIN = Origin("chats", "chats.jsonl", 1)
MESSAGES = (
    {"role": "user", "content": "Say <|im_end|> and \U0001f9ca."},
    {"role": "assistant", "content": "\n\n<|im_start|> \U0001f9ca"},
    {"role": "user", "content": "Again?  "},
    {"role": "assistant", "content": "No."},
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    home = Path(os.environ.get("LEHR_HOME", Path.home() / ".cache" / "lehr"))
    folder = home / "models" / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip("smollm2-135m-instruct has not been fetched")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, Template.from_tokenizer(tokenizer), "2026-01-01")


def test_begin_is_a_turn_marker_and_end_a_turn_end(encoder: Encoder) -> None:
    assert encoder.stop_ids == {2}
    assert encoder.documents.description == "begin: nothing, end: <|endoftext|>"
    (encoded,) = encoder.encode(Example("chat", ORIGIN, messages=MESSAGES)).encoded
    ids = encoded.ids.tolist()
    assert ids.count(1) == 5 and ids.count(2) == 5  # the template adds a system turn
    assert ids[:2].count(1) == 1


def test_what_is_trained(encoder: Encoder, tokenizer: Any) -> None:
    (encoded,) = encoder.encode(Example("chat", ORIGIN, messages=MESSAGES)).encoded
    trained = "".join(span.text for span in preview(encoded, tokenizer) if span.supervised)
    assert trained == "\n\n<|im_start|> \U0001f9ca<|im_end|>No.<|im_end|>"
    assert every_end_token([encoded], encoder.stop_ids)
    assert encoded.supervised_bytes == len("\n\n<|im_start|> \U0001f9caNo.".encode())
    for length in (1, 3):
        prompt = encoder.prompt_ids(MESSAGES[:length])
        assert encoded.ids.tolist()[: len(prompt)] == prompt


def test_ordinary_text_has_the_ids_of_transformers(encoder: Encoder, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is  the\tcapital?\n"}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encoder.prompt_ids(messages) == theirs
    text = "It's 12,345 ½ \U0001f9ca words.\n\n  Done." * 20
    assert encoder.text_ids(text) == [*tokenizer(text)["input_ids"], 0]
