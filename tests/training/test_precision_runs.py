"""Whole runs of the engine in fp16, FP8 and pure bf16: what moves, what is said, what resumes."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import pytest
import torch
from small_runs import NextToken, Small, lines_of, make_engine, weights_hash
from torch import nn

from lehr.errors import Diverged, RecipeError
from lehr.objectives.base import Loss
from lehr.training import events
from lehr.training.averaging import AverageSettings
from lehr.training.bf16_weights import Bf16Weights
from lehr.training.float8_linear import Float8Linear
from lehr.training.float8_recipe import Float8Settings, HealthLimits
from lehr.training.loss_scale import LossScaleSettings
from lehr.training.precision import hardware_problems
from lehr.training.schedules import Schedule

FP8 = Float8Settings(
    keep_first_blocks=0, keep_last_blocks=0, smallest_features=1, convert=("up", "head")
)
FP16 = {"precision": "fp16", "loss_scale": LossScaleSettings(2.0**8, growth_interval=3)}
PRECISIONS: dict[str, dict[str, Any]] = {
    # The scale starts too high and grows into overflow again and again.
    "fp16": {
        "precision": "fp16",
        "loss_scale": LossScaleSettings(2.0**22, growth_interval=1),
        "ema": AverageSettings(0.9),
    },
    "fp8 current": {"precision": "fp8", "fp8": FP8, "ema": AverageSettings(0.9)},
    "fp8 delayed": {
        "precision": "fp8",
        "fp8": Float8Settings(
            scaling="delayed",
            window=3,
            measure_every=2,
            convert=("up", "head"),
            limits=HealthLimits(sqnr_db=27.0, patience=2),  # E5M2 has less: layers fall back
        ),
    },
    "pure_bf16": {"precision": "pure_bf16", "stochastic_rounding": True},
    "pure_bf16 nearest": {"precision": "pure_bf16"},
}


def model_for(keys: dict[str, Any]) -> Small:
    model = Small()
    return model.bfloat16() if keys["precision"] == "pure_bf16" else model


def bits(model: nn.Module) -> str:
    return weights_hash(model.float())


@pytest.mark.parametrize("name", PRECISIONS)
def test_stopped_after_any_update_is_the_run_without_a_stop(tmp_path, name):
    keys = PRECISIONS[name]
    straight = tmp_path / "straight"

    def copy(event: Any) -> None:
        if isinstance(event, events.CheckpointWritten):
            shutil.copytree(straight, tmp_path / f"at-{event.update}")

    engine = make_engine(straight, 8, model=model_for(keys), observers=[copy], **keys)
    try:
        engine.run()
    except Diverged:  # every layer left FP8: also that must come again
        assert name == "fp8 delayed"
    rows = lines_of(straight)
    for at in range(1, rows[-1]["update"]):
        seen: list[Any] = []
        folder = tmp_path / f"at-{at}"
        resumed = make_engine(folder, 8, model=model_for(keys), observers=[seen.append], **keys)
        try:
            assert resumed.run().resumed_from == at
        except Diverged:
            assert name == "fp8 delayed"
        assert lines_of(folder) == rows, at
        assert bits(resumed.model) == bits(engine.model)
        assert not any(isinstance(event, events.ResumeInexact) for event in seen)
    if name == "fp16":
        assert any(row["skipped"] for row in rows[3:]), "the scale was lowered in mid-run too"
    if name == "fp8 delayed":
        assert rows[-1]["fp8.layers"] < 2


# -- fp16 ---------------------------------------------------------------------


def test_an_overflow_moves_nothing_and_counts_against_no_limit(tmp_path):
    seen: list[Any] = []
    engine = make_engine(
        tmp_path,
        6,
        observers=[seen.append],
        precision="fp16",
        loss_scale=LossScaleSettings(2.0**24, growth_interval=1000),
        schedule=Schedule("constant", warmup=4),
        ema=AverageSettings(0.9),
        nonfinite_limit=1,
    )
    engine.run()
    rows = lines_of(tmp_path)
    lowered = [event for event in seen if isinstance(event, events.ScaleLowered)]
    skipped = [row for row in rows if row["skipped"]]
    assert len(lowered) == len(skipped) >= 3
    assert [row["loss_scale"] for row in skipped] == [2.0 ** (24 - n) for n in range(len(skipped))]
    assert [event.next for event in lowered] == [event.used / 2 for event in lowered]
    assert rows[-1]["loss_scale_skips"] == len(skipped)
    applied = [row for row in rows if not row["skipped"]]
    assert [row["update"] for row in applied] == [1, 2, 3, 4, 5, 6]
    warm = [0.05 * min(1, (n + 1) / 4) for n in range(6)]
    assert [row["learning_rate"] for row in applied] == pytest.approx(warm), "the clock of applied"
    state = engine._optimizer.state[engine.model.head.weight]
    assert int(state["step"]) == 6
    assert engine._average is not None and engine._average.count == 6


def test_norm_and_clip_see_true_gradients(tmp_path):
    rows = {}
    for name, keys in (("fp32", {}), ("fp16", FP16)):
        model = Small(dropout=0.0)
        make_engine(tmp_path / name, 3, model=model, clip=0.1, **keys).run()
        rows[name] = lines_of(tmp_path / name)
    for one, other in zip(rows["fp32"], rows["fp16"], strict=True):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.02)
        assert other["loss"] == pytest.approx(one["loss"], abs=0.02)


class Root(NextToken):
    """A loss that is finite, with a gradient that is not, at one tensor."""

    def loss(self, model: nn.Module, pack: Any) -> Loss:
        good = super().loss(model, pack)
        return Loss(good.total + torch.sqrt(model.up.bias.square().sum() * 0), good.metrics)


def test_at_the_floor_the_run_stops_with_the_tensors_name(tmp_path):
    loss_scale = LossScaleSettings(8.0)
    with pytest.raises(Diverged, match=r"gradient of up\.bias: .*smallest loss scale \(1\)"):
        make_engine(tmp_path, 6, objective=Root(), precision="fp16", loss_scale=loss_scale).run()
    rows = lines_of(tmp_path)
    assert [row["loss_scale"] for row in rows] == [8, 4, 2, 1]
    assert all(row["skipped"] and row["update"] == 0 for row in rows)


class Poison(NextToken):
    """The second forward pass gives NaN: no scale would help."""

    def loss(self, model: nn.Module, pack: Any) -> Loss:
        good = super().loss(model, pack)
        return Loss(good.total * (math.nan if self.calls == 2 else 1.0), good.metrics)


def test_a_loss_that_is_not_finite_is_no_overflow(tmp_path):
    seen: list[Any] = []
    make_engine(tmp_path, 3, objective=Poison(), observers=[seen.append], **FP16).run()
    rows = lines_of(tmp_path)
    assert [row["skipped"] for row in rows] == [True, False, False, False]
    assert rows[1]["loss_scale"] == rows[0]["loss_scale"] and rows[-1]["loss_scale_skips"] == 0
    assert sum(isinstance(event, events.NonFinite) for event in seen) == 1


class PoisonedAt(NextToken):
    """One forward pass gives NaN; before it the loss scale overflows."""

    def loss(self, model: nn.Module, pack: Any) -> Loss:
        good = super().loss(model, pack)
        return Loss(good.total * (math.nan if self.calls == 5 else 1.0), good.metrics)


def test_an_overflow_is_no_step_towards_the_limit(tmp_path):
    """Attempt 1 overflows, attempt 2 (passes 4 to 6) is NaN: one in a row, not two."""
    scale = LossScaleSettings(2.0**24, growth_interval=1000)
    engine = make_engine(
        tmp_path, 2, objective=PoisonedAt(), nonfinite_limit=2, precision="fp16", loss_scale=scale
    )
    engine.run()
    rows = lines_of(tmp_path)
    assert [row["skipped"] for row in rows[:2]] == [True, True]
    assert [row["loss_scale_skips"] for row in rows[:2]] == [1, 1]
    assert rows[1]["loss_scale"] == rows[2]["loss_scale"] == 2.0**23
    assert rows[-1]["update"] == 2


# -- FP8 ----------------------------------------------------------------------


def test_layers_are_listed_first_and_given_back_last(tmp_path):
    seen: list[Any] = []
    inside: list[tuple[type, bool]] = []
    model = Small()

    def evaluate(update: int) -> dict[str, float]:
        inside.append((type(model.up), model.up.float8.active))
        return {"loss": 1.0}

    make_engine(
        tmp_path, 4, model=model, observers=[seen.append], evaluate=evaluate,
        precision="fp8", fp8=FP8,
    ).run()  # fmt: skip
    assert isinstance(seen[0], events.Float8Converted) and seen[0].backend == "emulated"
    assert seen[0].layers == ("up", "head")
    assert "up [16 x 8] fp8" in seen[0].choices
    assert inside == [(Float8Linear, False)], "evaluations see what is saved: no FP8"
    assert type(model.up) is nn.Linear and not hasattr(model.up, "float8")
    rows = lines_of(tmp_path)
    assert [row["fp8.layers"] for row in rows] == [2] * 4
    assert ["fp8.worst_sqnr_db" in row for row in rows] == [True, False, False, False]


def test_fp8_computes_something_else_than_bf16(tmp_path):
    for name, keys in (("bf16", {"precision": "bf16"}), ("fp8", PRECISIONS["fp8 current"])):
        make_engine(tmp_path / name, 3, **keys).run()
    bf16, fp8 = ([row["loss"] for row in lines_of(tmp_path / n)] for n in ("bf16", "fp8"))
    assert fp8 != bf16 and fp8 == pytest.approx(bf16, abs=0.05)


def test_a_sick_layer_falls_back_with_an_event(tmp_path):
    sick = HealthLimits(sqnr_db=27.0, patience=1)  # of E4M3 29 and more, of E5M2 less
    fp8 = Float8Settings(measure_every=1, convert=("up", "head"), limits=sick)
    seen: list[Any] = []
    with pytest.raises(Diverged, match="healthy in FP8"):
        make_engine(tmp_path, 9, observers=[seen.append], precision="fp8", fp8=fp8).run()
    assert lines_of(tmp_path)[-1]["fp8.layers"] == 0
    seen.clear()
    model = Small()
    with torch.no_grad():
        model.up.weight[0, 0] = 1e6  # one outlier: the others are flushed to 0
    fp8 = Float8Settings(measure_every=1, convert=("up", "head"), limits=HealthLimits(patience=2))
    engine = make_engine(
        tmp_path / "b", 4, model=model, observers=[seen.append], precision="fp8", fp8=fp8
    )
    engine.run()
    fell = [event for event in seen if type(event).__name__ == "LayerFellBack"]
    assert [(event.layer, event.operand, event.update) for event in fell] == [("up", "weight", 2)]
    assert [row["fp8.layers"] for row in lines_of(tmp_path / "b")] == [2, 1, 1, 1]


# -- pure bf16 ----------------------------------------------------------------


def pure(folder: Any, learning_rate: float, stochastic: bool) -> tuple[Small, list[Any]]:
    model = Small(dropout=0.0).bfloat16()
    make_engine(
        folder, 20, model=model, precision="pure_bf16", stochastic_rounding=stochastic,
        learning_rate=learning_rate, schedule=Schedule("constant", warmup=0),
    ).run()  # fmt: skip
    return model, lines_of(folder)


def test_small_updates_are_lost_by_rounding_to_nearest_and_arrive_by_chance(tmp_path):
    """AdamW moves each weight by about 1e-4, below 2⁻⁹ of all weights above 0.05."""
    start = Small(dropout=0.0).bfloat16()
    nearest, rows = pure(tmp_path / "nearest", 1e-4, stochastic=False)
    assert rows[0]["bf16.lost_updates"] > 0.8 and rows[0]["bf16.update_arrived"] < 0.3
    large = start.head.weight.abs() > 0.05
    assert torch.equal(nearest.head.weight[large], start.head.weight[large])
    chance, rows = pure(tmp_path / "chance", 1e-4, stochastic=True)
    assert rows[0]["bf16.lost_updates"] > 0.8
    arrived = [row["bf16.update_arrived"] for row in rows if "bf16.update_arrived" in row]
    assert len(arrived) == 3, "the first update, and every tenth"
    assert sum(arrived) / 3 == pytest.approx(1, abs=0.4)
    assert not torch.equal(chance.head.weight[large], start.head.weight[large])
    again, _ = pure(tmp_path / "again", 1e-4, stochastic=True)
    assert bits(again) == bits(chance), "the stream is named by seed, update and tensor"


def test_each_update_and_each_tensor_rounds_by_its_own_stream():
    half_way = torch.full((64,), 1 + 2.0**-8)  # up or down with probability 1/2
    weights = Bf16Weights({"a": nn.Parameter(half_way.bfloat16())}, True, (0, "stage"))
    first = weights._rounded(half_way, 1, "a")
    assert torch.equal(first, weights._rounded(half_way, 1, "a"))
    assert not torch.equal(first, weights._rounded(half_way, 2, "a"))
    assert not torch.equal(first, weights._rounded(half_way, 1, "b"))
    assert set(first.tolist()) == {1.0, 1 + 2.0**-7}


def test_a_large_update_is_the_fp32_optimizers_rounded_once(tmp_path):
    model = Small(dropout=0.0)
    start = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
    make_engine(
        tmp_path, 1, model=model.bfloat16(), precision="pure_bf16", learning_rate=0.5,
        schedule=Schedule("constant", warmup=0), clip=None,
    ).run()  # fmt: skip
    moved = model.head.bias.detach().float() - start["head.bias"].float()
    # The first step of Adam is the rate times the gradient's sign.
    assert moved.abs() == pytest.approx(torch.full_like(moved, 0.5), rel=2**-7)
    assert model.head.bias.dtype == torch.bfloat16


# -- refusals -----------------------------------------------------------------


def problems_of(folder: Any, **keys: Any) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        make_engine(folder, 3, **keys)
    return {problem.where: problem.expected for problem in caught.value.problems}


def test_contradictions_are_refused_together_before_anything_is_written(tmp_path):
    folder = tmp_path / "new"
    assert "precision: bf16" in problems_of(folder, precision="fp16")["loss_scale"]
    found = problems_of(
        folder, precision="bf16", loss_scale=LossScaleSettings(), fp8=FP8, stochastic_rounding=True
    )
    assert set(found) == {"loss_scale", "fp8", "stochastic_rounding"}
    found = problems_of(folder, precision="pure_bf16", ema=AverageSettings())
    assert set(found) == {"ema"}
    assert set(problems_of(folder, precision="pure_bf16")) == {
        name for name, _ in Small().named_parameters()
    }, "fp32 tensors are not cast silently"
    assert not folder.exists()


def test_patterns_and_shapes_are_refused_before_update_1(tmp_path):
    engine = make_engine(tmp_path, 3, precision="fp8", fp8=Float8Settings(convert=("middle",)))
    with pytest.raises(RecipeError, match=r"fp8\.convert.*middle"):
        engine.run()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_hardware_that_cannot_do_it():
    def found(*arguments: Any) -> list[str]:
        return [problem.where for problem in hardware_problems(*arguments)]

    assert found("fp8", None, "cuda", (8, 0)) == ["fp8.backend"]
    assert found("fp8", Float8Settings(backend="emulated"), "cuda", (8, 0)) == []
    assert found("fp8", None, "cuda", (9, 0)) == found("fp8", None, "cpu") == []
    assert found("pure_bf16", None, "cuda", (7, 0)) == ["precision"]
    assert found("fp16", None, "cuda", (7, 0)) == []


def test_weights_of_another_dtype_at_resume_are_refused(tmp_path):
    folder = tmp_path / "run"
    keys = PRECISIONS["pure_bf16"]
    make_engine(folder, 2, model=model_for(keys), **keys).run()
    with pytest.raises(RecipeError, match=r"torch\.float32.*--fresh"):
        make_engine(folder, 4).run()
    other = tmp_path / "other"
    make_engine(other, 2).run()
    with pytest.raises(RecipeError, match=r"checkpoint of fp16.*no loss_scale in it"):
        make_engine(other, 4, **FP16).run()


def test_the_scale_stands_in_the_checkpoint(tmp_path):
    make_engine(tmp_path, 3, **FP16).run()
    newest = sorted((tmp_path / "checkpoints").glob("update-*"))[-1]
    text = "".join(path.read_text() for path in newest.glob("*.json"))
    assert json.dumps({"scale": 512.0, "good_updates": 0, "skips": 0})[1:-1] in " ".join(
        text.split()
    )
