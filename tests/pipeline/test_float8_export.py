"""An FP8 export: codes within half a step, a documented file, its harm measured and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.families import model_of

from lehr.data.shapes import Encoded, Origin
from lehr.errors import RecipeError
from lehr.pipeline import float8_export
from lehr.pipeline.float8_export import measure, quantize_rows, read, write


class NoTokenizer:
    def save_pretrained(self, _folder: str) -> None:
        """Nothing is written: the network is what is checked here."""


@pytest.fixture(scope="module")
def model() -> Any:
    # Four heads of keys: narrower ones would be smaller than the recipe takes.
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    made = model_of("Llama", num_hidden_layers=4, **shape)
    made.tokenizer = NoTokenizer()
    return made


@pytest.fixture(scope="module")
def sequences() -> list[Encoded]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(24):
        ids = torch.randint(3, 97, (20,), generator=generator)
        supervised = torch.arange(20) >= 8
        found.append(Encoded(ids, supervised, Origin("text", "text", number)))
    return found


@pytest.fixture
def exported(model: Any, tmp_path: Path) -> Path:
    write(tmp_path / "fp8", model, torch.float32)
    return tmp_path / "fp8"


def test_a_row_keeps_its_largest_value_and_half_a_step_elsewhere() -> None:
    generator = torch.Generator().manual_seed(1)
    spread = torch.logspace(-6, 6, 32)[:, None]
    weight = torch.randn(32, 64, generator=generator) * spread
    weight[5] = 0.0
    codes, scale = quantize_rows(weight)
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (32, 1)
    assert scale.dtype == torch.bfloat16 and bool(scale.float().gt(0).all())
    back = codes.float() * scale.float()
    assert bool(back.isfinite().all()) and not back[5].any()
    # Half a step of a normal value is 2^-4 of it, of a subnormal half of 2^-9 scales.
    room = torch.maximum(weight.abs() * 2**-4, scale.float() * 2**-10)
    assert bool(((back - weight).abs() <= room * 1.0001).all())
    with pytest.raises(ValueError, match="not finite"):
        quantize_rows(torch.tensor([[1.0, float("inf")]]))


def test_known_fault_a_scale_that_is_rounded_down_saturates() -> None:
    """bf16 keeps 8 bits: a scale rounded to nearest can be too small for its row's largest."""
    weight = torch.linspace(1.0, 2.0, 257)[:, None]
    codes, scale = quantize_rows(weight)
    assert bool((weight / scale.float() <= 448.0).all())
    nearest = (weight / 448.0).to(torch.bfloat16)
    assert bool((weight / nearest.float() > 448.0).any()), "what rounding to nearest would do"
    assert bool(((codes.float() * scale.float() - weight).abs() <= weight * 2**-4).all())


def test_the_file_is_as_documented(exported: Path, model: Any) -> None:
    tensors = load_file(exported / "model.safetensors")
    codes = [name for name, one in tensors.items() if one.dtype == torch.float8_e4m3fn]
    assert len(codes) == 2 * 7, "the seven layers of the two inner blocks"
    assert all(".layers.1." in name or ".layers.2." in name for name in codes)
    assert {f"{name}_scale" for name in codes} <= set(tensors)
    config = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert "lm_head" in config["ignore"] and "model.layers.0.mlp.up_proj" in config["ignore"]
    assert not set(config["ignore"]) & {name.removesuffix(".weight") for name in codes}
    network, layers = read(exported)
    assert layers == 14
    live = dict(model.network.named_parameters())
    for name, value in network.named_parameters():
        kept = f"{name}" not in codes
        assert torch.equal(value, live[name]) == kept, name


def test_a_good_export_passes_and_its_numbers_are_strict_json(
    exported: Path, model: Any, sequences: list[Encoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOSS_LIMIT_NATS", "KL_LIMIT_NATS", "FLIP_LIMIT"):
        monkeypatch.setattr(float8_export, name, 0.5)
    found = measure(model, exported, sequences)
    assert found.problem == "" and found.layers == 14 and found.positions == 24 * 19
    assert 0 < found.kl[0] < 0.5 and found.loss[1] < found.loss[0] < found.loss[2]
    assert found.loss_after - found.loss_before == pytest.approx(found.loss[0], abs=1e-9)
    row = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert row["cast"] is True and row["problem"] == "" and row["limits"]["kl"] == 0.5


def test_known_fault_a_wrong_scale_is_refused_with_the_numbers(
    exported: Path, model: Any, sequences: list[Encoded]
) -> None:
    tensors = load_file(exported / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    from safetensors.torch import save_file

    save_file(tensors | {name: tensors[name] * 4}, exported / "model.safetensors")
    found = measure(model, exported, sequences)
    assert "KL +" in found.problem and "above limit 0.02" in found.problem


def test_what_cannot_be_measured_or_read_is_refused(
    exported: Path, model: Any, sequences: list[Encoded]
) -> None:
    with pytest.raises(RecipeError, match="at least two held-out sequences"):
        measure(model, exported, sequences[:1])
    config = json.loads((exported / "config.json").read_text())
    del config["quantization_config"]
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="an FP8 export of lehr"):
        read(exported)
    small = model_of("Llama", num_hidden_layers=2, hidden_size=64)
    with pytest.raises(RecipeError, match="export fp8: expected a model of three blocks"):
        float8_export.chosen_layers(small.network)
