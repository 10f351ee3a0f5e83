"""B02: the template wrote BOS, and the tokenizer put a second one before it."""

from __future__ import annotations

import pytest
from tests.fixtures_tokens import ASST, BOS, END, EOS, TPL, USER, tok

from lehr.data.encoding import Encoder
from lehr.data.shapes import Example, Origin
from lehr.data.templates import Template

PROMPT = ({"role": "user", "content": "q"},)
ANSWER = ({"role": "assistant", "content": "a"},)
ORIGIN = Origin("chats", "chats.jsonl", 1)


@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize(
    ("template", "adds_bos"),
    [(TPL, True), (TPL, False), (TPL.removeprefix("{{ bos_token }}"), True)],
)
def test_one_begin_token_on_every_path(template: str, adds_bos: bool, adds_eos: bool) -> None:
    tokenizer = tok(template=template, adds_bos=adds_bos, adds_eos=adds_eos)
    encoder = Encoder(tokenizer, Template.from_tokenizer(tokenizer), "2026-01-01")
    prompt = [BOS, USER, 113, END, ASST]
    chat = encoder.encode(Example("chat", ORIGIN, messages=PROMPT + ANSWER)).encoded[0]
    pair = encoder.encode(
        Example("pair", ORIGIN, messages=PROMPT, chosen=ANSWER, rejected=ANSWER)
    ).encoded[0]
    assert encoder.prompt_ids(PROMPT) == prompt  # rollouts, evaluation and serving
    assert pair.ids.tolist() == prompt
    assert chat.ids.tolist() == [*prompt, 97, END]
    assert chat.supervised.tolist() == [False] * 5 + [True] * 2
    for branch in pair.branches:
        assert branch.ids.tolist() == [97, END]
    assert BOS not in chat.ids.tolist()[1:] and EOS not in chat.ids.tolist()


def test_no_begin_token_where_neither_wants_one() -> None:
    tokenizer = tok(template=TPL.removeprefix("{{ bos_token }}"))
    encoder = Encoder(tokenizer, Template.from_tokenizer(tokenizer), "2026-01-01")
    assert encoder.prompt_ids(PROMPT) == [USER, 113, END, ASST]
