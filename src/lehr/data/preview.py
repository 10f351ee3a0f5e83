"""What is trained, made visible: the text of an example with its supervised parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lehr.data.shapes import Encoded


@dataclass(frozen=True)
class Span:
    """A stretch of decoded text, all of it supervised or not, control tokens or not."""

    text: str
    supervised: bool
    control: bool


def preview(encoded: Encoded, tokenizer: Any) -> list[Span]:
    """The example as spans; branches follow their prompt, one after the other.

    The texts join to the decoded ids. A character spread over several tokens appears
    where its last byte does; one that is cut off at the end appears as U+FFFD.
    """
    spans = _spans(encoded, tokenizer)
    for branch in encoded.branches:
        spans += _spans(branch, tokenizer)
    return spans


def _spans(encoded: Encoded, tokenizer: Any) -> list[Span]:
    control_ids = set(tokenizer.added_tokens_decoder)
    tokens = list(zip(encoded.ids.tolist(), encoded.supervised.tolist(), strict=True))
    spans: list[Span] = []
    for control, stretch in groupby(tokens, key=lambda token: token[0] in control_ids):
        if control:
            spans += [
                Span(_decode([number], tokenizer), supervised, True)
                for number, supervised in stretch
            ]
        else:
            spans += _text_spans(list(stretch), tokenizer)
    return spans


def _text_spans(tokens: list[tuple[int, bool]], tokenizer: Any) -> list[Span]:
    """Spans of ordinary tokens, each the text that its tokens add to what stands before."""
    ids = [number for number, _ in tokens]
    spans: list[Span] = []
    shown, end = 0, 0
    for supervised, group in groupby(tokens, key=lambda token: token[1]):
        end += len(list(group))
        text = _decode(ids[:end], tokenizer)
        if end < len(ids):
            text = text.rstrip("\ufffd")  # a character that later tokens complete
        if len(text) > shown:
            spans.append(Span(text[shown:], supervised, False))
            shown = len(text)
    return spans


def _decode(ids: list[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def every_end_token(encoded: Iterable[Encoded], stop_ids: Collection[int]) -> bool:
    """Whether each stretch of supervised tokens ends with a token that ends generation.

    False when nothing is supervised at all. A truncated answer has no end token.
    """
    ended, answers = end_tokens(encoded, stop_ids)
    return ended == answers > 0


def end_tokens(encoded: Iterable[Encoded], stop_ids: Collection[int]) -> tuple[int, int]:
    """(stretches of supervised tokens that end with a stop id, all of them)."""
    ended = answers = 0
    for sequence in _sequences(encoded):
        ids, mask = sequence.ids.tolist(), [*sequence.supervised.tolist(), False]
        for index, number in enumerate(ids):
            if mask[index] and not mask[index + 1]:
                answers += 1
                ended += number in stop_ids
    return ended, answers


def supervised_share(encoded: Iterable[Encoded]) -> float:
    """Supervised tokens divided by all tokens (0 for no tokens)."""
    tokens = supervised = 0
    for example in encoded:
        tokens += example.tokens
        supervised += example.supervised_tokens
    return supervised / tokens if tokens else 0.0


def _sequences(encoded: Iterable[Encoded]) -> Iterator[Encoded]:
    for example in encoded:
        yield from example.branches or (example,)
