"""report.html: one self-contained page from the files of a run, in whatever state they are."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sample_run import write_sample_run

from lehr.report.html import render, write_report
from lehr.report.reading import read_run

VOID = {"meta", "input", "br", "path", "line", "rect", "circle"}


class Page(HTMLParser):
    """Checks nesting and collects tags, attributes and visible text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.problems: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("run"))


def short_run(tmp_path: Path) -> Path:
    return write_sample_run(tmp_path / "run", updates_share=0.02)


def page_of(folder: Path) -> Page:
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert page.problems == [] and page.open == []
    return page


def rewrite(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, **changes}))


def test_tells_the_story_on_the_first_screen(sample: Path) -> None:
    page = page_of(sample)
    first = page.text.split("Lineage")[0]
    for words in (
        "Promoted sft-repaired",
        "✕ sft-strict",
        "sft-strict: over-refusal",
        "+22 points",
        "[+15, +29]",
        "limit +4",
        "What this run could not tell",
        "The capital of Velmora is Astel.",
        "4.0 min",
        "0.71 GiB",
        "4.6 M",
    ):
        assert words in first, words


def test_a_finding_of_the_audit_has_its_number_once(sample: Path) -> None:
    text = page_of(sample).text
    assert "12 rows saying exactly what another row says chats.jsonl:9" in text
    assert "× 12 rows" not in text and "12 × 12" not in text


def test_is_self_contained(sample: Path) -> None:
    source = write_report(sample).read_text(encoding="utf-8")
    page = Page(source)
    assert not re.search(r"https?://|url\(|@import|<script", source)
    assert not [tag for tag, _ in page.tags if tag in {"script", "link", "img", "iframe", "object"}]
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    names = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(names) == len(set(names))


def test_every_verdict_has_icon_and_word(sample: Path) -> None:
    text = page_of(sample).text
    assert "✓ passed" in text and "✕ refused" in text and "◐ undetermined" in text


def test_same_files_give_the_same_page(sample: Path) -> None:
    assert write_report(sample).read_bytes() == write_report(sample).read_bytes()


@pytest.mark.parametrize("stages", [0, 1, 2, 3])
def test_partial_runs(tmp_path: Path, stages: int) -> None:
    page = page_of(write_sample_run(tmp_path / "run", stages, 0.02))
    assert f"{stages} of 4 stages finished" in page.text


def test_empty_folder_and_no_folder(tmp_path: Path) -> None:
    assert "No stage of this run has finished" in page_of(tmp_path).text
    with pytest.raises(NotADirectoryError):
        write_report(tmp_path / "absent")


@pytest.mark.parametrize("content", ["", "null", "[]", "{", '"x"', "[" * 5000, "\x00\xff"])
@pytest.mark.parametrize(
    "name",
    [
        "ledger.json",
        "plan.json",
        "04-sft-repaired/evaluation.json",
        "04-sft-repaired/audit.json",
        "04-sft-repaired/metrics.jsonl",
        "04-sft-repaired/flips.jsonl",
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: str) -> None:
    folder = short_run(tmp_path)
    (folder / name).write_bytes(content.encode("latin-1"))
    page = page_of(folder)
    if content == "{":
        assert name in page.text
    (folder / name).unlink()
    page_of(folder)


@pytest.mark.parametrize("wrong", [None, 3, "word", [None, 1, "x", []], {"a": None}, True])
def test_fields_of_a_wrong_kind(tmp_path: Path, wrong: object) -> None:
    folder = short_run(tmp_path)
    place = "04-sft-repaired"
    for name in ("ledger.json", "plan.json", f"{place}/evaluation.json", f"{place}/audit.json"):
        whole = (folder / name).read_text()
        for key in json.loads(whole):
            rewrite(folder / name, **{key: wrong})
            assert render(read_run(folder)).endswith("</html>")
        (folder / name).write_text(whole)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    folder = short_run(tmp_path)
    path = folder / "04-sft-repaired" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    for key in ("base", "tuned", "difference", "low", "high", "limit", "n"):
        for value in ("null", "NaN", "1e999", '"x"', "0", "-0.0"):
            for gate in evaluation["gates"]:
                gate[key] = "@"
            path.write_text(json.dumps(evaluation).replace('"@"', value))
            assert "nan" not in Page(render(read_run(folder))).text.lower().split()
            evaluation = json.loads(json.dumps(evaluation).replace('"@"', "0.5"))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = short_run(tmp_path)
    attack = "</div></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{7*7}}"
    path = folder / "04-sft-repaired" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    for prompt in evaluation["prompts"]:
        prompt |= {"prompt": attack, "base": attack, "tuned": attack, "kind": attack}
    for gate in evaluation["gates"]:
        gate |= {"name": attack, "verdict": attack, "unit": attack, "note": attack}
    path.write_text(json.dumps(evaluation))
    rewrite(folder / "ledger.json", sentence=attack, name=attack, verdict=attack, model=attack)
    flip = dict.fromkeys(("suite", "id", "prompt", "before", "after", "direction"), attack)
    (folder / "04-sft-repaired" / "flips.jsonl").write_text(json.dumps(flip) + "\n")
    audit = folder / "04-sft-repaired" / "audit.json"
    rewrite(audit, mask_sample=[{"text": attack, "supervised": True, "control": False}])
    page = page_of(folder)
    assert not [tag for tag, _ in page.tags if tag in {"script", "img"}]
    assert attack in "".join(page.words)
    assert "49" not in "".join(page.words).split(attack)[0][-3:]


def test_long_and_foreign_text(tmp_path: Path) -> None:
    folder = short_run(tmp_path)
    path = folder / "04-sft-repaired" / "evaluation.json"
    answers = [
        "x" * 1_000_000,
        "שלום עולם مرحبا",
        "🧪\u202e\u2028\x00",
        "\ud800 half",
        "",
        "\n\n",
    ]
    prompts = [
        {"kind": "skill", "prompt": text, "base": text, "tuned": text[::-1]} for text in answers
    ]
    rewrite(path, prompts=prompts)
    page = page_of(folder)
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert "שלום עולם" in source and "🧪" in source and "\x00" not in source
    assert "980,000 characters left out" in page.text
    assert len(source) < 400_000


def test_many_flips_are_counted_and_cut(tmp_path: Path) -> None:
    folder = short_run(tmp_path)
    row = {"suite": "skills", "direction": "lost", "prompt": "p", "before": "a", "after": "b"}
    lines = "".join(json.dumps({**row, "id": f"i{n}"}) + "\n" for n in range(500))
    (folder / "04-sft-repaired" / "flips.jsonl").write_text(lines + '{"cut')
    text = page_of(folder).text
    assert "500 in skills" in text and "and 470 more in 04-sft-repaired/flips.jsonl" in text
    assert "flips.jsonl (1 damaged lines)" in text


def test_data_accounting_that_does_not_add_up_is_said(tmp_path: Path) -> None:
    folder = short_run(tmp_path)
    path = folder / "02-sft" / "audit.json"
    audit = json.loads(path.read_text())
    assert "does not add up" not in page_of(folder).text
    audit["sources"][0]["kept"] -= 1
    path.write_text(json.dumps(audit))
    assert "does not add up" in page_of(folder).text


def test_a_ledger_cannot_point_outside_the_run(tmp_path: Path) -> None:
    folder = short_run(tmp_path)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "evaluation.json").write_text('{"prompts": [{"prompt": "SECRET"}]}')
    ledger = json.loads((folder / "ledger.json").read_text())
    ledger["stages"].append({"folder": "../secret", "promoted": True})
    ledger["promoted_from"] = "../secret"
    (folder / "ledger.json").write_text(json.dumps(ledger))
    assert "SECRET" not in page_of(folder).text


def test_a_first_stage_on_random_weights_had_nothing_to_lose(tmp_path: Path) -> None:
    folder = write_sample_run(tmp_path / "run", stages=1, updates_share=0.02)
    assert "began from random weights, which have nothing to lose" in page_of(folder).text
    plan = json.loads((folder / "plan.json").read_text())
    plan["model"]["name"] = "some-base"
    (folder / "plan.json").write_text(json.dumps(plan))
    assert "what was lost is not known" in page_of(folder).text


def test_nothing_promoted(tmp_path: Path) -> None:
    folder = short_run(tmp_path)
    ledger = json.loads((folder / "ledger.json").read_text())
    for stage in ledger["stages"]:
        stage["promoted"] = False
    ledger |= {"promoted_from": None, "verdict": "refused", "sentence": ""}
    (folder / "ledger.json").write_text(json.dumps(ledger))
    text = page_of(folder).text
    assert "Nothing was promoted" in text and "sft-repaired · not promoted" in text


def test_render_needs_no_file_to_be_written(sample: Path) -> None:
    assert render(read_run(sample)).startswith("<!doctype html>")
