"""The model card and the lineage that travel with a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_run import write_sample_run

from lehr.report.card import lineage, model_card


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_sample_run(tmp_path / "run", updates_share=0.02)


def change_ledger(run: Path, **changes: object) -> None:
    path = run / "ledger.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_says_what_was_done_measured_and_not_measured(run: Path) -> None:
    card = model_card(run)
    for words in (
        "sft-repaired",
        "| sft-strict | sft | parent kept |",
        "+22 points",
        "| sycophancy | base |",
        "Never measured here",
        "AutoModelForCausalLM",
        "9f3c" * 16,
        "licences apply",
        "library_name: transformers",
    ):
        assert words in card, words


def test_adapter_is_loaded_with_peft(run: Path) -> None:
    (run / "model").mkdir()
    (run / "model" / "adapter_config.json").write_text("{}")
    change_ledger(run, model='org/name: "x"\n---')
    card = model_card(run)
    assert "AutoPeftModelForCausalLM" in card and "library_name: peft" in card
    assert card.split("\n")[1] == 'base_model: "org/name: \\"x\\"\\n---"'


def test_unmeasured_suites_are_named(run: Path) -> None:
    path = run / "04-sft-repaired" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["gates"] = [g for g in evaluation["gates"] if g["name"] != "sycophancy"]
    del evaluation["suites"]["sycophancy"]
    path.write_text(json.dumps(evaluation))
    assert "Not measured: giving in to false claims." in model_card(run)


def test_promoted_although_undetermined_is_said(run: Path) -> None:
    path = run / "04-sft-repaired" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["gates"][3] |= {"verdict": "undetermined", "n_to_decide": 900}
    path.write_text(json.dumps(evaluation))
    card = model_card(run)
    assert "Promoted although undetermined: over-refusal." in card
    assert "about 900 would decide" in card


def test_hostile_text_cannot_leave_its_cell(run: Path) -> None:
    ledger = json.loads((run / "ledger.json").read_text())
    ledger["stages"][2]["why"] = "a | b\n# heading <script>`x`[link](y)"
    change_ledger(run, stages=ledger["stages"])
    row = next(line for line in model_card(run).split("\n") if line.startswith("| sft-strict"))
    assert "a \\| b # heading &lt;script>'x'\\[link](y) |" in row


def test_survives_unfinished_runs(tmp_path: Path) -> None:
    assert "Nothing was promoted" in model_card(tmp_path)
    assert lineage(tmp_path)["stages"] == []
    for stages in (0, 1, 3):
        model_card(write_sample_run(tmp_path / str(stages), stages, 0.02))
    with pytest.raises(NotADirectoryError):
        lineage(tmp_path / "absent")


def test_lineage_is_strict_json_from_data_to_export(run: Path) -> None:
    found = json.loads(json.dumps(lineage(run), allow_nan=False))
    assert found["base"] == "tiny:1m" and found["promoted_from"] == "04-sft-repaired"
    assert [stage["promoted"] for stage in found["stages"]] == [True, True, False, True]
    assert all(stage["key"] and stage["data"][0]["sha256"] for stage in found["stages"])
    assert found["stages"][3]["parent"] == found["stages"][1]["produced"]
    assert found["exports"][0]["parity"]["greedy_equal"] is True


def test_numbers_that_json_has_not_become_null(run: Path) -> None:
    path = run / "04-sft-repaired" / "evaluation.json"
    path.write_text(path.read_text().replace('"n": 400', '"n": NaN'))
    assert json.dumps(lineage(run), allow_nan=False).count('"n": null') >= 3
