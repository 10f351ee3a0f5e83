# ruff: noqa: F811 (fixtures of the other file)
"""The loss-spike playbook on whole runs: bad rows, a bad state, bits that do not come again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.pipeline.small import (
    chat_rows,
    metrics,
    stage,
    weights_recipe,
    write_recipe,
    write_rows,
)
from tests.pipeline.test_guard_keys import guarded, louder
from tests.pipeline.test_keys_have_effects import run_dir, trained  # noqa: F401

from lehr.cli.main import main
from lehr.errors import RecipeError
from lehr.objectives.language import Language
from lehr.pipeline.folder import claimed
from lehr.pipeline.run import run
from lehr.pipeline.spikes import explain_spike
from lehr.recipe.loading import load_recipe
from lehr.streams import content_hash, file_hash

pytestmark = pytest.mark.usefixtures("lean")
HONEST = Language.loss
KEYS = {
    **{"micro_batch": 2, "precision": "fp32", "checkpoints_kept": 9, "max_updates": 25},
    **{"learning_rate": 2e-2, "checkpoint_every": 5},
}
POISON = {
    "messages": [
        {"role": "user", "content": "Which colour has door 3?"},
        {"role": "assistant", "content": "zq#9 \u00b6\u00b6 XJ" * 8},
    ]
}


def files(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def late_and_high(place: Path) -> int:
    """The late update with the largest loss, or the one that was skipped."""
    rows = [row for row in metrics(place) if row["update"] >= 30]
    worst = max(rows, key=lambda row: row["loss"] or 0.0)
    return worst["update"] + (1 if worst["skipped"] else 0)


def test_a_poisoned_record_is_data_and_named_with_its_line(run_dir, capsys):
    write_rows(run_dir / "chats.jsonl", [*chat_rows(60), POISON])
    more = {"max_updates": 50, "batch_size": 4, "checkpoints_kept": 9, "checkpoint_every": 10}
    recipe = weights_recipe(gates="none", export="merged")
    keys = {"learning_rate": 3e-3, "guard": "skip", **more}
    recipe["stages"] = [{"sft": stage("chats", **keys)}]
    del recipe["data"]["text"]
    place = trained(run_dir, "poisoned", recipe)
    update = late_and_high(place)
    before = files(place.parent)
    spike = explain_spike(place.parent, update)
    assert files(place.parent) == before, "the run's folder is as it was"
    assert spike.verdict == "data", spike.as_json()
    assert spike.bits.departure == 0 and spike.record.signal
    assert "chats.jsonl:61" in spike.rows[0].origin
    assert spike.rows[0].loss > 2 * spike.rows[0].others
    with pytest.raises(SystemExit) as left:
        main(["doctor", str(place.parent), "--spike", str(update)])
    assert not left.value.code
    shown = capsys.readouterr().out
    assert "chats.jsonl:61" in shown and ": data" in shown
    assert max(len(line) for line in shown.splitlines() if "chats.jsonl" not in line) <= 80
    usual = min(row["update"] for row in metrics(place) if 30 <= row["update"] != update)
    calm = explain_spike(place.parent, usual, stage="sft")
    assert calm.verdict == "nothing unusual" and calm.bits.departure == 0


def edit_checkpoint(path: Path, change) -> None:
    """Change a checkpoint as something that also rewrites its hashes would."""
    body = json.loads((path / "state.json").read_text())["body"]
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: change(file.stem, name, one) for name, one in tensors.items()}, file)
        body["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_hash(file)}
    text = json.dumps({"sha256": content_hash(body), "body": body})
    (path / "state.json").write_text(text)


def stopped_at(run_dir: Path, monkeypatch, name: str, update: int):
    """A run that ends right after a checkpoint; the same recipe goes on."""
    recipe = guarded("skip", **KEYS) | {"output": f"out-{name}"}
    path = write_recipe(run_dir, recipe)
    calls = []

    def loss(self, model, pack):
        if torch.is_grad_enabled():
            calls.append(1)
        if len(calls) > update:
            raise KeyboardInterrupt
        return HONEST(self, model, pack)

    monkeypatch.setattr(Language, "loss", loss)
    with pytest.raises(KeyboardInterrupt):
        run(load_recipe(path))
    monkeypatch.setattr(Language, "loss", HONEST)
    return path, run_dir / f"out-{name}"


@pytest.mark.parametrize(("file", "spiked"), [("weights", 16), ("optimizer", 17)])
def test_a_damaged_state_is_state_and_its_tensors_are_named(run_dir, monkeypatch, file, spiked):
    path, folder = stopped_at(run_dir, monkeypatch, file, 15)

    def change(name, tensor_name, one):
        if name != file or not one.is_floating_point() or one.dim() < 2:
            return one
        if file == "weights":
            return one + 3.0 * torch.randn(one.shape, generator=torch.manual_seed(1))
        return one * (1e-6 if tensor_name.startswith("exp_avg_sq") else 1.0)

    edit_checkpoint(folder / "01-sft" / "checkpoints" / "update-000015", change)
    run(load_recipe(path))
    spike = explain_spike(folder, spiked)
    assert spike.verdict == "state", spike.as_json()
    assert spike.bits.since == 15 and spike.bits.departure == 0
    assert spike.bits.changed and all(name.startswith(file) for name in spike.bits.changed)


def test_other_bits_than_recorded_are_hardware(run_dir, monkeypatch):
    calls = []

    def loss(self, model, pack):
        found = HONEST(self, model, pack)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 13:  # a bit flips in one forward pass
                return type(found)(found.total * 1.5, found.metrics)
        return found

    monkeypatch.setattr(Language, "loss", loss)
    place = trained(run_dir, "flipped", guarded("off", **KEYS))
    monkeypatch.setattr(Language, "loss", HONEST)
    spike = explain_spike(place.parent, 13)
    assert spike.verdict == "not reproducible"
    assert spike.bits.departure == 13 and spike.bits.repeats is True
    assert spike.bits.since == 10
    later = explain_spike(place.parent, 15)
    assert later.verdict == "not reproducible" and later.bits.departure == 13


def test_a_line_that_the_guard_undid_is_found_in_its_own_history(run_dir, monkeypatch):
    calls = []

    def loss(self, model, pack):
        calls.append(1)
        return louder(HONEST(self, model, pack), 100.0 if len(calls) in (17, 18, 19) else 1.0)

    monkeypatch.setattr(Language, "loss", loss)
    place = trained(run_dir, "undone", guarded(micro_batch=8, precision="fp32"))
    monkeypatch.setattr(Language, "loss", HONEST)
    assert (place / "undone.jsonl").is_file() and metrics(place)[16]["loss"] < 10
    spike = explain_spike(place.parent, 17)
    assert spike.record.loss > 100 and spike.record.signal == "loss of chats"
    assert spike.verdict == "not reproducible" and spike.bits.departure == 17
    (note,) = [one for one in explain_spike(place.parent, 16).notes if "in quarantine" in one]
    assert "batch 16, right before" in note and "3 of the last 8" in note


def test_a_moved_run_is_replayed_once_its_recipe_finds_the_files(run_dir):
    folder = trained(run_dir, "plain", guarded("off", **KEYS | {"max_updates": 6})).parent
    moved = run_dir / "deep" / "er" / "moved"
    moved.parent.mkdir(parents=True)
    shutil.move(folder, moved)
    with pytest.raises(RecipeError, match=r"(?s)was it moved\?.*full paths") as refused:
        explain_spike(moved, 6)
    assert str(run_dir / "chats.jsonl") in str(refused.value), "where the plan found it"
    text = (moved / "recipe.yaml").read_text().replace("../", f"{run_dir}/")
    (moved / "recipe.yaml").write_text(text)
    assert explain_spike(moved, 6).verdict == "nothing unusual"


def test_what_cannot_be_replayed_is_refused(run_dir, monkeypatch, capsys):
    place = trained(run_dir, "plain", guarded("off", **KEYS | {"checkpoints_kept": 1}))
    folder = place.parent
    with pytest.raises(RecipeError, match="an update of 01-sft: 1 to 25"):
        explain_spike(folder, 99)
    with pytest.raises(RecipeError, match="the folder of a run"):
        explain_spike(folder / "01-sft", 3)
    with pytest.raises(RecipeError, match="a stage that was trained, of 01-sft"):
        explain_spike(folder, 3, stage="dpo")
    with claimed(folder, "recipe", fresh=False), pytest.raises(RecipeError, match="no other lehr"):
        explain_spike(folder, 3)
    torn = folder / "01-sft" / "undone.jsonl"
    torn.write_text('{"upd')  # killed while the guard wrote it
    assert explain_spike(folder, 3).verdict == "nothing unusual"
    torn.unlink()
    monkeypatch.setattr("lehr.pipeline.spikes.CHEAP", 0.0)
    with pytest.raises(RecipeError, match=r"(?s)older than update 12.*--from-start"):
        explain_spike(folder, 12)
    found = explain_spike(folder, 12, from_start=True)
    assert found.verdict == "nothing unusual" and "beginning" in found.notes[0]
    (run_dir / "chats.jsonl").write_text((run_dir / "chats.jsonl").read_text() + "\n{}\n")
    named = r"(?s)as they were when.*chats\.jsonl of data\.chats holds other.*Put the data"
    with pytest.raises(RecipeError, match=named):
        explain_spike(folder, 12, from_start=True)
