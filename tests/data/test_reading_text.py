"""Plain text: cut at blank lines, nothing lost, each document with its line."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.data.plain_text import read_text


def documents(text: str, limit: int = 4000) -> list[tuple[int, str]]:
    rows = read_text(io.BytesIO(text.encode()), limit)
    return [(row.line, str(row.value)) for row in rows]


def test_paragraphs_are_joined_while_they_fit() -> None:
    assert documents("aa\n\nbb\n\n\ncc\n", limit=6) == [(1, "aa\n\nbb"), (6, "cc")]


def test_a_long_paragraph_is_cut_at_line_ends_and_a_long_line_stays_whole() -> None:
    assert documents("aa\nbb\ncc\n", limit=5) == [(1, "aa\nbb"), (3, "cc")]
    assert documents("a\n\n" + "b" * 50 + "\nc\n", limit=5) == [
        (1, "a"),
        (3, "b" * 50),
        (4, "c"),
    ]


def test_a_paragraph_that_does_not_fit_is_not_torn() -> None:
    assert documents("aaaa\n\nbb\nbb\nbb\n", limit=9) == [(1, "aaaa"), (3, "bb\nbb\nbb")]


def test_crlf_bom_blank_lines_of_spaces_and_indentation() -> None:
    assert documents("\ufeff  a\r\n \t \r\nb\r\n", limit=100) == [(1, "  a\n \t \nb")]
    assert documents("\n \n\n") == []
    assert documents("a\u2028b\x0cc\n") == [(1, "a\u2028b\x0cc")]


def test_an_undecodable_line_is_dropped_alone() -> None:
    rows = list(read_text(io.BytesIO(b"a\ncaf\xe9\nb\n")))
    assert [(row.line, row.value, row.problem) for row in rows] == [
        (1, "a", None),
        (2, None, "undecodable line"),
        (3, "b", None),
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(["", " ", "a", "bb cc", "d" * 12, "\u2028x", "\ty "]), max_size=40),
    st.integers(1, 30),
)
def test_nothing_is_lost_and_lines_are_right(lines: list[str], limit: int) -> None:
    found = documents("\n".join(lines), limit)
    kept = [line for _, document in found for line in document.split("\n") if line.strip()]
    assert kept == [line for line in lines if line.strip()]
    for line, document in found:
        pieces = document.split("\n")
        assert lines[line - 1 : line - 1 + len(pieces)] == pieces
        assert len(document) <= limit or len(pieces) == 1
