"""B07: rows that cannot be used become empty rows and are trained; a run without rows succeeds.

Here a bad row is no Example at all: it is counted with its reason and first place, whatever the
files it is spread over, and a source without a usable row is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lehr.data.accounting import merge
from lehr.data.sources import read_source
from lehr.errors import RecipeError

BAD: list[Any] = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]},
    {"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "a"}]},
    {"messages": [{"role": "user", "content": "q"}]},
    {"messages": None},
    {"messages": [{"role": "critic", "content": "q"}]},
    {},
]


def good(n: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]
    return {"messages": said}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_seven_of_thirty_are_dropped_and_named_however_the_work_is_cut(tmp_path: Path) -> None:
    rows: list[Any] = [good(n) for n in range(30)]
    for number, bad in enumerate(BAD):
        rows[3 + 4 * number] = bad
    source = read_source("s", [write(tmp_path / "all.jsonl", rows)])
    assert len(source.examples) == 23
    assert all(message["content"] for e in source.examples for message in e.messages)
    whole = source.accounting(kept=23, heldout=0)
    assert whole.dropped_rows == 7
    assert whole.dropped["content is null"] == {
        "rows": 1,
        "first": f"{tmp_path / 'all.jsonl'}:4",
    }
    parts = []
    for worker in range(4):
        path = write(tmp_path / f"part{worker}.jsonl", rows[worker * 8 : worker * 8 + 8])
        part = read_source("s", [path])
        parts.append(part.accounting(kept=len(part.examples), heldout=0))
    merged = merge(parts)
    assert (merged.rows, merged.kept, merged.dropped_rows) == (30, 23, 7)
    assert {reason: entry["rows"] for reason, entry in merged.dropped.items()} == {
        reason: entry["rows"] for reason, entry in whole.dropped.items()
    }


def test_all_invalid_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", [BAD[n % 7] for n in range(30)])
    with pytest.raises(RecipeError, match="30 of 30 were dropped") as raised:
        read_source("s", [path])
    assert raised.value.exit_status == 2
