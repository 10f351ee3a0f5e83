"""Which layers compute in FP8: exact lists, refused patterns, shapes by target device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lehr.errors import RecipeError
from lehr.training.float8_convert import convert
from lehr.training.float8_linear import FLOAT8_CLASSES
from lehr.training.float8_recipe import (
    Float8Settings,
    HealthLimits,
    LayerChoice,
    select,
    shape_reason,
)


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)


class Network(nn.Module):
    """Tied embedding and head, four blocks."""

    def __init__(self, width: int = 64, inner: int = 128, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.to_words = nn.Linear(width, 32, bias=False)
        self.to_words.weight = self.embed.weight


def layers_of(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear}


def verdicts(model: nn.Module, device: str = "cpu", **changes) -> dict[str, str]:
    settings = Float8Settings(**changes)
    return {c.name: c.reason for c in select(model, settings, layers_of(model), device)}


def test_the_selective_recipe_by_default() -> None:
    assert verdicts(Network()) == {
        "layers.0.up": "in the first block",
        "layers.0.down": "in the first block",
        "layers.1.up": "",
        "layers.1.down": "",
        "layers.2.up": "",
        "layers.2.down": "",
        "layers.3.up": "in the last block",
        "layers.3.down": "in the last block",
        "to_words": "the head",
    }


def test_small_sides_and_kept_names() -> None:
    found = verdicts(Network(), keep=("layers.1.*", "layers.2.up"))
    assert [name for name, reason in found.items() if not reason] == ["layers.2.down"]
    assert found["layers.1.up"] == "named in keep"
    with pytest.raises(RecipeError, match="a side is below 65"):
        verdicts(Network(), smallest_features=65, keep_first_blocks=0, keep_last_blocks=0)


def test_explicit_names_are_exact_and_override_the_defaults() -> None:
    found = verdicts(Network(width=8, inner=24), convert=("layers.0.up", "down"))
    converted = [name for name, reason in found.items() if not reason]
    assert converted == [
        "layers.0.up", "layers.0.down", "layers.1.down", "layers.2.down", "layers.3.down",
    ]  # fmt: skip
    assert found["to_words"] == "not named in convert"


@pytest.mark.parametrize("key", ["convert", "keep"])
def test_unmatched_names_are_refused_with_close_ones(key) -> None:
    with pytest.raises(RecipeError, match=rf"fp8\.{key}.*down.*found 'dwn'") as error:
        verdicts(Network(), **{key: ("dwn", "up", "qkv")})
    assert len(error.value.problems) == 2


def test_contradictions_are_refused() -> None:
    with pytest.raises(RecipeError, match="not of both"):
        verdicts(Network(), convert=("up",), keep=("layers.1.up",))
    with pytest.raises(RecipeError, match="at least one layer in FP8"):
        verdicts(Network(blocks=2))
    with pytest.raises(RecipeError, match="no linear layer"):
        select(nn.LayerNorm(3), Float8Settings(), {})


def test_a_plain_chain_has_one_block_per_layer() -> None:
    chain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    found = verdicts(chain)
    assert [name for name, reason in found.items() if not reason] == ["1", "2"]


def test_experts_inside_a_block_are_no_blocks() -> None:
    model = Network()
    for block in model.layers:
        block.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
    found = verdicts(model)
    assert found["layers.1.experts.0"] == "" and found["layers.0.experts.7"] != ""


def test_shapes_follow_the_target_device_not_this_one() -> None:
    model = nn.Sequential(*[nn.Linear(72, 72) for _ in range(3)], nn.Linear(72, 64))
    products = {"backend": "scaled_mm", "keep_first_blocks": 0, "keep_last_blocks": 0}
    assert set(verdicts(model, "cpu", **products).values()) == {""}
    with pytest.raises(RecipeError, match="multiples of 16 on cuda"):
        verdicts(model, "cuda", **products)
    model.append(nn.Linear(64, 64))
    found = verdicts(model, "cuda", **products)
    assert found["0"].startswith("both sides") and found["4"] == ""
    with pytest.raises(RecipeError, match=r"0 \[72 x 72\]"):
        verdicts(model, "cuda", backend="scaled_mm", convert=("0", "4"))
    assert shape_reason(30, 8, Float8Settings(), "cuda") == ""  # emulated: any shape anywhere


@pytest.mark.parametrize(
    ("changes", "device", "capability", "message"),
    [
        ({"scaling": "tensor"}, "cpu", None, "current, delayed, block"),
        ({"forward_format": "e4m3fn"}, "cpu", None, "e4m3, e5m2"),
        ({"gradient_format": "bf16"}, "cpu", None, "e4m3, e5m2"),
        ({"backend": "torchao"}, "cpu", None, "emulated, scaled_mm"),
        ({"window": 0}, "cpu", None, "at least 1"),
        ({"margin": -1}, "cpu", None, "at least 0"),
        ({"margin": True}, "cpu", None, "at least 0"),
        ({"measure_every": 0}, "cpu", None, "at least 1"),
        ({"convert": ()}, "cpu", None, "at least one pattern"),
        ({"limits": HealthLimits(patience=0)}, "cpu", None, "at least 1"),
        ({"limits": HealthLimits(underflow=1.5)}, "cpu", None, "from 0 to 1"),
        ({"limits": HealthLimits(saturation=math.nan)}, "cpu", None, "from 0 to 1"),
        ({"limits": HealthLimits(sqnr_db=math.nan)}, "cpu", None, "decibels"),
        ({"backend": "scaled_mm"}, "cuda", (8, 0), "SM 8.9"),
        ({"backend": "scaled_mm"}, "cuda", None, "SM 8.9"),
        ({"backend": "scaled_mm"}, "mps", None, "emulated on mps"),
        ({"backend": "scaled_mm", "scaling": "block"}, "cuda", (9, 0), "one scale a tensor"),
        ({"backend": "scaled_mm", "forward_format": "e5m2"}, "cuda", (9, 0), "E5M2 by E5M2"),
    ],
)
def test_bad_settings_are_refused_and_change_nothing(changes, device, capability, message) -> None:
    model = Network()
    with pytest.raises(RecipeError, match=message):
        convert(model, Float8Settings(**changes), device, capability)
    assert not any(type(m) in FLOAT8_CLASSES.values() for m in model.modules())


def test_good_hardware_is_taken() -> None:
    for capability in ((8, 9), (9, 0), (12, 0)):
        assert Float8Settings(backend="scaled_mm").problems("cuda", capability) == []
    assert Float8Settings().problems("cuda", (7, 0)) == []


def test_the_list_reads_well() -> None:
    assert str(LayerChoice("a.up", 64, 128, "")) == "a.up [128 x 64] fp8"
    assert str(LayerChoice("a.up", 64, 128, "the head")).endswith("high precision: the head")
    lines = str(convert(Network(), Float8Settings())).split("\n")
    assert lines[0] == "FP8 in 4 of 9 linear layers" and len(lines) == 10


def test_a_head_that_only_the_network_names_is_kept() -> None:
    class WithHead(Network):
        def __init__(self) -> None:
            super().__init__()
            self.to_words.weight = nn.Parameter(torch.zeros(32, 64))

        def get_output_embeddings(self) -> nn.Module:
            return self.to_words

    assert verdicts(WithHead(), smallest_features=1)["to_words"] == "the head"
