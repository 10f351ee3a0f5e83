"""Plain text as documents: the begin and end policy, and cutting into blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lehr.data.tokenization import TextTokenizer

# Tokens that models use between documents, where their EOS ends a turn of chat instead.
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁text|>")


@dataclass(frozen=True)
class DocumentPolicy:
    """Which token stands at the begin and at the end of a document (None: none)."""

    begin: int | None
    end: int | None
    description: str


def document_policy(tokenizer: Any, text: TextTokenizer, begin: bool, end: bool) -> DocumentPolicy:
    """The policy for a tokenizer.

    begin: the BOS, if this tokenizer puts one before a text by itself (some models
    have a BOS that only means the start of a chat turn). end: the vocabulary's token
    between documents, else the EOS.
    """
    begin_id = leading_token(tokenizer) if begin else None
    end_id = None
    if end:
        names = [name for name in _DOCUMENT_ENDS if name in text.controls]
        end_id = text.controls[names[0]] if names else tokenizer.eos_token_id
    spoken = [
        "nothing" if number is None else str(tokenizer.convert_ids_to_tokens(number))
        for number in (begin_id, end_id)
    ]
    return DocumentPolicy(begin_id, end_id, f"begin: {spoken[0]}, end: {spoken[1]}")


def leading_token(tokenizer: Any) -> int | None:
    """The BOS id if the tokenizer puts one before a text by itself."""
    begin = tokenizer.bos_token_id
    if begin is None:
        return None
    ids = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True).ids
    return int(begin) if ids and ids[0] == begin else None


def block_bounds(tokens: int, max_length: int) -> list[tuple[int, int]]:
    """[start, end) of the blocks of a document: all full but the last.

    A last block of one token would supervise nothing, so it takes one from its
    neighbour.

    >>> block_bounds(17, 12), block_bounds(25, 12)
    ([(0, 12), (12, 17)], [(0, 12), (12, 23), (23, 25)])
    """
    starts = list(range(0, tokens, max_length))
    if len(starts) > 1 and tokens - starts[-1] == 1 and max_length > 2:
        starts[-1] -= 1
    return list(zip(starts, [*starts[1:], tokens], strict=False))
