"""TrackedText: each string method keeps or taints the origin of every character."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.data.provenance import (
    CONTENT,
    MIXED,
    REASONING,
    TAINTED,
    TEMPLATE,
    TrackedText,
    code,
    codes_of,
    format_percent,
    join_text,
    slot_of,
    taint,
    text_of,
)

A, B = code(1, CONTENT), code(2, CONTENT)

# Every method that gives text, with arguments that make it do something.
CALLS = [
    ("capitalize", ()),
    ("casefold", ()),
    ("center", (30,)),
    ("expandtabs", ()),
    ("ljust", (30, "-")),
    ("lower", ()),
    ("lstrip", ()),
    ("lstrip", ("a ",)),
    ("partition", ("b",)),
    ("partition", (" ",)),
    ("removeprefix", ("a",)),
    ("removesuffix", ("b",)),
    ("replace", ("a", "xx")),
    ("replace", ("a", "", 1)),
    ("replace", ("", "-")),
    ("rjust", (30,)),
    ("rpartition", ("b",)),
    ("rsplit", ()),
    ("rsplit", (None, 1)),
    ("rsplit", ("a", 2)),
    ("rstrip", ()),
    ("split", ()),
    ("split", (None, 1)),
    ("split", ("a",)),
    ("split", ("a", 1)),
    ("splitlines", ()),
    ("splitlines", (True,)),
    ("strip", ()),
    ("strip", ("ab",)),
    ("swapcase", ()),
    ("title", ()),
    ("translate", ({97: "zz"},)),
    ("upper", ()),
    ("zfill", (30,)),
    ("__getitem__", (slice(1, -1),)),
    ("__getitem__", (slice(None, None, -1),)),
    ("__mul__", (3,)),
    ("__add__", ("tail",)),
    ("join", (["p", "q"],)),
]
TEXTS = st.text(alphabet=" ab\t\n\r\u2028éßİ\U0001f9ca", max_size=12)


def as_list(value: object) -> list[str]:
    return list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]


@pytest.mark.parametrize(("method", "arguments"), CALLS)
@settings(max_examples=25, deadline=None)
@given(text=TEXTS)
def test_every_method_gives_the_text_of_str_and_one_code_per_character(
    method: str, arguments: tuple[object, ...], text: str
) -> None:
    tracked = TrackedText(text, A * len(text))
    expected = as_list(getattr(text, method)(*arguments))
    found = as_list(getattr(tracked, method)(*arguments))
    assert found == expected
    inserted = {letter for value in arguments if isinstance(value, str) for letter in value}
    for piece in found:
        codes = codes_of(piece)
        assert len(codes) == len(piece)
        for letter, origin in zip(piece, codes, strict=True):
            # A letter of the text never passes for one of the template, unless an
            # argument brought the same letter in.
            if text and origin == TEMPLATE and method not in ("join", "__add__"):
                assert letter in inserted


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_split_pieces_point_at_the_characters_they_are(text: str) -> None:
    codes = "".join(code(1 + index, CONTENT) for index in range(len(text)))
    tracked = TrackedText(text, codes)
    for pieces in (tracked.split(), tracked.split(None, 1), tracked.split("a"), tracked.rsplit()):
        for piece in pieces:
            for letter, origin in zip(piece, codes_of(piece), strict=True):
                assert text[slot_of(origin) - 1] == letter
    for line in tracked.splitlines():
        assert all(text[slot_of(o) - 1] == c for c, o in zip(line, codes_of(line), strict=True))


def test_no_method_of_str_that_gives_text_was_forgotten() -> None:
    tried = {method for method, _ in CALLS}
    no_text = {"count", "encode", "endswith", "find", "index", "rfind", "rindex", "startswith"}
    no_text |= {"maketrans", "format", "format_map"}  # formatting: in the sandbox
    for name in dir(str):
        if not name.startswith(("_", "is")):
            assert name in tried | no_text, name


def test_operators_and_iteration() -> None:
    a, b = TrackedText("ab", A * 2), TrackedText("c", B)
    assert codes_of("x" + a + b + "y") == TEMPLATE + A * 2 + B + TEMPLATE
    assert codes_of(2 * a) == A * 4
    assert [codes_of(letter) for letter in a] == [A, A]
    assert codes_of(str(a)) == A * 2
    assert codes_of(a[-1]) == A
    assert hash(a) == hash("ab") and a == "ab" and {"ab": 1}[a] == 1
    with pytest.raises(TypeError):
        a + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        1 + a  # type: ignore[operator]


def test_join_and_percent() -> None:
    a, b = TrackedText("ab", A * 2), TrackedText("c", B)
    assert codes_of(join_text(b, [a, "x"])) == A * 2 + B + TEMPLATE
    assert type(join_text("-", ["x", "y"])) is str
    formatted = format_percent("<%s|%%|%s>", (a, b))
    assert formatted == "<ab|%|c>"
    assert codes_of(formatted) == TEMPLATE + A * 2 + TEMPLATE * 3 + B + TEMPLATE
    assert codes_of(format_percent("%(k)s!", {"k": a})) == A * 2 + TEMPLATE
    padded = format_percent("<%5s>", a)
    assert padded == "<   ab>" and set(codes_of(padded)) == {A}
    assert codes_of("<%s>" % a) == TEMPLATE + A * 2 + TEMPLATE  # noqa: UP031


def test_taint_names_the_narrowest_owner() -> None:
    content, thought = TrackedText("a", A), TrackedText("t", code(1, REASONING))
    other = TrackedText("o", B)
    assert type(taint("x", ["plain"])) is str
    assert codes_of(taint("xy", [content])) == A * 2
    assert codes_of(taint("xy", [content, {"k": thought}])) == code(1, MIXED) * 2
    assert codes_of(taint("xy", [content, (other,)])) == TAINTED * 2
    assert codes_of(text_of({"k": content})) == A * len("{'k': 'a'}")
    assert codes_of(text_of(7)) == TEMPLATE and text_of(None) == "None"


def test_copies_keep_origins() -> None:
    a = TrackedText("ab", A + B)
    assert codes_of(copy.deepcopy(a)) == A + B
    assert codes_of(pickle.loads(pickle.dumps(a))) == A + B
