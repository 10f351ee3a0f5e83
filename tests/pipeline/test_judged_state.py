"""What is exported, reused or folded is what was judged: by its key, and by its bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.pipeline.small import (
    go,
    lora_recipe,
    metrics,
    read,
    stage,
    weights,
    weights_recipe,
    write_recipe,
)

from lehr.errors import RecipeError
from lehr.pipeline.reopening import export
from lehr.pipeline.stage_run import StageRun

pytestmark = pytest.mark.usefixtures("lean")


def all_weights() -> dict:
    recipe = weights_recipe(gates={"protect": {}, "undetermined": "promote"})
    recipe["stages"] = [{"sft": stage("chats", learning_rate=5e-3, checkpoint_every=2)}]
    return recipe


def flip(path: Path) -> None:
    """Change one bit near the end, in place; size, header and times stay."""
    stat = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-8, os.SEEK_END)
        stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


class KilledError(BaseException):
    """Stands for the end of the process: nothing in the run catches it and goes on."""


def begin_again(path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """A later start that trains and ends before anything is judged."""

    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_judge", killed)
        with pytest.raises(KilledError):
            go(path, *overrides)


# -- export: the state in model/, or a refusal --------------------------------


def test_a_state_that_was_not_judged_is_not_exported(work, monkeypatch):
    path = write_recipe(work, all_weights())
    _, out, _ = go(path)
    promoted = weights(out / "model")
    begin_again(path, monkeypatch, "stages.0.learning_rate=2e-3")
    assert weights(out / "01-sft" / "weights") != promoted
    with pytest.raises(RecipeError, match="its stage has begun again since"):
        export(out, ["merged"])
    assert not (out / "exports").exists()
    assert weights(out / "model") == promoted


def test_model_is_exported_when_another_stage_began_again(work, monkeypatch):
    recipe = lora_recipe(gates={"protect": {}, "undetermined": "promote"})
    recipe["stages"] = [{"sft": stage("chats", learning_rate=2e-2)}]
    path = write_recipe(work, recipe)
    _, out, _ = go(path)
    key = read(out / "01-sft" / "state.json")["key"]
    recipe["stages"].append({"sft": stage("chats", name="more", learning_rate=1e-2)})
    write_recipe(work, recipe)
    with pytest.raises(KilledError), monkeypatch.context() as patch:
        real = StageRun._judge

        def second(self, planned, *rest):
            if planned.index == 1:
                raise KilledError
            return real(self, planned, *rest)

        patch.setattr(StageRun, "_judge", second)
        go(path)
    entries, gap = export(out, ["merged"])
    assert gap == "" and entries[0]["kind"] == "merged"
    assert read(out / "exports" / "merged" / "lehr-export.json")["key"] == key
    assert read(out / "model" / "lehr.json")["key"] == key


def test_an_adapter_is_not_exported_over_another_base_or_template(work, monkeypatch):
    recipe = lora_recipe(gates={"protect": {}, "undetermined": "promote"})
    recipe["stages"] = recipe["stages"][:1]
    path = write_recipe(work, recipe)
    _, out, _ = go(path)
    flip(work / "base" / "model.safetensors")
    with pytest.raises(RecipeError, match="the base model and template that were promoted"):
        export(out, ["merged"])
    flip(work / "base" / "model.safetensors")
    entries, gap = export(out, ["merged"])
    assert gap == "" and entries


def test_a_damaged_state_is_not_exported(work):
    _, out, _ = go(write_recipe(work, all_weights()))
    flip(out / "01-sft" / "weights" / "model.safetensors")
    with pytest.raises(
        RecipeError, match=r"01-sft/weights/model\.safetensors: expected the file as its"
    ):
        export(out, ["merged"])


def test_model_without_its_mark_is_not_guessed(work):
    _, out, _ = go(write_recipe(work, all_weights()))
    (out / "model" / "lehr.json").write_text("[]")
    with pytest.raises(RecipeError, match="run the recipe to its end again"):
        export(out, ["merged"])


# -- reuse: the bytes that were written, or the stage is made again -------------


@pytest.mark.parametrize("where", ["01-sft/weights", "model"])
def test_weights_with_one_bit_changed_are_made_again(work, where):
    path = write_recipe(work, all_weights())
    _, out, _ = go(path)
    before = weights(out / "01-sft" / "weights")
    flip(out / where / "model.safetensors")
    _, _, heard = go(path)
    [said] = heard.of("damaged")
    assert "01-sft/weights/model.safetensors is gone or not what" in said.text
    assert weights(out / "01-sft" / "weights") == before == weights(out / "model")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "another.safetensors"])
def test_any_file_of_a_state_counts(work, name):
    path = write_recipe(work, all_weights())
    _, out, _ = go(path)
    victim = out / "01-sft" / "weights" / name
    if victim.exists():
        victim.write_text(victim.read_text() + "\n")
    else:
        shutil.copy2(victim.with_name("model.safetensors"), victim)
    _, _, heard = go(path)
    assert name in heard.of("damaged")[0].text


def test_the_folded_weights_under_an_adapter_count(work):
    recipe = lora_recipe(gates={"protect": {}, "undetermined": "promote"})
    recipe["stages"][1] = {"sft": stage("chats", name="more", fold_parent=True)}
    path = write_recipe(work, recipe)
    _, out, _ = go(path)
    folded = out / "02-more" / "folded" / "weights"
    before = weights(folded)
    flip(folded / "model.safetensors")
    with pytest.raises(RecipeError, match="02-more/folded/weights"):
        export(out, ["merged"])
    _, _, heard = go(path)
    assert "02-more/folded/weights/model.safetensors" in heard.of("damaged")[0].text
    assert weights(folded) == before


# -- records ------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"{not json\n", b"[1]\n"])
def test_a_finished_stage_without_its_metrics_is_made_again(work, content):
    path = write_recipe(work, all_weights())
    _, out, _ = go(path)
    before, rows = weights(out / "model"), metrics(out / "01-sft")
    file = out / "01-sft" / "metrics.jsonl"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    ledger, _, heard = go(path)
    assert "metrics.jsonl" in heard.of("damaged")[0].text
    assert metrics(out / "01-sft") == rows and weights(out / "model") == before
    assert ledger.stages[0]["updates"] == 6


def test_an_unfinished_stage_without_its_metrics_goes_on(work, monkeypatch):
    path = write_recipe(work, all_weights())
    begin_again(path, monkeypatch)
    out = work / "out"
    (out / "01-sft" / "state.json").unlink()
    (out / "01-sft" / "metrics.jsonl").unlink()
    ledger, _, _ = go(path)
    assert ledger.stages[0]["updates"] == 6
