"""The recipe of the contract, short forms, defaults, and the way back to YAML."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from lehr.errors import RecipeError
from lehr.recipe.loading import (
    dump_recipe,
    improve_gate,
    load_recipe,
    loads,
    recipe_from,
    recipe_hash,
    recipe_notices,
    resumed,
)
from lehr.recipe.schema import PreferenceStage, PretrainStage, SftStage

TODAY = datetime.date(2030, 5, 17)


def test_the_recipe_of_the_contract(folder, full):
    recipe = loads(full, folder)
    pretrain, sft, preference = recipe.stages
    assert isinstance(pretrain, PretrainStage) and isinstance(sft, SftStage)
    assert isinstance(preference, PreferenceStage)
    assert pretrain.data == {"law": 0.75, "web": 0.25}
    assert pretrain.overflow == "split" and sft.overflow == "truncate"
    assert sft.data == {"chats": 1.0} and sft.keep.replay == {"web": 0.05}
    assert sft.mixture() == {"chats": 0.95, "web": 0.05}
    assert recipe.adapter.alpha == 32 and sft.adapter == recipe.adapter
    assert pretrain.epochs == 1.0 and pretrain.max_updates is None
    assert sft.pack_length == sft.max_length == 1024
    assert recipe.files_of("law") == [folder / "law.txt"]
    assert recipe.export == ["adapter", "merged"]
    assert improve_gate(recipe, 1) == ("chats", "loss")
    assert recipe_notices(recipe) == []


def test_dump_reloads_to_the_same_hash_from_anywhere(folder, full, tmp_path_factory):
    recipe = loads(full, folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    absolute = dump_recipe(recipe)
    again = loads(absolute, elsewhere)
    assert recipe_hash(again) == recipe_hash(recipe)
    assert dump_recipe(again) == absolute
    run = folder / "runs" / "assistant"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(dump_recipe(recipe, run), encoding="utf-8")
    assert "../../law.txt" in (run / "recipe.yaml").read_text(encoding="utf-8")
    assert recipe_hash(load_recipe(run / "recipe.yaml")) == recipe_hash(recipe)
    assert recipe_notices(again) == []


@pytest.mark.parametrize(
    "text",
    [
        "model: tiny:1m\nadapter: none\ndata: {w: {microworld: text, options: {facts: 0.5}}}\n"
        "stages: [pretrain: {data: w, clip: none, max_updates: 5}]\ngates: none",
        "model: ./m\ntemplate: t.jinja\ndata: {law: [law.txt, general.txt]}\n"
        "stages: [pretrain: {data: law, schedule: wsd, name: first, early_stop: 3}]\n"
        "gates: {protect: {forgetting: default, refusal: 0.1}}\nshow: Who are you?",
    ],
)
def test_unusual_recipes_reload_to_the_same_hash(folder, text):
    (folder / "t.jinja").write_text("{{ messages }}")
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    recipe = loads(text, folder, today=TODAY)
    again = loads(dump_recipe(recipe), "/")
    assert recipe_hash(again) == recipe_hash(recipe)
    assert again.stages == recipe.stages and again.gates == recipe.gates


def test_short_forms(folder):
    text = (
        "model: m\nadapter: none\ndata: {law: law.txt, both: [law.txt, general.txt]}\n"
        "stages:\n  - pretrain: {data: both, schedule: linear, optimizer: adamw}\n"
        "gates: none\nexport: merged\nshow: Who are you?\n"
    )
    recipe = loads(text, folder)
    assert recipe.adapter.kind == "none"
    assert recipe.data["both"].path == ["law.txt", "general.txt"]
    assert recipe.stages[0].schedule.kind == "linear"
    assert recipe.gates.improve == {} and recipe.gates.protect == {}
    assert recipe.export == ["merged"] and recipe.show == ["Who are you?"]
    assert improve_gate(recipe, 0) is None


def test_stages_as_a_mapping_and_with_kind(folder):
    as_mapping = "model: m\ndata: {a: law.txt}\nstages:\n  pretrain: {data: a}\n  sft: {data: a}\n"
    with_kind = (
        "model: m\ndata: {a: law.txt}\nstages:\n- {kind: pretrain, data: a}\n- {kind: sft, data: a}"
    )
    assert loads(as_mapping, folder).stages == loads(with_kind, folder).stages


def test_a_path_in_a_stage_becomes_a_source_of_its_own(folder):
    recipe = loads("model: m\nstages: [sft: {data: chats.jsonl}]", folder)
    assert recipe.stages[0].data == {"chats": 1.0}
    assert recipe.data["chats"].path == "chats.jsonl"
    assert recipe.gates.improve == {"sft": "chats.loss"}


def test_a_list_means_equal_shares(folder):
    recipe = loads("model: m\nstages: [sft: {data: [chats.jsonl, extra.jsonl]}]", folder)
    assert recipe.stages[0].data == {"chats": 0.5, "extra": 0.5}
    assert any("equal shares" in notice for notice in recipe_notices(recipe))


def test_learning_rates_depend_on_what_trains(folder):
    def rates(top: str) -> list[float]:
        text = (
            f"{top}\ndata: {{a: law.txt}}\n"
            "stages: [pretrain: {data: a}, sft: {data: a}, preference: {data: a}]"
        )
        return [stage.learning_rate for stage in loads(text, folder).stages]

    assert rates("model: m") == [1e-4, 2e-4, 5e-6]
    assert rates("model: m\nadapter: none") == [1e-3, 2e-5, 5e-6]
    assert rates("model: tiny:1m") == [1e-3, 1e-3, 5e-6]


def test_the_first_stage_of_a_tiny_model_trains_all_weights(folder):
    text = "model: tiny:1m\ndata: {a: law.txt}\nstages: [pretrain: {data: a}, sft: {data: a}]"
    first, second = loads(text, folder).stages
    assert first.adapter.kind == "none" and second.adapter.kind == "lora"


def test_a_stage_adapter_inherits_what_it_does_not_say(folder):
    text = (
        "model: m\nadapter: {rank: 8, dropout: 0.1, alpha: 4}\ndata: {a: law.txt}\n"
        "stages: [pretrain: {data: a}, sft: {data: a, fold_parent: true, adapter: {rank: 2}}]"
    )
    first, second = loads(text, folder).stages
    assert (first.adapter.rank, first.adapter.alpha) == (8, 4)
    assert (second.adapter.rank, second.adapter.alpha, second.adapter.dropout) == (2, 4, 0.1)


def test_default_gates_of_repeated_kinds_name_the_stage(folder):
    text = (
        "model: m\ndata: {a: law.txt, b: {path: general.txt, holdout: 0}}\n"
        "stages: [pretrain: {data: {a: 0.4, b: 0.6}}, pretrain: {data: a}, sft: {data: a}]"
    )
    recipe = loads(text, folder)
    assert recipe.gates.improve == {"0": "a.bits_per_byte", "1": "a.bits_per_byte", "sft": "a.loss"}
    assert recipe.gates.protect is None
    assert improve_gate(recipe, 1) == ("a", "bits_per_byte")


def test_a_number_goes_before_a_name_and_a_name_before_a_kind(folder):
    text = (
        "model: m\ndata: {a: law.txt, b: law.txt, c: law.txt}\n"
        "stages: [sft: {data: a, name: one}, sft: {data: b, name: two}, sft: {data: c}]\n"
        "gates: {improve: {1: b.loss, one: a.loss, sft: c.loss}}"
    )
    recipe = loads(text, folder)
    assert [improve_gate(recipe, i) for i in range(3)] == [
        ("a", "loss"),
        ("b", "loss"),
        ("c", "loss"),
    ]


def test_the_date_is_frozen_and_read_back(folder):
    text = "model: m\noutput: run\ndata: {a: law.txt}\nstages: [pretrain: {data: a}]"
    recipe = loads(text, folder, today=TODAY)
    assert recipe.date == "2030-05-17" and recipe.date_was_auto
    (folder / "run").mkdir()
    (folder / "run" / "recipe.yaml").write_text(dump_recipe(recipe))
    tomorrow = loads(text, folder, today=TODAY + datetime.timedelta(days=1))
    assert tomorrow.date == "2030-05-17"
    elsewhere = text.replace("run\n", "other\n")
    fresh = loads(elsewhere, folder, today=datetime.date(2031, 1, 1))
    assert fresh.date == "2031-01-01"
    assert resumed(fresh, folder / "run").date == "2030-05-17"
    fixed = loads(text + "\ndate: 2029-01-02", folder)
    assert fixed.date == "2029-01-02" and resumed(fixed, folder / "run").date == "2029-01-02"


def test_recipe_from_python_values(folder):
    value = {
        "model": "m",
        "data": {"a": folder / "law.txt"},
        "stages": [{"pretrain": {"data": ("a",), "learning_rate": 1e-3}}],
    }
    recipe = recipe_from(value, folder)
    assert recipe.stages[0].learning_rate == 1e-3
    assert recipe.folder == folder
    assert value["stages"] == [{"pretrain": {"data": ("a",), "learning_rate": 1e-3}}]
    with pytest.raises(
        RecipeError, match=r"recipe stages\.0\.pretrain\.epochs: expected a number above 0"
    ):
        recipe_from({**value, "stages": [{"pretrain": {"data": "a", "epochs": -1}}]}, folder)
    with pytest.raises(RecipeError, match="text, a number, a list or a mapping"):
        recipe_from({"model": object()}, folder)


def test_a_recipe_is_frozen(folder, full):
    recipe = loads(full, folder)
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 1


def test_load_recipe_names_the_file_as_the_user_did(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("r.yaml").write_text("model: m\nstages: [sft: {data: nope}]\n")
    with pytest.raises(RecipeError, match=r"^r\.yaml:2 stages\.0\.sft\.data: expected a source"):
        load_recipe("r.yaml")


def test_importing_the_recipe_is_light():
    import subprocess
    import sys

    code = (
        "import sys, lehr.recipe.loading\n"
        "heavy = {'torch', 'transformers', 'numpy', 'ruamel.yaml'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("written", "decay"),
    [("0.99", 0.99), ("'0.99'", 0.99), ("none", None), ("{start_after: 3}", 0.999)],
)
def test_an_average_is_a_decay_or_a_mapping(folder, written, decay):
    text = f"model: m\ndata: {{law: law.txt}}\nstages: [pretrain: {{data: law, ema: {written}}}]\n"
    ema = loads(text, folder).stages[0].ema
    assert (None if ema is None else ema.decay) == decay
    if decay is not None:
        assert loads(text, folder, ["stages.0.ema.warmup=false"]).stages[0].ema.warmup is False


def test_groups_of_the_optimizer(folder):
    groups = "[{pattern: '*lora_B*', learning_rate_scale: 16}, {pattern: '*norm*'}]"
    body = f"{{data: law, optimizer: {{kind: adam_l2, groups: {groups}}}}}"
    recipe = loads(f"model: m\ndata: {{law: law.txt}}\nstages: [pretrain: {body}]\n", folder)
    first, second = recipe.stages[0].optimizer.groups
    assert (first.pattern, first.learning_rate_scale, first.weight_decay) == ("*lora_B*", 16, None)
    assert (second.pattern, second.learning_rate_scale) == ("*norm*", 1)
