"""YAML 1.2 with lines; text that is no YAML is refused with line and column."""

from __future__ import annotations

import codecs

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import load_recipe
from lehr.recipe.positions import parse, parse_value

SCALARS = {
    "1e-5": 1e-5,
    "1e5": 1e5,
    "1E+5": 1e5,
    "1.0e5": 1e5,
    ".5": 0.5,
    "5.": 5.0,
    "1_000": 1000,
    "010": 10,
    "0x1F": 31,
    "0o17": 15,
    "-3": -3,
    "+3": 3,
    "no": "no",
    "yes": "yes",
    "off": "off",
    "true": True,
    "False": False,
    "~": None,
    "null": None,
    "None": "None",
    "2024-01-01": "2024-01-01",
    "1:30": "1:30",
    '"1"': "1",
    "'true'": "true",
    "=": "=",
    "9" * 5000: "9" * 5000,
}


@pytest.mark.parametrize("text", SCALARS)
def test_scalars(text):
    value = parse(f"k: {text}", "r.yaml").tree["k"]
    assert value == SCALARS[text] and type(value) is type(SCALARS[text])
    assert parse_value(text, "--set") == SCALARS[text]


def test_every_key_has_its_line():
    document = parse("a:\n  b: 1\n  c:\n    - x\n    - y: 2\n", "r.yaml")
    assert {keys: place.line for keys, place in document.places.items()} == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "y"): 5,
    }


def test_duplicates_name_both_lines():
    document = parse("a: 1\nb: {c: 1,\n  c: 2}\na: 3\n", "r.yaml")
    assert [str(problem) for problem in document.problems] == [
        "r.yaml:3 b.c: expected each key once; c stands in lines 2 and 3",
        "r.yaml:4 a: expected each key once; a stands in lines 1 and 4",
    ]


def test_anchors_and_merge_keys():
    document = parse("a: &x {p: 1, q: 2}\nb:\n  <<: *x\n  q: 3\nc: *x\n", "r.yaml")
    assert document.tree["b"] == {"p": 1, "q": 3} and document.tree["c"] == {"p": 1, "q": 2}
    assert document.problems == []


BAD = {
    "a: [1,\nb: 2": r"^r\.yaml:2:5: expected readable YAML \(while parsing a flow sequence",
    "a: b: c": r"^r\.yaml:1:5: expected readable YAML \(mapping values are not allowed here",
    "a:\n\tb: 1": r"^r\.yaml:2:1: .*indent with spaces",
    "a: 'x": r"^r\.yaml:1:6: ",
    "a: *nope": r"^r\.yaml:1:4: .*undefined alias",
    "a: 1\n---\nb: 2": r"^r\.yaml:2:1: .*another document",
    "a: \x07": r"^r\.yaml:1: expected printable text \(found 'character U\+0007'\)",
    "": r"^r\.yaml: expected a recipe with the keys model, data and stages \(empty\)",
    "# only a comment\n": r"\(empty\)",
    "- a\n- b": r"^r\.yaml:1: expected a mapping with the keys .* not a list",
    "model": r"^r\.yaml:1: expected a mapping .* not 'model'",
    "a: &a [*a]": r"^r\.yaml:1: expected plain data \(this is an alias that contains itself\)",
    "%YAML 1.1\n---\na: no": r"^r\.yaml:1: expected YAML 1\.2 \(found '1\.1'\)",
    "[" * 500: r"^r\.yaml: expected readable YAML \(nested too deeply\)",
}


@pytest.mark.parametrize("text", BAD)
def test_text_that_is_no_recipe(text):
    with pytest.raises(RecipeError, match=BAD[text]):
        parse(text, "r.yaml")


def test_an_alias_bomb_is_refused():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(RecipeError, match="too many values"):
        parse("\n".join(lines), "r.yaml")


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.system [ls]", "!env HOME", "!x {a: 1}"]
)
def test_tags_are_not_read(value):
    document = parse(f"a: {value}", "r.yaml")
    assert document.tree["a"] is None
    assert "tags are not read" in str(document.problems[0])


def test_complex_keys_are_refused():
    assert "a plain word as key" in str(parse("? [1, 2]\n: 3", "r.yaml").problems[0])


def write(folder, raw):
    path = folder / "r.yaml"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode(),
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        lambda text: text.replace("\n", "\r\n").encode(),
    ],
)
def test_encodings(folder, full, encode):
    assert load_recipe(write(folder, encode(full))).seed == 0


def test_an_unknown_encoding_names_the_line(folder):
    path = write(folder, "model: m\nname: caf\xe9\n".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"r\.yaml:2: expected UTF-8 text.*\(found 'byte 0xe9'\)"):
        load_recipe(path)


def test_files_that_cannot_be_read(folder, full):
    (folder / "real.yaml").write_text(full)
    with pytest.raises(RecipeError, match=r"no such file; recipes there: real\.yaml"):
        load_recipe(folder / "rael.yaml")
    with pytest.raises(RecipeError, match="a readable file"):
        load_recipe(folder)


def test_lines_survive_crlf(folder):
    path = write(folder, b"model: m\r\nseed: x\r\nstages: [sft: {data: chats.jsonl}]\r\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:2 seed"):
        load_recipe(path)
