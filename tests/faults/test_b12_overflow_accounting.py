"""B12 (encoding): over-long rows lost tokens silently, or tails came back without context."""

from __future__ import annotations

from tests.fixtures_tokens import tok

from lehr.data.encoding import Encoder, Overflow
from lehr.data.shapes import Example, Origin


def encode(overflow: Overflow) -> tuple[list[list[int]], int, int]:
    encoder = Encoder(tok(), None, "2026-01-01", document_begin=False, document_end=False)
    results = [
        encoder.encode(
            Example("text", Origin("law", "law.txt", line), text=text),
            max_length=12,
            overflow=overflow,
        )
        for line, text in enumerate(("abcdefghijklmnopq", "123456789"), 1)
    ]
    blocks = [block.ids.tolist() for result in results for block in result.encoded]
    kept = sum(result.kept_tokens for result in results)
    return blocks, kept, sum(result.dropped_tokens for result in results)


def test_kept_and_dropped_are_all() -> None:
    blocks, kept, dropped = encode("truncate")
    assert [len(block) for block in blocks] == [12, 9] and (kept, dropped) == (21, 5)
    blocks, kept, dropped = encode("split")
    assert [len(block) for block in blocks] == [12, 5, 9] and (kept, dropped) == (26, 0)
    assert bytes(blocks[1]) == b"mnopq"  # a segment of its own
    blocks, kept, dropped = encode("drop")
    assert [len(block) for block in blocks] == [9] and (kept, dropped) == (9, 17)
