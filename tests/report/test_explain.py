"""The documentation pages and `lehr explain`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from lehr.errors import RecipeError
from lehr.report.explain import HEADINGS, SYNONYMS, explain, record_measurement, topics
from lehr.report.folding import fold

WANTED = set(
    """
    masks packing templates lora sft preference continued-pretraining schedules adamw clipping
    accumulation precision checkpoints resume evaluation forgetting refusal sycophancy export
    microworld recomputation stage-cache ledger recipe audit attention head tiny
    """.split()  # noqa: SIM905
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEHR_HOME", str(tmp_path))
    return tmp_path


def test_every_capability_has_a_page() -> None:
    assert {name for name, _ in topics()} >= WANTED
    assert set(SYNONYMS.values()) <= {name for name, _ in topics()}


@pytest.mark.parametrize("name", [name for name, _ in topics()])
def test_five_headings_in_order_and_short(name: str) -> None:
    lines = explain(name).split("\n")
    assert [line[3:] for line in lines if line.startswith("## ")] == list(HEADINGS)
    assert lines[0].startswith(f"# {name}: ") and len(lines) <= 60
    assert all(len(line) <= 124 for line in lines)


def test_topics_have_one_line_each() -> None:
    for name, line in topics():
        assert line and "\n" not in line and name


def test_close_and_other_names() -> None:
    assert explain("DPO") == explain("preference")
    assert explain("Stage Cache") == explain("stage_cache")
    with pytest.raises(RecipeError, match="perhaps packing"):
        explain("packng")
    with pytest.raises(RecipeError, match="one of accumulation"):
        explain("qqqqq")
    for odd in ("", "../explain", "/etc/passwd", "masks/../masks"):
        with pytest.raises(RecipeError):
            explain(odd)


def test_last_measurement_stands_under_its_heading(home: Path) -> None:
    before = explain("packing")
    record_measurement("packing", "fill 0.11")
    record_measurement("packing", "fill 0.97,\n 2.1 x faster")
    after = explain("packing")
    place = after.index("On this machine, ")
    assert after.index(f"## {HEADINGS[3]}") < place < after.index(f"## {HEADINGS[4]}")
    assert "fill 0.97, 2.1 x faster" in after and "0.11" not in after
    assert explain("masks") == explain("mask")
    for damaged in ("", "{", "[]", '{"packing": 3}', '{"packing": {}}'):
        (home / "measured.json").write_text(damaged)
        assert explain("packing") == before
    with pytest.raises(RecipeError):
        record_measurement("nothing", "x")


def test_docs_index_names_every_page() -> None:
    index = Path(__file__).parents[2] / "docs" / "README.md"
    words = index.read_text(encoding="utf-8")
    for name, line in topics():
        assert f"[{name}](../src/lehr/report/pages/{name}.md) | {line} |" in words


def test_files_are_package_data() -> None:
    report = resources.files("lehr.report")
    for folder, ending in (("pages", ".md"), ("templates", ".jinja"), ("templates", ".css")):
        names = [entry.name for entry in (report / folder).iterdir()]
        # A folder is found by the build only where it is a package.
        assert "__init__.py" in names and any(name.endswith(ending) for name in names)


@pytest.mark.parametrize("name", [name for name, _ in topics()])
def test_every_page_has_a_number_and_a_command(name: str) -> None:
    page = explain(name)
    number, command = page.split(f"## {HEADINGS[3]}\n")[1].split(f"## {HEADINGS[4]}\n")
    assert any(letter.isdigit() for letter in number), "a page without a number that was measured"
    assert command.startswith("\n    "), "a command is code: folding must not break it"


@pytest.mark.parametrize("name", [name for name, _ in topics()])
def test_every_page_fits_eighty_columns_with_the_same_words(name: str) -> None:
    record_measurement(name, "one number " * 20)
    page = explain(name)
    folded = fold(page, 80)
    assert max(len(line) for line in folded.split("\n")) <= 80
    assert folded.split() == page.split()
    assert fold(folded, 80) == folded
    assert len(f"  {name:<22} {dict(topics())[name]}") <= 80


def test_folding_by_hand() -> None:
    kept = "\n- ff\n\n    code that stays\n| table | of |"
    page = "# a long heading stays\n\n1. aa bb cc dd\n   ee"
    folded = "# a long heading stays\n\n1. aa bb\n   cc dd\n   ee"
    assert fold(page + kept, 10) == folded + kept
