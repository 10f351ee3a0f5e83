"""`lehr evaluate --data`: what is in a file is measured by its kind, or said to be left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.small import write_rows
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lehr.errors import RecipeError
from lehr.pipeline.comparing import evaluate

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Which {n}?"},
            {"role": "assistant", "content": f"It is {n}."},
        ]
    }
    for n in range(3)
]
TEXTS = [{"text": f"The door number {n} is red."} for n in range(4)]
PAIRS = [{"prompt": f"Say {n}", "chosen": "yes", "rejected": "not so"} for n in range(5)]
LABELLED = {"prompt": "a", "completion": "b", "label": True}


def measured(base: Path, path: Path, **settings: Any) -> Any:
    """What the suites of the file alone say."""
    found = evaluate(str(base), data=[path], items=20, **settings)
    return {k: v for k, v in found.suites.items() if k.startswith(path.stem)}, found.notes


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, saved_base: Path) -> Path:
    """A model with 32 learned positions."""
    folder = tmp_path_factory.mktemp("short") / "short"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved_base)
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("order", ["ctp", "pct", "tpc"])
def test_each_kind_has_a_measure_of_its_own(tmp_path, saved_base, order):
    kinds = {"c": CHATS, "t": TEXTS, "p": PAIRS}
    path = write_rows(tmp_path / "mixed.jsonl", [row for one in order for row in kinds[one]])
    found, notes = measured(saved_base, path, suites=["mixed-text", "mixed-chat", "mixed-pair"])
    assert found["mixed-chat"]["loss"]["n"] == 3
    assert found["mixed-text"]["bits_per_byte"]["n"] == 4
    assert found["mixed-pair"]["accuracy"]["n"] == 5
    assert any("rows of several kinds" in note for note in notes)
    alone = write_rows(tmp_path / "chats.jsonl", CHATS)
    assert measured(saved_base, alone, suites=["chats"])[0]["chats"] == found["mixed-chat"]


def test_labelled_rows_are_refused_by_name(tmp_path, saved_base):
    path = write_rows(tmp_path / "d.jsonl", [LABELLED])
    with pytest.raises(RecipeError, match="labelled rows have no measure"):
        evaluate(str(saved_base), data=[path])
    write_rows(path, [*TEXTS, LABELLED, *CHATS])
    with pytest.raises(RecipeError, match=r"1 row, first .*d.jsonl:5: .*labelled"):
        evaluate(str(saved_base), data=[path])


def test_names_of_kinds_do_not_hide_other_files(tmp_path, saved_base):
    mixed = write_rows(tmp_path / "a.jsonl", [*CHATS, *TEXTS])
    other = write_rows(tmp_path / "a-text.jsonl", TEXTS[:2])
    found = evaluate(str(saved_base), ["a-text", "data-a-text"], data=[mixed, other], items=20)
    assert {k: v["loss"]["n"] for k, v in found.suites.items()} == {"a-text": 4, "data-a-text": 2}


def test_rows_without_a_measure_are_said_or_refused(tmp_path, saved_base):
    long = {
        "messages": [{"role": "user", "content": "Which door? " * 900}, CHATS[0]["messages"][1]]
    }
    path = write_rows(tmp_path / "d.jsonl", [long])
    with pytest.raises(RecipeError, match=r"1 of 1 cannot .*no supervised token within"):
        evaluate(str(saved_base), ["d"], data=[path])
    write_rows(path, [*CHATS, long, {"messages": None}])
    found, notes = measured(saved_base, path, suites=["d"])
    assert found["d"]["loss"]["n"] == 3
    text = "\n".join(notes)
    assert "1 row not measured: no supervised token within max_length (first " in text
    assert f"{path}:5" in text, "a row that could not be read is said too"


def test_a_row_that_is_cut_is_said(tmp_path, saved_base):
    answer = {"role": "assistant", "content": "It is red. " * 900}
    path = write_rows(tmp_path / "d.jsonl", [{"messages": [CHATS[0]["messages"][0], answer]}])
    _, notes = measured(saved_base, path, suites=["d"])
    assert any("1 row measured in part" in note for note in notes)


def test_equal_pairs_only(tmp_path, saved_base):
    path = write_rows(tmp_path / "d.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "a"}])
    with pytest.raises(RecipeError, match="pairs of two answers that differ"):
        evaluate(str(saved_base), ["d"], data=[path])


def test_a_short_context_names_suite_and_model(tmp_path, short):
    path = write_rows(tmp_path / "d.jsonl", [*TEXTS, {"text": "The door is red. " * 30}])
    found = evaluate(str(short), data=[path], items=4)
    assert {"d", "forgetting"} >= set(found.suites) >= {"d"}
    text = "\n".join(found.notes)
    for name in ("over_refusal", "sycophancy"):
        assert f"{name} was not measured: it needs" in text and "short is 32" in text
    with pytest.raises(RecipeError) as refused:
        evaluate(str(short), ["over_refusal", "sycophancy"])
    said = str(refused.value)
    assert (
        "--suites over_refusal" in said and "--suites sycophancy" in said and "short has 32" in said
    )


def test_a_suite_that_fits_is_measured(saved_base):
    found = evaluate(str(saved_base), ["over_refusal"], items=2)
    assert found.suites["over_refusal"]["rate"]["n"] == 2 and not found.notes
