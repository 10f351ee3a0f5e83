"""The preview shows the decoded text, whole, with what is trained."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures_tokens import END, tok

from lehr.data.encoding import Encoder
from lehr.data.preview import Span, every_end_token, preview, supervised_share
from lehr.data.shapes import Encoded, Example, Origin
from lehr.data.templates import Template

ORIGIN = Origin("chats", "chats.jsonl", 1)
TOKENIZER = tok()
ENCODER = Encoder(TOKENIZER, Template.from_tokenizer(TOKENIZER), "2026-01-01")
MESSAGES = ({"role": "user", "content": "é?"}, {"role": "assistant", "content": "ja \U0001f9ca"})


def made(ids: list[int], supervised: list[bool]) -> Encoded:
    return Encoded(torch.tensor(ids), torch.tensor(supervised), ORIGIN)


def test_spans_of_a_chat() -> None:
    encoded = ENCODER.encode(Example("chat", ORIGIN, messages=MESSAGES)).encoded[0]
    assert preview(encoded, TOKENIZER) == [
        Span("<bos>", False, True),
        Span("<user>", False, True),
        Span("é?", False, False),
        Span("<end>", False, True),
        Span("<asst>", False, True),
        Span("ja \U0001f9ca", True, False),
        Span("<end>", True, True),
    ]


def test_branches_follow_their_prompt() -> None:
    example = Example(
        "pair", ORIGIN, messages=MESSAGES[:1], chosen=MESSAGES[1:], rejected=MESSAGES[1:]
    )
    texts = [span.text for span in preview(ENCODER.encode(example).encoded[0], TOKENIZER)]
    assert "".join(texts) == "<bos><user>é?<end><asst>" + 2 * "ja \U0001f9ca<end>"


@settings(max_examples=50, deadline=None)
@given(
    text=st.text(alphabet="aé€\U0001f9ca", min_size=1, max_size=8),
    flags=st.lists(st.booleans(), min_size=32, max_size=32),
)
def test_characters_split_over_tokens_are_whole(text: str, flags: list[bool]) -> None:
    ids = list(text.encode())
    spans = preview(made(ids, flags[: len(ids)]), TOKENIZER)
    assert "".join(span.text for span in spans) == text
    assert not any("\ufffd" in span.text for span in spans)


def test_a_character_cut_off_is_marked() -> None:
    ids = list("a\U0001f9ca".encode())[:3]
    assert preview(made(ids, [True] * 3), TOKENIZER) == [Span("a\ufffd", True, False)]


def test_every_end_token() -> None:
    yes = made([1, 2, END, 3, END], [False, True, True, False, True])
    cut = made([1, 2, 3], [False, True, True])
    middle = made([1, 2, 3, 4, END], [False, True, False, True, True])
    nothing = made([1, END], [False, False])
    stops = {END}
    assert every_end_token([yes, nothing], stops)
    assert not every_end_token([yes, cut], stops)
    assert not every_end_token([middle], stops)
    assert not every_end_token([nothing], stops)
    assert not every_end_token([Encoded(yes.ids, yes.supervised, ORIGIN, (yes, cut))], stops)


def test_supervised_share() -> None:
    assert supervised_share([made([1, 2, 3, 4], [False, True, False, False])]) == 0.25
    assert supervised_share([]) == 0.0
