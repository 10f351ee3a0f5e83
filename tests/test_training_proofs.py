"""docs/training_proofs.md names tests that exist, pages that exist, and numbers that they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "src" / "lehr" / "report" / "pages"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def table() -> dict[str, list[str]]:
    """Technique -> its other cells."""
    lines = (ROOT / "docs" / "training_proofs.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows[2:]}


ROWS = table()


@pytest.mark.parametrize("technique", ROWS)
def test_every_test_page_and_number_is_there(technique: str) -> None:
    proof, fault, page, number = ROWS[technique]
    for cell in (proof, fault):
        named = TEST.findall(cell)
        assert named and not TEST.sub("", cell).strip(), "nothing but tests stands in this column"
        for file, name in named:
            code = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {name}(" in code, f"{file} has no {name}"
    text = " ".join((PAGES / f"{page}.md").read_text(encoding="utf-8").split())
    measured = text[text.index("## The number measured here") :]
    assert number.lower() in measured.lower(), f"the page {page} does not say: {number}"


def test_a_name_that_does_not_exist_would_be_found() -> None:
    """The search itself: whole names only, so that a shortened one is no test."""
    assert TEST.findall("`tests/a/b.py::test_one` `tests/c.py::test_two`") == [
        ("tests/a/b.py", "test_one"),
        ("tests/c.py", "test_two"),
    ]
    here = Path(__file__).read_text(encoding="utf-8")
    assert "def test_every_test_page(" not in here.replace('"def test_every_test_page("', "")


def test_the_table_has_the_techniques_of_the_engine() -> None:
    for technique in (
        "AdamW",
        "Muon",
        "batch norm",
        "FP8 training",
        "clipping",
        "z-loss",
        "resume",
    ):
        assert technique in ROWS
    assert len(ROWS) >= 25
