"""B07: rows that the template cannot render became empty text and were trained."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fixtures_templates import template_of, tokenizer_of

from lehr.data.encoding import Encoder
from lehr.data.shapes import Example, Origin

INVALID = {2, 3, 5, 11, 17, 23, 29}


def rows() -> list[Example]:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    return [
        Example(
            "chat",
            Origin("chats", "chats.jsonl", line),
            messages=(user, user, answer) if line in INVALID else (user, answer),
        )
        for line in range(1, 31)
    ]


@pytest.mark.parametrize("workers", [1, 4])
def test_rows_that_raise_are_dropped_with_the_templates_own_reason(workers: int) -> None:
    encoder = Encoder(tokenizer_of("gemma"), template_of("gemma"), "2026-01-01")
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(encoder.encode, rows()))
    dropped = [drop for result in results for drop in result.dropped]
    reason = "the template raises: Roles must take turns: user, assistant, ..."
    assert Counter(drop.reason for drop in dropped) == {reason: 7}
    assert str(dropped[0].origin) == "chats.jsonl:2"
    assert sum(len(result.encoded) for result in results) == 23
    assert all(result.encoded or result.dropped for result in results)
