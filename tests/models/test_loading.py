"""Loading: every kind of source, and every bad one as a RecipeError that names the file."""

from __future__ import annotations

import json

import pytest
import torch
from families import network_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lehr.errors import RecipeError
from lehr.models.language_model import LanguageModel
from lehr.models.loading import (
    load_model,
    model_fingerprint,
    require_template,
    resolve_spec,
    set_template,
)
from lehr.models.tiny import train_tokenizer
from lehr.models.vocabulary import add_control_tokens

TEXT = ["one two three four five six seven eight nine ten", "the cat sat on the mat"] * 4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEHR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def base(tmp_path):
    tokenizer = train_tokenizer(TEXT, 300)
    network = network_of("Llama", vocab_size=len(tokenizer))
    LanguageModel(network, tokenizer, "base").save_full(tmp_path / "base")
    return tmp_path / "base"


def test_a_folder_loads_with_its_bits(base, tmp_path):
    model = load_model("base", folder=tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(base)
    for one, two in zip(model.network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    assert model.source == str(base)
    assert model.trained() == {}
    assert model.vocabulary_size == len(model.tokenizer)


def test_bf16_stores_frozen_weights_in_bf16(base):
    model = load_model(str(base), precision="bf16")
    assert model.network.dtype == torch.bfloat16
    full = load_model(str(base), precision="bf16", all_weights=True)
    full.train_all()
    assert full.network.dtype == torch.float32
    assert full.compute_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="auto"):
        load_model(str(base), precision="auto")


def test_saving_over_a_folder_keeps_other_files(base):
    (base / "README.md").write_text("card")
    (base / "model-00001-of-00002.safetensors").write_bytes(b"old shard")
    model = load_model(str(base))
    model.save_full(base)
    assert (base / "README.md").read_text() == "card"
    assert not (base / "model-00001-of-00002.safetensors").exists()
    assert not [p for p in base.parent.iterdir() if p.name.startswith(".")]


def test_a_failed_save_leaves_the_old_folder_whole(base, monkeypatch):
    model = load_model(str(base))
    before = model_fingerprint(base)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(type(model.tokenizer), "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save_merged(base)
    assert model_fingerprint(base) == before
    assert not [p for p in base.parent.iterdir() if p.name.startswith(".")]


def test_large_models_are_saved_in_shards(base, tmp_path, monkeypatch):
    from lehr.models import saving

    monkeypatch.setattr(saving, "SHARD_BYTES", 20_000)
    model = load_model(str(base))
    model.save_full(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    again = load_model(str(tmp_path / "shards"))
    for one, two in zip(model.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(one, two)
    next((tmp_path / "shards").glob("*00002*")).unlink()
    with pytest.raises(RecipeError, match="00002"):
        load_model(str(tmp_path / "shards"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "a.ckpt"])
def test_pickles_are_named_and_never_read(base, name):
    (base / "model.safetensors").unlink()
    (base / name).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(RecipeError, match=name):
        load_model(str(base))
    with pytest.raises(RecipeError, match=name):
        load_model(str(base / name))


def test_a_pickle_beside_safetensors_is_not_in_the_way(base):
    (base / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    load_model(str(base))


def test_all_problems_of_a_folder_at_once(base):
    (base / "model.safetensors").unlink()
    (base / "config.json").unlink()
    with pytest.raises(RecipeError) as caught:
        resolve_spec(str(base))
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("damage", ["truncate", "config", "architecture", "tokenizer", "rename"])
def test_damaged_folders_are_recipe_errors(base, damage):
    weights = base / "model.safetensors"
    config = json.loads((base / "config.json").read_text())
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:2000])
    elif damage == "config":
        (base / "config.json").write_text("{")
    elif damage == "architecture":
        (base / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    elif damage == "tokenizer":
        for path in base.glob("tokenizer*"):
            path.unlink()
    else:
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        tensors["model.layers.0.mlp.other.weight"] = tensors.pop(
            "model.layers.0.mlp.up_proj.weight"
        )
        save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(RecipeError) as caught:
        load_model(str(base))
    assert str(base) in str(caught.value)


@pytest.mark.parametrize("spec", ["", "no such thing", "./missing", "missing.gguf", "a/b/c"])
def test_what_is_no_model_is_refused_with_the_choices(spec, tmp_path):
    if spec == "":
        spec = str(tmp_path)
    with pytest.raises(RecipeError):
        resolve_spec(spec, tmp_path)


def test_a_hub_id_offline_says_what_else_there_is():
    with pytest.raises(RecipeError, match="lehr fetch"):
        load_model("nobody/nothing-at-all")


def test_a_file_that_only_claims_to_be_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not one")
    with pytest.raises(RecipeError, match="first bytes"):
        load_model(str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\x00" * 40)
    with pytest.raises(RecipeError, match="GGUF"):
        load_model(str(tmp_path / "x.gguf"))


def test_own_code_is_not_run(base, tmp_path):
    config = json.loads((base / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    }
    (base / "config.json").write_text(json.dumps(config))
    (base / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(RecipeError, match="trust_remote_code: true"):
        load_model(str(base))
    assert not (tmp_path / "ran").exists()


def test_fingerprint_follows_content(base):
    first = model_fingerprint(base)
    assert resolve_spec(str(base)).fingerprint == first
    (base / "README.md").write_text("no part of it")
    assert model_fingerprint(base) == first
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert model_fingerprint(base) != first


def test_template_choices(base, tmp_path):
    model = load_model(str(base))
    with pytest.raises(RecipeError, match="chatml"):
        require_template(model)
    model = load_model(str(base), template="chatml")
    require_template(model)
    end = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.new_rows == (300, 301)
    assert end in model.network.generation_config.eos_token_id
    assert model.network.generation_config.eos_token_id == [2, end]  # the model's own stays
    text = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(text)
    model = load_model(str(base), template="own.jinja", folder=tmp_path)
    assert model.tokenizer.convert_ids_to_tokens(list(model.new_rows)) == ["<|user|>", "<|end|>"]
    with pytest.raises(RecipeError, match="Jinja"):
        load_model(str(base), template="missing.jinja", folder=tmp_path)


def test_template_and_stop_ids_travel_with_a_save(base, tmp_path):
    model = load_model(str(base), template="chatml")
    model.save_merged(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == model.tokenizer.chat_template
    assert len(tokenizer) == 302
    stops = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert stops == model.network.generation_config.eos_token_id
    again = load_model(str(tmp_path / "out"))
    assert again.new_rows == ()
    require_template(again)


def test_control_tokens_that_exist_are_reused(base):
    model = load_model(str(base))
    before = model.network.get_input_embeddings().weight.clone()
    assert add_control_tokens(model.network, model.tokenizer, ["<|endoftext|>"]) == []
    assert torch.equal(model.network.get_input_embeddings().weight, before)
    ids = add_control_tokens(model.network, model.tokenizer, ["<|a|>", "<|endoftext|>"])
    assert ids == [300]
    assert model.tokenizer("x<|a|>y")["input_ids"].count(300) == 1
    assert model.tokenizer.eos_token == "<|endoftext|>"
    output = model.network.get_output_embeddings()
    assert output.weight is model.network.get_input_embeddings().weight
    assert set_template(model.network, model.tokenizer, "auto") == []
