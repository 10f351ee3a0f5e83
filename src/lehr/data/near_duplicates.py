"""Near-duplicates: texts that share most of their three-word runs (Jaccard similarity).

MinHash with banding finds candidates (Broder 1997; Leskovec, Rajaraman & Ullman, Mining of
Massive Datasets, ch. 3), and the exact similarity decides, so that a match is never a guess.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

THRESHOLD = 0.8
# The index is asked more loosely than the exact test: at its own threshold it misses half.
_INDEX_THRESHOLD = 0.55
_WORDS_READ = 2000  # of each text: a long text is compared by its beginning
_PERMUTATIONS = 64
_CANDIDATES_CHECKED = 50
# Scripts without spaces between words count by the character.
_WORD = re.compile(r"[^\W\u2e80-\ud7ff\uf900-\ufaff]+|[\u2e80-\ud7ff\uf900-\ufaff]")


@dataclass(frozen=True)
class Print:
    """A text for comparison: hashes of its runs (sorted, distinct uint32) and their MinHash."""

    runs: NDArray[np.uint32]
    sketch: Any


@lru_cache(maxsize=1 << 18)
def _word_hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace"))


def runs_of(text: str) -> NDArray[np.uint32]:
    """Hashes of the runs of three words in `text` (of all its words where it has fewer).

    >>> len(runs_of("One two three four.")), bool((runs_of("A b") == runs_of("a, b!")).all())
    (2, True)
    """
    words = _WORD.findall(text[: 20 * _WORDS_READ].lower())[:_WORDS_READ]
    hashes = np.array([_word_hash(word) for word in words], dtype=np.uint64)
    if len(hashes) < 3:
        hashes = np.concatenate([hashes, np.zeros(3 - len(hashes), dtype=np.uint64)])
    # A polynomial in 64 bits (wrapping), of which the upper half is kept.
    mixed = (
        hashes[:-2] * np.uint64(0x9E3779B97F4A7C15)
        + hashes[1:-1] * np.uint64(0xC2B2AE3D27D4EB4F)
        + hashes[2:] * np.uint64(0x165667B19E3779F9)
    )
    return np.unique((mixed >> np.uint64(32)).astype(np.uint32))


def jaccard(left: NDArray[np.uint32], right: NDArray[np.uint32]) -> float:
    """Size of the intersection over size of the union."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / (len(left) + len(right) - shared)


def prints_of(texts: Sequence[str]) -> list[Print]:
    """The texts, prepared for comparison."""
    from datasketch import MinHash

    empty: Any = MinHash(num_perm=_PERMUTATIONS, seed=1, hashfunc=_as_it_is)
    prints = []
    for text in texts:
        runs = runs_of(text)
        sketch = empty.copy()
        sketch.update_batch(runs.tolist())
        prints.append(Print(runs, sketch))
    return prints


def _as_it_is(value: int) -> int:
    return value


@lru_cache(maxsize=1)
def _bands() -> tuple[int, int]:
    """Bands and rows of the index for its threshold: a search of many integrals, done once."""
    from datasketch import MinHashLSH

    index: Any = MinHashLSH(threshold=_INDEX_THRESHOLD, num_perm=_PERMUTATIONS)
    return int(index.b), int(index.r)


class NearIndex:
    """Texts that can be asked for one that is nearly the same."""

    def __init__(self, threshold: float = THRESHOLD) -> None:
        from datasketch import MinHashLSH

        self.threshold = threshold
        self._prints: list[Print] = []
        self._index: Any = MinHashLSH(num_perm=_PERMUTATIONS, params=_bands())

    def find(self, text: Print) -> int | None:
        """Number of the first text that is at least `threshold` similar, or None."""
        candidates = sorted(self._index.query(text.sketch))
        for number in candidates[:_CANDIDATES_CHECKED]:
            if jaccard(self._prints[number].runs, text.runs) >= self.threshold:
                return int(number)
        return None

    def add(self, text: Print) -> None:
        """Adds a text; its number is how many were there before."""
        self._index.insert(len(self._prints), text.sketch)
        self._prints.append(text)


def near_duplicates(texts: Sequence[Print]) -> list[tuple[int, int]]:
    """(later, earlier) for every text that nearly repeats one before it.

    A text that repeats another is not itself compared with, so a cluster of n counts n - 1.
    """
    index = NearIndex()
    anchors: list[int] = []
    found: list[tuple[int, int]] = []
    for position, text in enumerate(texts):
        number = index.find(text)
        if number is None:
            index.add(text)
            anchors.append(position)
        else:
            found.append((position, anchors[number]))
    return found


def near_matches(texts: Sequence[Print], others: Sequence[Print]) -> list[tuple[int, int]]:
    """(index in `texts`, index in `others`) for every text that nearly repeats one of `others`."""
    index = NearIndex()
    for other in others:
        index.add(other)
    found = []
    for position, text in enumerate(texts):
        number = index.find(text)
        if number is not None:
            found.append((position, number))
    return found
