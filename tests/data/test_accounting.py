"""kept + held out + dropped == rows, through reading, encoding and merging."""

from __future__ import annotations

import json

import pytest

from lehr.data.accounting import Accounting, merge
from lehr.data.formats import Dropped
from lehr.data.shapes import Origin


def dropped(reason: str, *lines: int) -> list[Dropped]:
    return [Dropped(reason, Origin("s", "f", line)) for line in lines]


def accounting() -> Accounting:
    made = Accounting("s", [{"path": "f", "sha256": "0"}], "text", rows=10, kept=6, heldout=2)
    made.drop_read(dropped("content is null", 4, 9))
    return made


def test_rows_add_up_and_the_first_place_is_kept() -> None:
    made = accounting()
    made.drop_kept(dropped("no room for the answer", 3, 5))
    made.drop_kept(dropped("no room for the answer", 1), heldout=True)
    entry = made.as_json()
    assert (entry["rows"], entry["kept"], entry["heldout"]) == (10, 4, 1)
    assert entry["dropped"] == {
        "content is null": {"rows": 2, "first": "f:4"},
        "no room for the answer": {"rows": 3, "first": "f:3"},
    }
    assert json.loads(json.dumps(entry)) == entry


def test_a_row_in_several_parts_is_dropped_once() -> None:
    made = accounting()
    made.drop_kept(dropped("no room for the answer", 3, 3, 3))
    assert made.kept == 5


def test_a_missing_row_is_an_error() -> None:
    made = accounting()
    made.kept -= 1
    with pytest.raises(AssertionError, match="9, but 10 rows"):
        made.as_json()


def test_merging_adds_up() -> None:
    other = Accounting("s", [{"path": "g", "sha256": "1"}], "messages", rows=3, kept=2, tokens=5)
    other.drop_read([Dropped("content is null", Origin("s", "g", 1))])
    merged = merge([accounting(), other])
    assert merged.as_json() == {
        "name": "s",
        "files": [{"path": "f", "sha256": "0"}, {"path": "g", "sha256": "1"}],
        "shape": "text, messages",
        "rows": 13,
        "kept": 8,
        "heldout": 2,
        "dropped": {"content is null": {"rows": 3, "first": "f:4"}},
        "tokens": 5,
        "unshared_tokens": 0,
        "supervised_tokens": 0,
        "dropped_tokens": 0,
        "notes": [],
    }
    assert accounting().dropped_rows == 2  # the parts are left as they were
