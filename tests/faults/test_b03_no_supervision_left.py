"""B03: truncation removed every answer, the loss read 0.0 and the run "succeeded"."""

from __future__ import annotations

from tests.fixtures_tokens import tok

from lehr.data.encoded_rows import DROPPED_UNSUPERVISED
from lehr.data.encoding import Encoder
from lehr.data.shapes import Example, Origin
from lehr.data.templates import Template


def rows(prompt_bytes: int, answer_bytes: int) -> list[Example]:
    return [
        Example(
            "chat",
            Origin("chats", "chats.jsonl", line),
            messages=(
                {"role": "user", "content": "q" * prompt_bytes},
                {"role": "assistant", "content": "a" * answer_bytes},
            ),
        )
        for line in range(1, 9)
    ]


def test_rows_without_supervision_are_dropped_and_counted() -> None:
    tokenizer = tok()
    encoder = Encoder(tokenizer, Template.from_tokenizer(tokenizer), "2026-01-01")
    too_long = [encoder.encode(row, max_length=32) for row in rows(56, 5)]
    assert not any(result.encoded for result in too_long)
    assert [result.dropped[0].reason for result in too_long] == [DROPPED_UNSUPERVISED] * 8
    assert [result.dropped[0].origin.line for result in too_long] == list(range(1, 9))
    assert all(result.kept_tokens == 0 and result.dropped_tokens == 66 for result in too_long)
    fitting = [encoder.encode(row, max_length=32) for row in rows(5, 5)]
    assert all(result.encoded[0].supervised_tokens == 6 for result in fitting)
    assert not any(result.dropped or result.dropped_tokens for result in fitting)
