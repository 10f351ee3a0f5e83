"""Plain text: document tokens, blocks, bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures_tokens import BOS, EOS, tok, tok_m

from lehr.data.documents import block_bounds
from lehr.data.encoded_rows import DROPPED_TOO_LONG, DROPPED_UNSUPERVISED, Encoding
from lehr.data.encoding import Encoder
from lehr.data.shapes import Example, Origin

ORIGIN = Origin("law", "law.txt", 1)
BARE = Encoder(tok(), None, "2026-01-01", document_begin=False, document_end=False)
MERGING = Encoder(tok_m(), None, "2026-01-01")
WITH_BOS = Encoder(tok_m(adds_bos=True), None, "2026-01-01")


def encode(encoder: Encoder, text: str, limit: int = 1000, overflow: str = "split") -> Encoding:
    example = Example("text", ORIGIN, text=text)
    return encoder.encode(example, max_length=limit, overflow=overflow)  # type: ignore[arg-type]


def test_document_tokens_are_a_stated_policy() -> None:
    assert MERGING.documents.description == "begin: nothing, end: <eos>"
    assert MERGING.text_ids("a") == [97, EOS]
    assert WITH_BOS.documents.description == "begin: <bos>, end: <eos>"
    assert WITH_BOS.text_ids("a") == [BOS, 97, EOS]
    both = tok(adds_bos=True, adds_eos=True)
    assert Encoder(both, None, "2026-01-01").text_ids("a") == [BOS, 97, EOS]
    assert BARE.text_ids("a") == [97]
    separated = Encoder(tok(extra=("<|endoftext|>",)), None, "2026-01-01")
    assert separated.documents.description == "begin: nothing, end: <|endoftext|>"


def test_control_text_in_a_document_stays_text() -> None:
    assert MERGING.text_ids("<eos><think>") == [*b"<eos><think>", EOS]


def test_everything_but_the_first_token_is_trained() -> None:
    (encoded,) = encode(MERGING, "1=. 2").encoded
    assert encoded.ids.tolist() == [49, 300, 32, 50, EOS]
    assert encoded.supervised.tolist() == [False, True, True, True, True]
    assert encoded.supervised_bytes == 4  # "1" is given, the end of the document has no text
    (encoded,) = encode(WITH_BOS, "1=. 2").encoded
    assert encoded.supervised_bytes == 5


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="a=.: \né\U0001f9ca", min_size=1, max_size=60), limit=st.integers(2, 9)
)
def test_blocks_keep_every_token_and_every_byte(text: str, limit: int) -> None:
    for encoder in (MERGING, WITH_BOS):
        ids = encoder.text_ids(text)
        result = encode(encoder, text, limit)
        joined = [number for block in result.encoded for number in block.ids.tolist()]
        assert result.kept_tokens + result.dropped_tokens == len(ids)
        assert result.dropped_tokens <= 1 and joined == ids[: len(joined)]
        _, counts = encoder.text.ids_and_bytes(text)
        assert sum(counts) == len(text.encode())
        whole = encode(encoder, text).encoded[0]
        first = 0 if encoder is WITH_BOS else counts[0]
        assert whole.supervised_bytes == len(text.encode()) - first
        assert all(2 <= block.tokens <= limit for block in result.encoded)


def test_block_bounds_never_leave_one_token_where_they_can_help_it() -> None:
    for tokens in range(2, 60):
        for limit in range(3, 20):
            bounds = block_bounds(tokens, limit)
            assert bounds[0][0] == 0 and bounds[-1][1] == tokens
            assert all(a[1] == b[0] for a, b in pairwise(bounds))
            assert all(2 <= end - start <= limit for start, end in bounds)


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_too_short_to_train(overflow: str) -> None:
    for result in (encode(BARE, "a", 10, overflow), encode(BARE, "abc", 1, overflow)):
        assert not result.encoded
        assert result.dropped[0].reason in (DROPPED_UNSUPERVISED, DROPPED_TOO_LONG)
        assert result.kept_tokens == 0 and result.dropped_tokens in (1, 3)
    assert encode(BARE, "", 10, overflow).dropped[0].reason == DROPPED_UNSUPERVISED
