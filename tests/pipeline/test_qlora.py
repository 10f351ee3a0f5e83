"""Runs over a base in four bits: checked exports, resume, refusals."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.pipeline.small import (
    go,
    lora_recipe,
    losses,
    metrics,
    read,
    save_base,
    stage,
    weights,
    write_data,
    write_recipe,
)
from tests.pipeline.test_interrupted import in_a_child
from transformers import LlamaConfig, LlamaForCausalLM

from lehr.errors import RecipeError
from lehr.generation import decode
from lehr.generation.admission import why_not_lean
from lehr.generation.network_batch import decoding_network
from lehr.models import bitsandbytes as library
from lehr.models.loading import load_model
from lehr.models.nf4 import Nf4Linear, Nf4Weight, nf4_bytes, quantise
from lehr.models.probe import probe_pack
from lehr.pipeline import planning
from lehr.pipeline.four_bits import forecast_keys, settle_decoding
from lehr.pipeline.parity import read_plain
from lehr.pipeline.plan import plan
from lehr.pipeline.run import run
from lehr.pipeline.verifying import verify
from lehr.recipe.loading import load_recipe

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: lehr[quant]")

PACK = probe_pack([(torch.arange(3, 30), -1)])


@pytest.fixture(scope="module")
def wide_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of whole blocks, which bitsandbytes' own kernel reads right."""
    folder = tmp_path_factory.mktemp("wide") / "base"
    return save_base(folder, hidden_size=64, intermediate_size=128)


@pytest.fixture
def wide(tmp_path: Path, wide_base: Path) -> Path:
    write_data(tmp_path)
    shutil.copytree(wide_base, tmp_path / "base")
    return tmp_path


def qlora(*more: dict[str, object], **changes: object) -> dict[str, object]:
    """sft, then what is given, over NF4."""
    first = {"sft": stage("chats", learning_rate=2e-2, checkpoint_every=2)}
    adapter = {"kind": "qlora", "rank": 4}
    return lora_recipe(**{"adapter": adapter, "stages": [first, *more], **changes})


def test_sft_and_dpo_are_exported_over_the_dequantised_base(wide):
    pairs = stage("pairs", learning_rate=5e-3, recompute="selective")
    recipe = qlora({"preference": pairs})
    recipe["stages"][0]["sft"] |= {"ema": 0.5, "recompute": "full"}
    path = write_recipe(wide, recipe)
    ledger, folder, heard = go(path)
    assert ledger.verdict == "promoted"
    # The reference is the parent's adapter over the same codes.
    assert losses(folder / "02-preference")[0] == pytest.approx(math.log(2), abs=1e-4)
    exports = {one["kind"]: one["parity"] for one in ledger.data["exports"]}
    assert exports["adapter"]["problem"] == "" and exports["adapter"]["gap"] <= 1e-4
    assert exports["merged"]["problem"] == "" and exports["merged"]["gap"] <= 1e-4
    notices = [event.text for event in heard.of("notice")]
    assert "14 linear layers are held in four bits (NF4)" in notices
    assert not any("whole blocks" in line for line in notices)
    card = (folder / "model/README.md").read_text()
    assert "NF4" in card and "quantization_config=config" in card
    assert "in four bits (NF4" in (folder / "report.html").read_text()
    assert json.loads((folder / "model/lehr-base.json").read_text())["four_bits"] == "nf4"
    # What lehr loads again is what was trained, not the adapter over another base.
    with torch.no_grad():
        again = load_model(str(folder / "model")).hidden(PACK)
        merged = load_model(str(folder / "exports/merged")).hidden(PACK)
        (folder / "model/lehr-base.json").unlink()
        other = load_model(str(folder / "model")).hidden(PACK)
    assert torch.allclose(again, merged, atol=1e-4)
    assert not torch.allclose(again, other, atol=1e-2)
    found = verify(load_recipe(path), folder)
    bad = [one["name"] for one in found["checks"] if not one["ok"]]
    assert bad == ["model"]  # whose mark is gone


@pytest.fixture(scope="module")
def once(tmp_path_factory, wide_base):
    """(ledger, folder) of one run of sft with its adapter exported."""
    folder = tmp_path_factory.mktemp("once")
    write_data(folder)
    shutil.copytree(wide_base, folder / "base")
    return go(write_recipe(folder, qlora(export="adapter")))[:2]


def test_the_adapter_alone_loads_with_peft_and_bitsandbytes(once):
    folder = once[1]
    network, _ = read_plain(folder / "exports/adapter", "adapter", four_bits=True)
    kinds = {type(module).__module__ for module in network.modules()}
    assert "bitsandbytes.nn.modules" in kinds and "peft.tuners.lora.bnb" in kinds
    plain, _ = read_plain(folder / "exports/adapter", "adapter")
    ids = torch.arange(3, 30)[None]
    own = load_model(str(folder / "model")).network
    with torch.no_grad(), decoding_network(own):
        ours = own(input_ids=ids).logits
        theirs = network(input_ids=ids).logits
        over_another = plain(input_ids=ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(ours, over_another, atol=1e-2)


def test_killed_it_goes_on_to_the_bit(work):
    """Over rows that cut blocks, too: the base of `work` is 32 wide."""
    path = write_recipe(work, qlora(export=["adapter"]))
    whole = go(path, out=work / "whole")
    assert any("not whole blocks" in event.text for event in whole[2].of("notice"))
    assert whole[0].data["exports"][0]["parity"]["problem"] == ""

    def until_the_fifth_update():
        updates = []

        def die(event):
            updates.append(event.kind == "update")
            if sum(updates) == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        run(load_recipe(path), out=work / "killed", listeners=[die])

    assert in_a_child(until_the_fifth_update) == -9
    _, folder, heard = go(path, out=work / "killed")
    assert 0 < heard.updates() < 6
    assert metrics(folder / "01-sft") == metrics(whole[1] / "01-sft")
    assert weights(folder) == weights(whole[1])


def test_the_dense_copy_is_made_where_it_fits():
    made = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, vocab_size=10))
    quantise(made)
    model = SimpleNamespace(network=made, config=made.config)
    copied = 32 * 7 * 64 * 64 * 2  # q, k, v, o and the three of the MLP in 32 layers, bf16
    weights = 32 * 7 * nf4_bytes(64 * 64) + 2 * (2 * 10 * 64 + 65 * 64)  # two norms a layer, one
    lasting = weights + 20 * 1000 + 5000  # a trained number: itself, reference, gradient, moments
    room = lasting + copied
    assert settle_decoding(model, "bf16", 1000, 5000, room) is False
    assert settle_decoding(model, "bf16", 1000, 5000, room - 1) is True
    assert settle_decoding(model, "bf16", 1000, 5000, room - 1, earlier=False) is False
    assert forecast_keys(model, "bf16", True)["decoding_bytes"] == 0
    assert forecast_keys(model, "bf16", False)["decoding_bytes"] == copied


def test_short_of_memory_evaluations_decode_in_place(wide, once, monkeypatch):
    """The same scores and verdicts without a dense copy; a later start keeps to that."""
    ample, folder = once
    assert read(folder / "plan.json")["model"]["decodes_in_place"] is False
    path = write_recipe(wide, qlora(export="adapter"))
    monkeypatch.setattr(planning, "settle_decoding", lambda *_: True)
    copies = []
    monkeypatch.setattr(decode, "LeanNetwork", lambda *_: copies.append(1))
    short, folder, _ = go(path, out=wide / "short")
    assert not copies
    assert read(folder / "plan.json")["model"]["decodes_in_place"] is True
    assert read(folder / "plan.json")["stages"][0]["memory"]["decoding"] == 0
    ours, theirs = (
        {gate["name"]: gate for gate in one.stages[0]["gates"]} for one in (short, ample)
    )
    assert {name: gate["verdict"] for name, gate in ours.items()} == {
        name: gate["verdict"] for name, gate in theirs.items()
    }
    # The texts that forgetting is measured on are sampled: a last bit can change a letter.
    assert ours.pop("forgetting") and theirs.pop("forgetting") and ours == theirs
    assert short.data["exports"][0]["parity"]["problem"] == ""
    monkeypatch.undo()
    go(path, out=wide / "short")
    assert read(folder / "plan.json")["model"]["decodes_in_place"] is True


def test_what_four_bits_rule_out_is_refused(work):
    mixed = qlora()
    mixed["stages"].append({"sft": stage("chats", adapter={"kind": "lora"}, fold_parent=True)})
    mixed["stages"].append({"sft": stage("chats", adapter="none", fold_parent=True)})
    mixed["stages"][0]["sft"]["precision"] = "fp8"
    with pytest.raises(RecipeError) as refused:
        load_recipe(write_recipe(work, mixed | {"export": ["fp8"]}))
    said = str(refused.value)
    assert said.count("qlora, as in the other stages") == 2
    assert "fp32 with qlora" in said and "rounded once already" in said and "fold_parent" in said
    tiny = qlora(model="tiny:100k", template="chatml")
    tiny["stages"][0]["sft"]["adapter"] = {"kind": "qlora"}
    with pytest.raises(RecipeError, match="no trained weights that an adapter"):
        load_recipe(write_recipe(work, tiny))


def test_a_base_that_is_quantised_already_is_refused(wide):
    config = read(wide / "base/config.json")
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (wide / "base/config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"not quantised yet, for qlora.*'gptq'"):
        go(write_recipe(wide, qlora()))


def test_without_bitsandbytes_nothing_is_read_and_the_remedy_is_named(wide, monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=r"pip install 'lehr\[quant\]'"):
        go(write_recipe(wide, qlora()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_codes_are_those_of_the_files_numbers(wide, precision, stored):
    path = wide / "base"
    load_model(str(path)).save_merged(path, stored)
    exact = load_model(str(path))  # fp32: every number of the files
    exact_codes = exact.network.model.layers[0].mlp.up_proj.weight.detach()
    model = load_model(str(path), precision=precision, four_bits=True)
    layer = model.network.model.layers[0].mlp.up_proj
    assert isinstance(layer, Nf4Linear) and layer.dtype == model.compute_dtype
    assert torch.equal(layer.quantised.packed, Nf4Weight.of(exact_codes).packed)
    assert {one.dtype for one in model.network.parameters()} == {model.compute_dtype}
    assert why_not_lean(model.network) == ""


def test_the_forecast_counts_four_bits(work):
    write_data(work)
    found = plan(load_recipe(write_recipe(work, qlora())), out=work / "planned")
    memory = found.plan["stages"][0]["memory"]
    plain = plan(
        load_recipe(write_recipe(work, qlora()), ["adapter.kind=lora"]), out=work / "plain"
    ).plan["stages"][0]["memory"]
    # Two layers of q, k, v, o (32 wide, one key head of 16) and of the three of the MLP.
    numbers = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    width = plain["weights"] // found.plan["model"]["parameters"]
    assert plain["weights"] - memory["weights"] == pytest.approx(
        numbers * (width - 0.516), rel=0.01
    )
    assert memory["dequantised"] == 64 * 32 * width and "dequantised" not in plain
    assert found.plan["model"]["four_bits"] == "nf4"
    assert "**QLoRA, rank 4**" in found.strategy and "in four bits" in found.strategy
