"""An FP8 export through a run and the command line: its numbers, its refusal with exit 3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import go, lora_recipe, read, save_base, stage, write_data, write_recipe

from lehr.cli.main import main
from lehr.errors import RecipeError
from lehr.pipeline import float8_export
from lehr.pipeline.measuring import _exports
from lehr.pipeline.verifying import verify
from lehr.recipe.loading import load_recipe
from lehr.report.provenance import export_words


def recipe(**changes: Any) -> dict[str, Any]:
    stages = [{"sft": stage("chats", learning_rate=1e-3)}]
    return lora_recipe(stages=stages, gates="none", export=["adapter", "fp8"], **changes)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe file of a finished run whose model has blocks that can be E4M3."""
    folder = tmp_path_factory.mktemp("float8")
    write_data(folder)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    save_base(folder / "base", **shape, num_key_value_heads=2)
    path = write_recipe(folder, recipe())
    ledger, _, _ = go(path)
    assert ledger.verdict == "promoted", ledger.sentence
    return path


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained_once.parent, tmp_path / "copy")
    return tmp_path / "copy" / trained_once.name


def lehr(*words: Any) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that are four times too large: a model, but a worse one."""
    right = float8_export.quantize_rows

    def wrong(weight: Any) -> Any:
        codes, scale = right(weight)
        return codes, scale * 4

    monkeypatch.setattr(float8_export, "quantize_rows", wrong)


def test_the_ledger_holds_what_it_costs(trained: Path) -> None:
    exports = read(trained.parent / "out" / "ledger.json")["exports"]
    assert [one["kind"] for one in exports] == ["adapter", "fp8"]
    parity = exports[1]["parity"]
    assert parity["problem"] == "" and parity["layers"] == 14 and parity["sequences"] == 10
    assert 0 < parity["kl"] <= parity["kl_interval"][1] < 0.02
    assert parity["loss_interval"][0] <= parity["loss"] <= parity["loss_interval"][1] < 0.02
    words = export_words(exports[1])
    assert words.startswith("E4M3 weights in 14 layers: loss ") and "nats a token [" in words
    assert set(_exports(exports, "run r")) == {"export", "float8"}, "each has its page"


def test_verify_measures_it_again_and_finds_a_changed_file(trained: Path) -> None:
    out = trained.parent / "out"
    found = verify(load_recipe(trained), out)
    assert found["ok"], found
    config = out / "exports" / "fp8" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert not verify(load_recipe(trained), out)["ok"]


def test_known_fault_a_worse_model_is_refused_with_exit_3_and_its_numbers(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trained.parent / "out"
    assert lehr("export", out, "--to", "fp8", "--json") == 0
    capsys.readouterr()
    shutil.rmtree(out / "exports" / "fp8")
    spoil(monkeypatch)
    assert lehr("export", out, "--to", "fp8", "--json") == 3
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    (problem,) = said["error"]["problems"]
    assert "fp8: " in problem["expected"] and "above limit 0.02" in problem["expected"], problem
    assert lehr("export", out, "--to", "fp8") == 3
    error = " ".join(capsys.readouterr().err.split())
    assert "expected an export that is what was trained (fp8: " in error
    assert "nats/token [" in error
    ledger, _, _ = go(trained)
    assert ledger.verdict == "refused" and "fp8: " in ledger.sentence


def test_without_an_adapter_fp8_is_what_is_written(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once became a merged export, without a word."""
    whole = recipe(adapter={"kind": "none"}, output="whole") | {"export": ["fp8"]}
    ledger, out, _ = go(write_recipe(trained.parent, whole, "whole.yaml"))
    assert [one["kind"] for one in ledger.data["exports"]] == ["fp8"]
    assert [path.name for path in (out / "exports").iterdir()] == ["fp8"]


def test_a_model_without_a_layer_for_it_is_refused_before_it_is_trained(work: Path) -> None:
    with pytest.raises(RecipeError, match="export fp8: expected a model of three blocks"):
        go(write_recipe(work, recipe()))
    assert not (work / "out" / "01-sft").exists()
