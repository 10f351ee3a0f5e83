"""A script of a chat as tokens: ids, mask and the bytes of what is supervised."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lehr.data.tokenization import Piece, TextTokenizer, utf8_bytes
from lehr.data.turns import Script


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of one script; supervised ones lie in [answer_start, answer_end)."""

    ids: list[int]
    supervised: list[bool]
    pieces: list[Piece]
    answer_start: int
    answer_end: int


class Sequencer:
    """Tokenises scripts.

    leading     the id that a sequence must begin with exactly once, or None
    stop_token  what is appended to an answer that its template does not end
    """

    def __init__(self, text: TextTokenizer, leading: int | None, stop_token: int) -> None:
        self.text = text
        self.leading = leading
        self.stop_token = stop_token

    def sequence(self, script: Script) -> TokenSequence:
        """Ids and mask. The tokenizer adds nothing but a BOS that the template left out."""
        cuts = set(script.boundaries)
        for answer in script.answers:
            cuts |= {answer.start, answer.end}
        tokenized = self.text.tokenize(script.rendered, script.controls, cuts)
        ids, pieces = tokenized.ids, tokenized.pieces
        supervised = [False] * len(ids)
        for answer in script.answers:
            start, end = tokenized.token_at[answer.start], tokenized.token_at[answer.end]
            supervised[start:end] = [True] * (end - start)
        if script.answers and not script.answers[-1].stopped:
            end = tokenized.token_at[script.answers[-1].end]
            ids, supervised = [*ids[:end], self.stop_token], [*supervised[:end], True]
        if self.leading is not None and ids[:1] != [self.leading]:
            ids, supervised = [self.leading, *ids], [False, *supervised]
            pieces = [replace(p, first=p.first + 1, last=p.last + 1) for p in pieces]
        if supervised and supervised[0]:
            supervised[0] = False  # nothing stands before it to predict it from
        if True not in supervised:
            return TokenSequence(ids, supervised, pieces, len(ids), len(ids))
        last = len(ids) - supervised[::-1].index(True)
        return TokenSequence(ids, supervised, pieces, supervised.index(True), last)

    def supervised_bytes(self, sequence: TokenSequence, end: int) -> int:
        """UTF-8 bytes of the supervised text in the first `end` tokens, control tokens apart."""
        size = 0
        for piece in sequence.pieces:
            first, last = piece.first, piece.last
            if not piece.text or first >= end or not any(sequence.supervised[first:last]):
                continue
            if last <= end and all(sequence.supervised[first:last]):
                size += utf8_bytes(piece.text)
                continue
            _, counts = self.text.ids_and_bytes(piece.text, piece.place)
            for index, count in enumerate(counts, first):
                if index < end and sequence.supervised[index]:
                    size += count
        return size
