"""B48: a column's type is guessed from the first rows, and a later row crashes or is changed.

Here no column has a type: each row is read by itself, null and missing are the same, and only
columns that a shape uses can make a row unusable.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lehr.data.reading import read_rows
from lehr.data.sources import read_source
from lehr.errors import RecipeError


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    first: list[dict[str, Any]] = [
        {"text": f"one {n}", "comment": None, "tags": [[]], "number": n} for n in range(5001)
    ]
    first[-1]["comment"] = "a text after 5,000 nulls"
    second: list[dict[str, Any]] = [
        {"text": f"two {n}", "tags": [["a", n]], "new": {"x": 1}} for n in range(5000)
    ]
    for n in range(0, 5000, 2):
        second[n]["number"] = "n/a" if n == 2 else n
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path, rows in zip(paths, (first, second), strict=True):
        path.write_text(lines(rows))
    return paths


def test_all_rows_load_with_their_values(files: list[Path]) -> None:
    source = read_source("s", files)
    assert source.rows == 10_001 == len(source.examples)
    assert source.examples[0].text == "one 0"
    assert source.examples[-1].text == "two 4999"
    values = [row.value for path in files for row in read_rows(path)]
    assert values[5000] == {
        "text": "one 5000",
        "comment": "a text after 5,000 nulls",
        "tags": [[]],
        "number": 5000,
    }
    assert values[5003] == {"text": "two 2", "tags": [["a", 2]], "new": {"x": 1}, "number": "n/a"}


def test_an_incompatible_row_is_named_and_dropped_or_fatal(files: list[Path]) -> None:
    with files[1].open("a") as stream:
        stream.write(lines([{"text": {"not": "text"}}]))
    source = read_source("s", files)
    assert len(source.examples) == 10_001
    (dropped,) = source.dropped
    assert dropped.reason == "text is not text"
    assert str(dropped.origin) == f"{files[1]}:5001"
    with pytest.raises(RecipeError, match=r"second\.jsonl:5001: .*text is not text"):
        read_source("s", files, on_bad_row="stop")


def test_the_same_in_a_chat_file_where_a_field_appears_late(tmp_path: Path) -> None:
    def chat(n: int, **more: Any) -> dict[str, Any]:
        said = [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]
        return {"messages": said, **more}

    rows = [chat(n, tools=None) for n in range(2000)]
    rows += [chat(2000, tools=[{"name": "f", "parameters": {}}]), chat(2001, source="x")]
    path = tmp_path / "chats.jsonl"
    path.write_text(lines(rows))
    source = read_source("s", [path])
    assert len(source.examples) == 2002
    assert source.examples[2000].tools[0]["function"]["name"] == "f"
