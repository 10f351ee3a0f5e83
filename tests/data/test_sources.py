"""A source: files joined, counted and hashed; refused only where nothing is left."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from lehr.data.sources import read_source
from lehr.errors import RecipeError
from lehr.streams import file_hash


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_files_of_several_containers_make_one_source(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a"}, {"prompt": "q"})
    second = tmp_path / "b.csv"
    second.write_text("prompt,completion\np,c\n")
    source = read_source("s", [first, second])
    assert source.rows == 3 == len(source.examples) + len(source.dropped)
    assert source.files == [
        {"path": str(path), "sha256": file_hash(path)} for path in (first, second)
    ]
    assert source.shape == "prompt+completion"
    assert source.kinds == {"chat": 2}
    accounting = source.accounting(kept=1, heldout=1).as_json()
    assert accounting["dropped"] == {
        "a prompt without an answer": {"rows": 1, "first": f"{first}:2"}
    }


def test_notes_count_and_name_the_first_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "x": NaN}\n{"text": "c", "x": NaN}\n')
    (note,) = read_source("s", [path]).notes
    assert note.endswith(f"(2 rows, first {path}:2)")


def test_kinds_are_reported_or_required(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "completion": "a"},
        {"text": "t"},
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    assert any("1 pair" in note for note in read_source("s", [path]).notes)
    source = read_source("s", [path], kind="pair")
    assert source.kinds == {"pair": 1}
    assert sorted(entry.reason for entry in source.dropped) == [
        "a chat where a pair is needed",
        "a text where a pair is needed",
    ]
    source.accounting(kept=1, heldout=0).check()


def test_nothing_left_is_refused_with_every_reason_and_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"story": "x", "score": 1}, {"prompt": "q", "response": ""})
    with pytest.raises(RecipeError) as raised:
        read_source("s", [path])
    text = str(raised.value)
    assert "2 of 2 were dropped" in text
    assert "no known shape (1 row)" in text
    assert f"{path}:2: empty answer" in text
    assert "story, score" in text


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n")
    with pytest.raises(RecipeError, match="at least one row"):
        read_source("s", [path])


def test_all_missing_files_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        read_source("s", [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path])
    assert len(raised.value.problems) == 3


def test_on_bad_row_stop_names_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"text": None}] * 30, {"text": "a"})
    with pytest.raises(RecipeError) as raised:
        read_source("s", [path], on_bad_row="stop")
    assert len(raised.value.problems) == 21
    assert f"{path}:1: expected a usable row: text is null" in str(raised.value)
    assert "10 more" in str(raised.value)


def test_a_hub_id_without_the_extra_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RecipeError, match=r"pip install 'lehr\[hub\]'"):
        read_source("s", ["owner/chats"])


def test_a_hub_id_goes_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        if name == "owner/gone":
            raise FileNotFoundError(name)
        return [{"text": "a"}, {"text": "b"}]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    source = read_source("s", ["owner/texts:validation"])
    assert asked == [("owner/texts", "validation")]
    assert [example.text for example in source.examples] == ["a", "b"]
    assert len(source.files[0]["sha256"]) == 64
    with pytest.raises(RecipeError, match="FileNotFoundError"):
        read_source("s", ["owner/gone"])
