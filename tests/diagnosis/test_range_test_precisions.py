"""The range test moves the weights as the run would: FP8 layers, a loss scale, bf16 weights."""

import pytest
import torch
from small_runs import Cycle, NextToken, Small, merge_packs, rows, weights_hash
from torch import nn

from lehr.diagnosis.gradient_check import check_gradient
from lehr.diagnosis.learning_rate_finder import find_learning_rate
from lehr.training import bf16_weights, float8_linear
from lehr.training.float8_recipe import Float8Settings
from lehr.training.loss_scale import LossScaleSettings
from lehr.training.settings import EngineSettings

CASES = {
    "fp16": {"loss_scale": LossScaleSettings(init=2.0**24)},  # overflows at first
    "fp8": {
        "fp8": Float8Settings(smallest_features=1, keep_first_blocks=0, convert=("up",)),
    },
    "pure_bf16": {"stochastic_rounding": True},
}


@pytest.mark.parametrize("precision", CASES)
def test_the_precision_of_the_run_is_tested_and_nothing_stays(precision, monkeypatch):
    used = {"rounded": 0, "fp8": 0}

    def counted(owner, name, key):
        real = getattr(owner, name)

        def call(*args, **keys):
            used[key] += 1
            return real(*args, **keys)

        monkeypatch.setattr(owner, name, call)

    counted(bf16_weights.Bf16Weights, "step", "rounded")
    counted(float8_linear.LayerFloat8, "forget", "fp8")
    model = Small(dropout=0.0)
    if precision == "pure_bf16":
        model = model.bfloat16()
    before, classes = state(model), [type(one) for one in model.modules()]
    settings = EngineSettings(
        updates=5, learning_rate=0.1, precision=precision, micro_batch=2, **CASES[precision]
    )
    found = find_learning_rate(
        model, NextToken(), Cycle(rows(13), 5), settings, ("t",), merge=merge_packs, low=1e-3,
        steps=40,
    )  # fmt: skip
    assert found.recommended is not None and min(found.changes) < -0.1
    assert used["rounded"] == (len(found.changes) if precision == "pure_bf16" else 0)
    assert (used["fp8"] > len(found.changes)) == (precision == "fp8")
    assert state(model) == before and [type(one) for one in model.modules()] == classes


@pytest.mark.parametrize("precision", ["fp8", "pure_bf16"])
def test_the_gradient_is_checked_in_every_precision(precision):
    model: nn.Module = Small(dropout=0.0)
    if precision == "pure_bf16":
        model = model.bfloat16()
    before = state(model)
    assert check_gradient(model, NextToken(), rows(2), precision).ok
    assert state(model) == before


def state(model: nn.Module) -> str:
    wide = Small()
    wide.load_state_dict({name: one.float() for name, one in model.state_dict().items()})
    return weights_hash(wide) + str({one.dtype for one in model.parameters()} & {torch.bfloat16})
