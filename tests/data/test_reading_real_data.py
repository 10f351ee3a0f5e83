"""Public files of the shapes that users have, read whole; skipped where they are absent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lehr.data.formats import convert
from lehr.data.reading import read_rows
from lehr.data.sources import read_source
from lehr.data.splitting import default_holdout, split
from lehr.errors import RecipeError

DATA = Path(__file__).parents[2].parent / "shared" / "data"

pytestmark = [
    pytest.mark.real_data,
    pytest.mark.skipif(not DATA.is_dir(), reason="the folder of public data files is absent"),
]

EXPECTED = {
    "coconot/coconot_pref.jsonl": ("pair", 924, 0),
    "dolly/dolly_hhrlhf_train_small.jsonl": ("chat", 1000, 0),
    "gsm8k/test.jsonl": ("chat", 1319, 0),
    "hh_rlhf/harmless-base-test.jsonl.gz": ("pair", 2290, 4),
    "llamafactory/c4_demo.jsonl": ("text", 300, 0),
    "llamafactory/dpo_en_demo.json": ("pair", 300, 0),
    "llamafactory/kto_en_demo.json": ("labelled", 300, 0),
    "llamafactory/reason_tool_use_demo_50.jsonl": ("chat", 50, 0),
    "llamafactory/wiki_demo.txt": ("text", 30, 0),
    "rasbt/instruction-data-with-preference.json": ("pair", 1100, 0),
    "rasbt/instruction-data.json": ("chat", 1100, 0),
    "self_instruct/seed_tasks.jsonl": ("chat", 175, 0),
    "self_instruct/user_oriented_instructions.jsonl": ("chat", 252, 0),
    "xstest/xstest_completions_human_labels.csv": ("chat", 2250, 0),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_known_files(name: str) -> None:
    kind, kept, dropped = EXPECTED[name]
    source = read_source("s", [DATA / name])
    assert source.kinds == {kind: kept}
    assert len(source.dropped) == dropped
    train, heldout = split(source.examples, default_holdout(kept), 0)
    source.accounting(len(train), len(heldout)).check()


def test_every_file_is_read_or_refused_with_a_reason() -> None:
    files = [
        path
        for path in sorted(DATA.glob("*/*"))
        if path.is_file() and "LICENSE" not in path.name and path.stat().st_size < 700_000
    ]
    assert files
    for path in files:
        conversion = convert(read_rows(path), "s", path.name)
        reasons = Counter(entry.reason for entry in conversion.dropped)
        assert conversion.examples or reasons, path
        assert not any("JSON" in reason or "CSV" in reason for reason in reasons), path


def test_texts_lose_nothing_but_blank_lines() -> None:
    for name in ("text_shakespeare/input.txt", "text_wiki/wikitext2_test.txt"):
        kept = [
            line
            for row in read_rows(DATA / name)
            for line in str(row.value).split("\n")
            if line.strip()
        ]
        whole = (DATA / name).read_text(encoding="utf-8").split("\n")
        assert kept == [line for line in whole if line.strip()]


def test_prompts_without_answers_are_refused_as_such() -> None:
    with pytest.raises(RecipeError, match="a prompt without an answer"):
        read_source("s", [DATA / "ifeval" / "input_data.jsonl"])
    with pytest.raises(RecipeError, match="empty answer"):
        read_source("s", [DATA / "coconot" / "coconot_contrast_eval.jsonl"])
