"""Stop strings: where text ends an answer, whatever tokens it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

# A character may take four tokens of bytes, and some decoders drop a window's first space.
_MARGIN = 8


class StopStrings:
    """Looks for any of `strings` in what a row has written, once per new token.

    Only the last tokens are decoded: a token has a byte at least, so that a string of n
    bytes that this token ends lies in the last n tokens.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self.strings, self.decode = tuple(strings), decode
        self._tokens = max(len(one.encode("utf-8")) for one in strings) + _MARGIN

    def found(self, ids: Sequence[int]) -> str | None:
        """The stop string that the last token completes (the earliest one), or None."""
        return first_of(self.strings, self.decode(ids[-self._tokens :]))


def first_of(strings: Sequence[str], text: str) -> str | None:
    """The one of `strings` that begins earliest in `text` (the longest of equals), or None.

    >>> first_of(["b", "ab", "abc"], "xxabc")
    'abc'
    """
    places = [(text.find(one), -len(one), one) for one in strings if one in text]
    return min(places)[2] if places else None


def before_stop(text: str, stop: str | None) -> str:
    """`text` up to its stop string.

    >>> before_stop("Paris.\\nQ: next", "\\nQ:")
    'Paris.'
    """
    return text if stop is None else text.partition(stop)[0]
