"""B01: with pad id = EOS id the real final EOS was taken for padding and never trained."""

from __future__ import annotations

import pytest
from tests.fixtures_tokens import EOS, TPL, tok

from lehr.data.encoding import Encoder
from lehr.data.shapes import Example, Origin
from lehr.data.templates import Template

ANSWERS = ("ab", "abcde", "abcdefghi")


@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_each_answer_trains_its_bytes_and_one_end_token(pad_is_eos: bool) -> None:
    source = TPL.replace("<end>", "{{ eos_token if m['role'] == 'assistant' else '<end>' }}")
    tokenizer = tok(template=source, pad_is_eos=pad_is_eos)
    encoder = Encoder(tokenizer, Template.from_tokenizer(tokenizer), "2026-01-01")
    counts = []
    for answer in ANSWERS:
        messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": answer})
        example = Example("chat", Origin("chats", "chats.jsonl", 1), messages=messages)
        (encoded,) = encoder.encode(example).encoded
        ids, mask = encoded.ids.tolist(), encoded.supervised.tolist()
        counts.append(sum(mask))
        ends = [index for index, number in enumerate(ids) if number == EOS and mask[index]]
        assert ends == [len(ids) - 1]  # exactly one, at the last real position
    assert counts == [3, 6, 10] and sum(counts) == 19
