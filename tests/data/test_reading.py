"""Containers: every row comes out once, with its line, or as a problem that is named."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lehr.data.reading import Row, container_of, read_rows
from lehr.errors import RecipeError


def rows_of(folder: Path, name: str, data: bytes | str) -> list[Row]:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    return list(read_rows(path))


def values(rows: list[Row]) -> list[object]:
    return [row.value for row in rows]


def problems(rows: list[Row]) -> list[tuple[int, str]]:
    return [(row.line, row.problem) for row in rows if row.problem is not None]


# --- JSON Lines -----------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\r"])
def test_only_lf_ends_a_record(tmp_path: Path, separator: str) -> None:
    # Inside a JSON string U+2028 may stand as it is; controls must be escaped.
    inside = separator if ord(separator) > 0x20 else json.dumps(separator)[1:-1]
    rows = rows_of(tmp_path, "a.jsonl", f'{{"text": "a{inside}b"}}\n{{"text": "c"}}\n')
    assert values(rows) == [{"text": f"a{separator}b"}, {"text": "c"}]
    assert [row.line for row in rows] == [1, 2]


def test_crlf_bom_blank_lines_and_no_last_lf(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \t\n\xef\xbb\xbf{"text": "b"}\r\n{"text": "c"}'
    rows = rows_of(tmp_path, "a.jsonl", data)
    assert values(rows) == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert [row.line for row in rows] == [1, 4, 5]


def test_each_bad_line_is_one_problem_and_the_others_are_read(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "caf\xe9 secret"}',
        b'{"text": "secret',
        b'{"text": "a"} secret',
        b'{"text": "a"}{"text": "b"}',
        b'{"text": "secret\\q"}',
        b'{"text": "se\tcret"}',
        b"42",
        b"null",
        b'{"text": secret}',
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"n": ' + b"9" * 5_000 + b"}",
        b'{"text": "good too"}',
    ]
    rows = rows_of(tmp_path, "a.jsonl", b"\n".join(lines))
    assert len(rows) == len(lines)
    assert [row.line for row in rows] == list(range(1, len(lines) + 1))
    assert [row.value for row in rows if row.problem is None] == [
        {"text": "good"},
        {"text": "good too"},
    ]
    assert problems(rows) == [
        (2, "undecodable line"),
        (3, "broken JSON: a string never ends"),
        (4, "broken JSON: text after the value"),
        (5, "broken JSON: text after the value"),
        (6, "broken JSON: a bad escape in a string"),
        (7, "broken JSON: a raw control character in a string"),
        (8, "the row is not an object"),
        (9, "the row is not an object"),
        (10, "broken JSON"),
        (11, "nested too deeply"),
        (12, "nested too deeply"),
        (13, "broken JSON: a number of thousands of digits"),
    ]
    assert not any("secret" in reason for _, reason in problems(rows))


def test_moderate_nesting_is_refused_before_it_can_break_something_later(tmp_path: Path) -> None:
    deep = '{"text": "a", "extra": ' + "[" * 150 + "]" * 150 + "}"
    wide = json.dumps({"text": "a", "extra": [{"b": [1]}] * 500})
    rows = rows_of(tmp_path, "a.jsonl", f"{deep}\n{wide}\n")
    assert problems(rows) == [(1, "nested too deeply")]
    assert rows[1].value is not None


def test_odd_but_readable_values_are_noted(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        "a.jsonl",
        '{"text": "a", "text": "b"}\n{"text": "c", "score": NaN, "x": -Infinity}\n{"text": "d"}\n',
    )
    assert values(rows) == [{"text": "b"}, {"text": "c", "score": None, "x": None}, {"text": "d"}]
    assert [len(row.notes) for row in rows] == [1, 1, 0]
    assert "twice" in rows[0].notes[0]
    assert "NaN" in rows[1].notes[0]


def test_forty_megabyte_line(tmp_path: Path) -> None:
    long = "x" * 40_000_000
    rows = rows_of(tmp_path, "a.jsonl", f'{{"text": "a"}}\n{{"text": "{long}"}}\n{{"text": "b"}}\n')
    assert [len(row.value["text"]) for row in rows] == [1, 40_000_000, 1]  # type: ignore[index,call-overload]


def test_lone_surrogate_escapes_are_read(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "a.jsonl", '{"text": "\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    assert values(rows) == [{"text": "\ud83d"}, {"text": "\U0001f600"}]


# --- JSON documents -------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("wrap", [False, True])
def test_json_list_with_the_line_of_each_element(
    tmp_path: Path, indent: int | None, wrap: bool
) -> None:
    listed = [{"text": f"row {n}", "more": [n]} for n in range(4)]
    whole = {"version": [1], "data": listed, "end": 1} if wrap else listed
    text = json.dumps(whole, indent=indent)
    rows = rows_of(tmp_path, "a.json", text)
    assert values(rows) == listed
    for number, row in enumerate(rows):
        # The element's first line holds its opening brace, the next (or same) line its text.
        around = "".join(text.split("\n")[row.line - 1 : row.line + 1])
        assert f"row {number}" in around


def test_json_single_object_sequence_and_list_of_lists(tmp_path: Path) -> None:
    assert values(rows_of(tmp_path, "one.json", '{\n "text": "a"\n}')) == [{"text": "a"}]
    rows = rows_of(tmp_path, "two.json", '{\n "text": "a"\n}\n{\n "text": "b"\n}\n')
    assert values(rows) == [{"text": "a"}, {"text": "b"}]
    assert [row.line for row in rows] == [1, 4]
    message = {"role": "user", "content": "a"}
    assert values(rows_of(tmp_path, "three.json", json.dumps([[message]]))) == [
        {"messages": [message]}
    ]


def test_names_mislead(tmp_path: Path) -> None:
    lines = '{"text": "a"}\n{"text": "b"}\n'
    for name, data in [
        ("lines.json", lines),
        ("broken_first.json", '{"text": "a" oops}\n' + lines),
        ("pretty.jsonl", json.dumps([{"text": "a"}, {"text": "b"}], indent=1)),
        ("list.jsonl", '[{"text": "a"},\n{"text": "b"}]'),
        ("objects.jsonl", '{\n"text": "a"\n}\n{\n"text": "b"\n}'),
        ("unknown", lines),
        ("unknown.data", json.dumps([{"text": "a"}, {"text": "b"}])),
    ]:
        rows = rows_of(tmp_path, name, data)
        assert [row.value for row in rows if row.value] == [{"text": "a"}, {"text": "b"}], name


def test_broken_json_list_keeps_what_came_before(tmp_path: Path) -> None:
    text = json.dumps([{"text": f"row {n}"} for n in range(5)], indent=1)
    cut = text[: text.index("row 3") + 2]
    rows = rows_of(tmp_path, "a.json", cut)
    assert [row.value for row in rows[:3]] == [{"text": f"row {n}"} for n in range(3)]
    assert len(rows) == 4
    assert rows[3].problem is not None
    assert "nothing from here on could be read" in rows[3].problem
    assert rows[3].line == cut.count("\n") + 1


def test_undecodable_element_spoils_only_itself(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "a.json", b'[\n{"text": "a"},\n{"text": "\xe9"},\n{"text": "b"}\n]')
    assert [row.value for row in rows] == [{"text": "a"}, None, {"text": "b"}]
    assert problems(rows) == [(3, "undecodable line")]


# --- CSV and Parquet ------------------------------------------------------------------------


def test_csv_round_trip_with_quoted_line_ends_and_lines(tmp_path: Path) -> None:
    written = [
        {"prompt": "a, b", "completion": 'say "hi"\nand\r\nbye'},
        {"prompt": "x" * 300_000, "completion": ""},
        {"prompt": "last", "completion": "\u2028 ok"},
    ]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ["prompt", "completion"], lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(written)
    rows = rows_of(tmp_path, "a.csv", b"\xef\xbb\xbf" + buffer.getvalue().encode())
    assert values(rows) == written
    assert [row.line for row in rows] == [2, 5, 6]


def test_csv_oddities(tmp_path: Path) -> None:
    data = (
        b"# made by hand\n\nprompt;completion\na;b\n\nc\nd;e;f\n"
        b'"caf\xe9";g\nh;"i" j\nk;l\nm;"never\nends'
    )
    rows = rows_of(tmp_path, "a.csv", data)
    assert [row.value for row in rows if row.problem is None] == [
        {"prompt": "a", "completion": "b"},
        {"prompt": "c", "completion": None},
        {"prompt": "k", "completion": "l"},
    ]
    assert problems(rows) == [
        (7, "more cells than columns"),
        (8, "undecodable line"),
        (9, "broken CSV quoting"),
        (11, "a quoted cell never ends: nothing from here on could be read"),
    ]
    assert len(rows[0].notes) == 2  # the comment line, the separator


def test_parquet_rows_and_nulls_inside_structs(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "c", "name": "n"}]},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(written), path)
    assert values(list(read_rows(path))) == written
    packed = tmp_path / "a.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert values(list(read_rows(packed))) == written
    assert container_of(path.rename(tmp_path / "no_suffix")) == "parquet"
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(RecipeError, match="whole Parquet file"):
        list(read_rows(tmp_path / "bad.parquet"))


# --- gzip -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.txt.gz", "a.jsonl"])
def test_gzip_is_seen_from_the_bytes(tmp_path: Path, name: str) -> None:
    plain = {
        "json": '[{"text": "a"}]',
        "csv": "text\na\n",
        "txt": "a\n",
    }.get(name.split(".")[1], '{"text": "a"}\n')
    rows = rows_of(tmp_path, name, gzip.compress(plain.encode()))
    assert values(rows) in ([{"text": "a"}], ["a"])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.txt.gz"])
def test_truncated_gzip_reports_the_row_where_it_broke(tmp_path: Path, name: str) -> None:
    import random

    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefghij klm", k=100)) for _ in range(3000)]
    plain = {
        "jsonl": "\n".join(json.dumps({"text": text}) for text in texts),
        "json": json.dumps([{"text": text} for text in texts], indent=1),
        "csv": "text\n" + "\n".join(texts),
        "txt": "\n\n".join(text * 50 for text in texts),
    }[name.split(".")[1]]
    packed = gzip.compress(plain.encode())
    whole = rows_of(tmp_path, name, packed)
    rows = rows_of(tmp_path, name, packed[: len(packed) // 2])
    assert problems(whole) == []
    assert len(problems(rows)) == 1
    assert rows[-1].problem is not None
    assert "cut short" in rows[-1].problem
    good = [row.value for row in rows[:-1]]
    assert len(good) > 500 if name != "a.txt.gz" else len(good) > 100
    # The row that the cut goes through is not passed off as whole, but for text, which has none.
    intact = good[:-1] if name in ("a.txt.gz", "a.csv.gz") else good
    assert intact == [row.value for row in whole[: len(intact)]]


def test_corrupt_gzip_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"text": "a"}\n' * 1000))
    packed[-8] ^= 0xFF  # the checksum
    rows = rows_of(tmp_path, "a.jsonl.gz", bytes(packed))
    assert [row.problem for row in rows if row.problem] == [
        "the file is damaged: nothing from here on could be read"
    ]


# --- files that are refused -----------------------------------------------------------------


def test_refusals_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part.jsonl").write_text("{}")
    (tmp_path / "rows.pkl").write_bytes(b"x")
    (tmp_path / "rows.zip").write_bytes(b"PK")
    (tmp_path / "wide.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    (tmp_path / "blob").write_bytes(b"\x00\x01\x02\x00")
    (tmp_path / "chats.jsonl").write_text("{}")
    for name, words in [
        ("folder", "list the files.*part.jsonl"),
        ("rows.pkl", "never read"),
        ("rows.zip", "unpack"),
        ("wide.jsonl", "UTF-8"),
        ("blob", "binary"),
        ("chat.jsonl", "did you mean chats.jsonl"),
    ]:
        with pytest.raises(RecipeError, match=words) as raised:
            list(read_rows(tmp_path / name))
        assert str(tmp_path / name) in str(raised.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert rows_of(tmp_path, name, b"") == []


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.sampled_from(
            [
                b'{"text": "a"}',
                b"{",
                b"}",
                b"[",
                b"]",
                b",",
                b'"',
                b"\n",
                b"\r",
                b"\0",
                b"\xff",
                b"a",
                b"\xef\xbb\xbf",
                b";",
                b":",
                b'"data"',
                b"null",
                b"\\u",
                b"#",
                b"PAR1",
                b"\x1f\x8b",
            ]
        ),
        max_size=25,
    ),
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.txt", "a", "a.tsv", "a.json.gz"]),
    st.sampled_from([0, 1, 2]),
)
def test_no_bytes_can_crash_a_reader(
    tmp_path: Path, pieces: list[bytes], name: str, packing: int
) -> None:
    data = b"".join(pieces)
    if packing:
        data = gzip.compress(data)
        data = data[: len(data) - 4 * (packing - 1)]
    try:
        rows = rows_of(tmp_path, name, data)
    except RecipeError:
        return
    assert all((row.value is None) == (row.problem is not None) for row in rows)
    lines = [row.line for row in rows]
    assert lines == sorted(lines)
    assert all(line >= 1 for line in lines)
