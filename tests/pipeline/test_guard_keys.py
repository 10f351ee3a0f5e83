# ruff: noqa: F811 (fixtures of the other file)
"""The guard of a recipe: on by default, off changes no number, and a run that went back says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.small import losses, metrics, read, weights, write_recipe
from tests.pipeline.test_keys_have_effects import run_dir, sft, trained  # noqa: F401

from lehr.cli.main import main
from lehr.errors import Diverged, RecipeError
from lehr.models.language_model import LanguageModel
from lehr.objectives.base import Loss
from lehr.objectives.language import Language
from lehr.recipe.loading import dump_recipe, load_recipe, recipe_hash

pytestmark = pytest.mark.usefixtures("lean")

HONEST = Language.loss
LONG = {"max_updates": 30, "learning_rate": 2e-3, "batch_size": 2, "checkpoint_every": 5}


def guarded(guard: Any = None, **keys: Any) -> dict[str, Any]:
    more = {} if guard is None else {"guard": guard}
    return sft(**(LONG | more | keys))


def louder(found: Loss, factor: float) -> Loss:
    """The same loss times `factor`, also where it is told by source."""
    told = {
        name: (total * (factor if name.startswith("source.") else 1.0), count)
        for name, (total, count) in found.metrics.items()
    }
    return Loss(found.total * factor, told)


def loud_from(monkeypatch: pytest.MonkeyPatch, origins: set[str]) -> None:
    """Rows of these origins have a loss a hundred times as large."""

    def loss(self, model, pack):
        found = HONEST(self, model, pack)
        loud = any(str(origin) in origins for origin in pack.origins)
        return louder(found, 100.0 if loud else 1.0)

    monkeypatch.setattr(Language, "loss", loss)


def heard(place: Path, kind: str) -> list[dict[str, Any]]:
    lines = (place.parent / "events.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


def test_it_is_on_by_default_and_changes_no_number(run_dir):
    on, off = trained(run_dir, "on", sft()), trained(run_dir, "off", sft(guard="off"))
    assert all(row["update_norm"] > 0 for row in metrics(on))
    assert not any("update_norm" in row for row in metrics(off))
    assert losses(on) == losses(off)
    assert weights(on / "adapter") == weights(off / "adapter")
    assert (on / "checkpoints" / "update-000000").exists() is False, "two newer ones are kept"


def test_words_and_mappings(run_dir):
    def settings(guard: Any) -> Any:
        return load_recipe(write_recipe(run_dir, guarded(guard))).stages[0].guard

    assert settings("skip").policy == "skip" and settings(False).policy == "off"
    assert settings({"limit": 5}).policy == "rewind"
    wrong_ones = ({"limit": 0}, {"window": 8}, {"rewinds": -1}, {"attention_queries": -1})
    for wrong in ("pause", *wrong_ones, True):
        with pytest.raises(RecipeError, match="guard"):
            settings(wrong)
    with pytest.raises(RecipeError, match=r"quarantine\.jsonl of a run"):
        settings({"quarantine": "nowhere.jsonl"})


def test_an_unusual_update_is_skipped_and_said(run_dir, monkeypatch):
    rows: list[str] = []

    def loss(self, model, pack):
        rows.append(str(pack.origins[0]))
        return HONEST(self, model, pack)

    monkeypatch.setattr(Language, "loss", loss)
    keys = {"packing": False, "micro_batch": 2, "max_updates": 15}  # one epoch
    assert not any(row["skipped"] for row in metrics(trained(run_dir, "names", guarded(**keys))))
    loud_from(monkeypatch, {rows[-1]})
    place = trained(run_dir, "loud", guarded("skip", **keys))
    (skipped,) = [row for row in metrics(place) if row["skipped"]]
    assert skipped["attempt"] == 15 and skipped["guard.value"] > skipped["guard.limit"]
    (event,) = heard(place, "guard_skipped")
    assert "no weight changed" in event["text"] and rows[-1] in event["origins"]
    lax = trained(run_dir, "lax", guarded({"policy": "skip", "limit": 1e4}, **keys))
    assert not any(row["skipped"] for row in metrics(lax))


def test_stop_is_status_4_and_the_same_command_goes_on(run_dir, monkeypatch, capsys):
    calls = []

    def loss(self, model, pack):
        calls.append(1)
        found = HONEST(self, model, pack)
        return louder(found, 100.0 if len(calls) == 20 else 1.0)

    monkeypatch.setattr(Language, "loss", loss)
    path = write_recipe(run_dir, guarded("stop", micro_batch=8))
    command = ["run", str(path), "--set", "output=out-stop", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "diverged" and "attempt 20" in error["problems"][0]["where"]
    record = (run_dir / "out-stop" / "01-sft" / "quarantine.jsonl").read_text()
    assert json.loads(record)["attempt"] == 20
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code in (0, None)
    assert [r["attempt"] for r in metrics(run_dir / "out-stop" / "01-sft") if r["skipped"]] == [20]


def test_a_run_that_went_back_ends_as_one_with_the_record_from_the_start(run_dir, monkeypatch):
    """Attempts 17 to 19 are loud the first time: as if 16 had spoilt the weights."""
    calls = []

    def loss(self, model, pack):
        calls.append(1)
        found = HONEST(self, model, pack)
        return louder(found, 100.0 if len(calls) in (17, 18, 19) else 1.0)

    monkeypatch.setattr(Language, "loss", loss)
    values = {"micro_batch": 8, "precision": "fp32"}
    place = trained(run_dir, "back", guarded(**values))
    (event,) = heard(place, "guard_went_back")
    assert event["attempts"] == [16] and "went back from update" in event["text"]
    assert [row["attempt"] for row in metrics(place) if row["skipped"]] == [16]
    (left_out,) = read(place.parent / "ledger.json")["stages"][0]["left_out"]
    assert left_out["attempt"] == 16 and left_out["how"] == "in quarantine"
    assert "3 of the last 8" in left_out["why"] and "chats.jsonl:" in left_out["origins"][0]
    report = (place.parent / "report.html").read_text()
    assert "Batches that were not trained on" in report and left_out["origins"][0] in report
    monkeypatch.undo()
    (run_dir / "record.jsonl").write_text((place / "quarantine.jsonl").read_text())
    other = trained(run_dir, "given", guarded({"quarantine": "record.jsonl"}, **values))
    assert weights(other / "adapter") == weights(place / "adapter")
    assert metrics(other) == metrics(place)
    assert heard(other, "guard_passed_over")


def test_rewinds_none_stops_instead(run_dir, monkeypatch):
    calls = []

    def loss(self, model, pack):
        calls.append(1)
        found = HONEST(self, model, pack)
        return louder(found, 100.0 if len(calls) > 20 else 1.0)

    monkeypatch.setattr(Language, "loss", loss)
    with pytest.raises(Diverged, match="3 of the last 8"):
        trained(run_dir, "stop", guarded({"rewinds": 0}, micro_batch=8))
    assert not any((run_dir / "out-stop" / "01-sft").glob("undone.jsonl"))
    calls.clear()
    with pytest.raises(Diverged, match=r"went back once"):
        trained(run_dir, "stop", guarded({"rewinds": 1}, micro_batch=8))


def test_a_record_is_part_of_the_recipes_hash_and_its_path_is_not(run_dir):
    entry = {"key": "", "attempt": 2, "update": 0, "why": "", "origins": [], "rewind": 0}
    hashes = []
    for name, attempt in (("a.jsonl", 2), ("b.jsonl", 2), ("c.jsonl", 3)):
        (run_dir / name).write_text(json.dumps(entry | {"attempt": attempt}) + "\n")
        recipe = load_recipe(write_recipe(run_dir, guarded({"quarantine": name})))
        hashes.append(recipe_hash(recipe))
        (run_dir / "moved").mkdir(exist_ok=True)
        (run_dir / "moved" / "recipe.yaml").write_text(dump_recipe(recipe, run_dir / "moved"))
        assert recipe_hash(load_recipe(run_dir / "moved" / "recipe.yaml")) == hashes[-1]
    assert hashes[0] == hashes[1] != hashes[2]


def test_attention_logits_are_sampled_where_that_is_asked(run_dir, monkeypatch):
    """A column that moves no number; the guard judges it."""
    keys = {"packing": False, "precision": "fp32"}
    plain = trained(run_dir, "plain", sft(**keys))
    assert not any("objective.attention_logit" in row for row in metrics(plain))
    watched = trained(run_dir, "watched", sft(guard={"attention_queries": 2}, **keys))
    assert all(row["objective.attention_logit"] > 0 for row in metrics(watched))
    assert losses(watched) == losses(plain)

    honest, calls = LanguageModel.largest_attention_logit, []

    def jumps(self):
        calls.append(1)
        return honest(self) * (100.0 if len(calls) == 20 else 1.0)

    monkeypatch.setattr(LanguageModel, "largest_attention_logit", jumps)
    place = trained(run_dir, "jump", guarded({"policy": "skip", "attention_queries": 1}))
    (skipped,) = [row for row in metrics(place) if row["skipped"]]
    assert (skipped["attempt"], skipped["guard.signal"]) == (20, "attention logit")


def test_z_loss_shows_and_holds_log_z(run_dir):
    keys = {"z_loss": 1.0, "precision": "fp32"}
    plain = metrics(trained(run_dir, "plain", sft(precision="fp32")))
    held = metrics(trained(run_dir, "held", sft(**keys)))
    assert not any("objective.z_loss" in row for row in plain)
    assert held[0]["objective.loss"] == pytest.approx(plain[0]["objective.loss"], abs=1e-6)
    assert held[0]["loss"] > plain[0]["loss"] + 1.0
    assert abs(held[-1]["objective.log_z"]) < abs(plain[-1]["objective.log_z"])


def test_adaptive_clip_shows(run_dir):
    assert not any("clipped" in row for row in metrics(trained(run_dir, "plain", sft())))
    shown = []
    for clip in (
        {"kind": "tensor", "limit": 1.0, "warmup": 2},
        {"kind": "tensor", "limit": 1.0, "warmup": 3},
        {"kind": "tensor", "limit": 1.0, "warmup": 2, "decay": 0.1},
        {"kind": "tensor", "limit": 9.0, "warmup": 2},
        {"kind": "z_score", "limit": 1.0, "warmup": 2},
    ):
        rows = metrics(trained(run_dir, "clipped", sft(adaptive_clip=clip, learning_rate=0.05)))
        shown.append([(row["clipped"], row["loss"]) for row in rows])
    assert all(one != other for n, one in enumerate(shown) for other in shown[:n])
    tensor = load_recipe(write_recipe(run_dir, sft(adaptive_clip="tensor"))).stages[0]
    assert tensor.adaptive_clip.kind == "tensor"


def test_restarts_show(run_dir):
    rows = {}
    for name, restart in (
        ("none", None),
        ("moments", {"every": 2}),
        ("rate", {"every": 2, "moments": False, "warmup": 2, "initial": 0.25}),
    ):
        keys = {"precision": "fp32", "schedule": {"kind": "constant", "warmup": 0}}
        rows[name] = metrics(trained(run_dir, name, sft(restart=restart, **keys)))
    assert ["restarted" in row for row in rows["moments"]] == [False, False, True, False]
    assert losses_differ_from(rows, "moments") == 3 and losses_differ_from(rows, "rate") == 3
    rates = [row["learning_rate"] / rows["none"][0]["learning_rate"] for row in rows["rate"]]
    assert rates == pytest.approx([1.0, 1.0, 0.625, 1.0])
    (planned,) = read(run_dir / "out-rate" / "plan.json")["stages"]
    assert planned["curve"] == pytest.approx([row["learning_rate"] for row in rows["rate"]])
    with pytest.raises(RecipeError, match=r"restart\.after_rewind"):
        trained(run_dir, "wrong", sft(restart={"after_rewind": True}, guard="skip"))


def losses_differ_from(rows: dict[str, list[dict[str, Any]]], name: str) -> int:
    """The first attempt whose loss is another than without a restart, from 0."""
    pairs = zip(rows["none"], rows[name], strict=True)
    return next(n for n, (one, other) in enumerate(pairs) if one["loss"] != other["loss"])
