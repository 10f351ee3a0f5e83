"""What no machine can hold, and files of another shape, are refused or said: no traceback."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file
from tests.pipeline.small import Heard, go, lora_recipe, save_base, stage, write_recipe
from transformers import GPT2Config, GPT2LMHeadModel

from lehr.errors import RecipeError
from lehr.models.loading import load_model
from lehr.pipeline.run import run
from lehr.recipe.loading import load_recipe

pytestmark = pytest.mark.usefixtures("lean")


def short(**keys) -> dict:
    recipe = lora_recipe(gates={"protect": {}, "undetermined": "promote"}, export="merged")
    recipe["stages"] = [{"sft": stage("chats", learning_rate=2e-2, **{"max_updates": 2, **keys})}]
    return recipe


@pytest.mark.parametrize(
    "override",
    [
        "threads=100000",
        "threads=99999999999999999999",
        "stages.0.max_updates=1000000000000",
        "stages.0.epochs=1e308",
        "stages.0.batch_size=99999999999999999999",
        "stages.0.max_length=1e308",
        "stages.0.schedule.cooldown=1e300",
        "adapter.rank=99999999999999999999",
    ],
)
def test_numbers_beyond_any_machine(work, override):
    with pytest.raises(RecipeError, match="at most"):
        load_recipe(write_recipe(work, short()), [override])


def test_null_on_the_command_line_is_null_in_the_file(work):
    path = write_recipe(work, short())
    for word in ("null", "~", "none"):
        assert load_recipe(path, [f"stages.0.clip={word}"]).stages[0].clip is None
    assert load_recipe(write_recipe(work, short(clip=None))).stages[0].clip is None


def test_a_batch_of_more_rows_than_there_are_is_said(work):
    _, _, heard = go(write_recipe(work, short(batch_size=1000)))
    assert any("batch_size 1,000 is more than the 30 examples" in e.text for e in heard)


def test_examples_longer_than_the_learned_positions(work):
    size = json.loads((work / "base" / "config.json").read_text())["vocab_size"]
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=32, vocab_size=size, **ends)
    GPT2LMHeadModel(config).save_pretrained(work / "base")
    with pytest.raises(RecipeError, match="max_length: expected at most 32"):
        go(write_recipe(work, short()))


@pytest.mark.parametrize(
    "content", ['{"stages": 3, "machine": 4}', "[]", '{"stages": [1]}', '{"precision": 1}']
)
def test_a_plan_of_another_shape_is_made_again(work, content):
    path = write_recipe(work, short())
    _, out, _ = go(path)
    (out / "plan.json").write_text(content)
    assert go(path)[0].verdict == "promoted"


@pytest.mark.parametrize("name", ["events.jsonl", "plan.json", "recipe.yaml", "report.html"])
def test_a_folder_in_a_files_place(work, name):
    (work / "out" / name).mkdir(parents=True)
    (work / "out" / ".lock").write_text("")
    with pytest.raises(RecipeError, match="a file of the run, not a folder"):
        go(write_recipe(work, short()))


@pytest.mark.parametrize(
    "keys", [{"num_attention_heads": 0}, {"hidden_size": "x"}, {"dtype": "float99"}]
)
def test_a_config_with_impossible_values(tmp_path, keys):
    base = save_base(tmp_path / "base")
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.raises(RecipeError):
        load_model(str(base))


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_broken_generation_config_is_named(tmp_path, content):
    base = save_base(tmp_path / "base")
    (base / "generation_config.json").write_text(content)
    with pytest.raises(RecipeError, match=r"generation_config\.json"):
        load_model(str(base))


def test_weights_that_are_no_numbers_are_named(tmp_path):
    base = save_base(tmp_path / "base")
    path = base / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"NaN or infinite: model\.norm\.weight"):
        load_model(str(base))


def test_adapter_targets_of_all_stages_are_refused_before_the_first_begins(work):
    recipe = short()
    keys = {"fold_parent": True, "name": "more"}
    for targets, more in (([], {}), (["q_prog"], keys)):
        adapter = {"kind": "lora", "targets": targets}
        recipe["stages"].append({"sft": stage("chats", adapter=adapter, **more)})
    recipe["stages"].pop(0)
    heard = Heard()
    with pytest.raises(RecipeError) as caught:
        run(load_recipe(write_recipe(work, recipe)), listeners=[heard])
    assert "at least one layer name" in str(caught.value) and "q_prog" in str(caught.value)
    assert not heard.of("stage_started")
