"""The decisive tests: each confirms a fault that is planted, and withdraws it where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.small import go, stage, weights_recipe, write_data, write_recipe

from lehr.cli.main import main
from lehr.diagnosis import decisive_tests as tests
from lehr.diagnosis.decisive import Answer, Desk, timed
from lehr.diagnosis.doctor import Diagnosis, Finding
from lehr.errors import RecipeError
from lehr.objectives.base import Loss, Objective
from lehr.objectives.language import Language
from lehr.pipeline import branches, deciding
from lehr.pipeline.deciding import GENERAL, desk_of, run_tests
from lehr.pipeline.events import Events
from lehr.pipeline.planning import prepare
from lehr.pipeline.stage_run import train_stage
from lehr.recipe.loading import load_recipe
from lehr.stages.context import StageContext
from lehr.training import store
from lehr.training.optimizers import GroupRule

pytestmark = pytest.mark.usefixtures("lean")


def recipe(**keys: Any) -> dict[str, Any]:
    found = weights_recipe(gates="none", export="merged")
    more = {"learning_rate": 3e-3, "max_updates": 20, "precision": "fp32"}
    found["stages"] = [{"sft": stage("chats", **(more | keys))}]
    del found["data"]["text"]
    return found


@dataclass
class Bench:
    """A stage of a tiny model, from its beginning."""

    desk: Desk
    context: StageContext
    objective: Objective
    folder: Path

    def ask(self, name: str, **changes: Any) -> Answer:
        return timed(tests.TESTS[name], replace(self.desk, **changes))

    def settings(self, **changes: Any) -> dict[str, Any]:
        return {"settings": replace(self.desk.settings, **changes)}

    @property
    def layer(self) -> Any:
        return self.desk.model.network.model.layers[0]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    work = tmp_path_factory.mktemp("bench")
    write_data(work)
    prepared = prepare(load_recipe(write_recipe(work, recipe())), work, Events(), write=False)
    found: list[Bench] = []

    def drive(context: StageContext, objective: Objective) -> None:
        desk = desk_of(context, objective, prepared.stages[0], untrained=True)
        found.append(Bench(desk, context, objective, work))

    (work / "stage").mkdir()
    base = prepared.bench.base
    train_stage(prepared, prepared.stages[0], work / "stage", "k", base, Events(), drive=drive)
    prepared.bench.model.train()
    yield found[0]


@pytest.mark.parametrize("name", list(tests.TESTS))
def test_a_healthy_stage_withdraws_every_fault_and_is_left_alone(bench, name):
    before, mode = bench.desk.model.state(), bench.desk.model.training
    answer = bench.ask(name)
    assert answer.verdict == "withdraws", answer
    assert answer.seconds > 0 and answer.seen and answer.expected and answer.fault
    now = bench.desk.model.state()
    assert all(torch.equal(now[key], before[key]) for key in before)
    assert bench.desk.model.training == mode


def test_overfit_confirms_what_cannot_learn(bench):
    still = bench.ask("overfit", **bench.settings(learning_rate=0.0))
    assert still.verdict == "confirms" and "the rate is 0" in still.seen
    slow = bench.ask("overfit", **bench.settings(learning_rate=2e-6))
    assert slow.verdict == "confirms" and "ten times the rate" in slow.seen


def test_update_norm_names_the_group_that_stands_still(bench):
    rules = (GroupRule("*mlp*", learning_rate_scale=0.0),)
    optimizer = replace(bench.desk.settings.optimizer, groups=rules)
    answer = bench.ask("update_norm", **bench.settings(optimizer=optimizer))
    assert answer.verdict == "confirms" and "mlp" in answer.seen


def test_trained_list_names_what_gets_no_gradient(bench, monkeypatch):
    monkeypatch.setattr(bench.layer.mlp, "forward", torch.zeros_like)
    answer = bench.ask("trained_list")
    assert answer.verdict == "confirms" and "layers.0.mlp" in answer.seen


def test_chance_confirms_initial_weights_that_are_too_large(bench):
    weight = bench.desk.model.network.get_input_embeddings().weight
    with torch.no_grad():
        weight.mul_(60.0)
    try:
        assert bench.ask("chance").verdict == "confirms"
    finally:
        with torch.no_grad():
            weight.div_(60.0)
    assert bench.ask("chance", untrained=False).verdict == "confirms", "a base must know more"


def test_shuffled_inputs_confirms_a_blind_model_and_foreign_labels(bench, monkeypatch):
    packs = bench.desk.updates[0]
    shuffled = [replace(one, targets=one.targets.roll(3)) for one in packs]
    answer = bench.ask("shuffled_inputs", updates=[shuffled])
    assert answer.verdict == "confirms" and "not the next token" in answer.seen
    for layer in bench.desk.model.network.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", blind(layer.self_attn.forward))
    answer = bench.ask("shuffled_inputs")
    assert answer.verdict == "confirms" and "tokens before it: 0" in answer.seen


def blind(forward: Any) -> Any:
    def call(*given: Any, **named: Any) -> Any:
        found = forward(*given, **named)
        return (torch.zeros_like(found[0]), *found[1:])

    return call


def test_future_tokens_confirms_a_leak_and_labels_without_a_shift(bench, monkeypatch):
    honest = type(bench.desk.model).hidden
    with monkeypatch.context() as patch:
        patch.setattr(
            type(bench.desk.model),
            "hidden",
            lambda self, pack: (h := honest(self, pack)) + 0.1 * h.roll(-1, 0),
        )
        assert bench.ask("future_tokens").verdict == "confirms"
    same = [replace(one, targets=one.ids[one.predict_from]) for one in bench.desk.updates[0]]
    answer = bench.ask("future_tokens", updates=[same])
    assert answer.verdict == "confirms" and "the very token" in answer.seen


class Mean(Language):
    """The classic fault: a mean where a sum belongs."""

    def loss(self, model: Any, pack: Any) -> Loss:
        found = super().loss(model, pack)
        return Loss(found.total / self.weight(pack), found.metrics)


def test_accumulation_confirms_a_mean_of_means(bench):
    answer = bench.ask("accumulation", objective=Mean())
    assert answer.verdict == "confirms"
    few = bench.ask("accumulation", examples=bench.desk.examples[:3])
    assert few.verdict == "cannot tell"


def test_eval_mode_confirms_dropout_that_is_left_on(bench, monkeypatch):
    honest = type(bench.desk.model).hidden

    def dropped(self: Any, pack: Any) -> Any:
        return torch.nn.functional.dropout(honest(self, pack), 0.5, self.training)

    monkeypatch.setattr(type(bench.desk.model), "hidden", dropped)
    assert bench.ask("eval_mode").verdict == "confirms"


def test_rate_halved_confirms_a_rate_that_is_too_high(bench):
    answer = bench.ask("rate_halved", **bench.settings(learning_rate=1.0))
    assert answer.verdict == "confirms", answer


def resumed(bench: Bench) -> Answer:
    begin = bench.context.batches.state()

    def test(_: Desk) -> Answer:
        return branches.resume(bench.context, bench.objective, bench.folder)

    try:
        return timed(test, bench.desk)
    finally:
        bench.context.batches.load(begin)


def test_resume_confirms_moments_that_do_not_come_back(bench, monkeypatch):
    assert resumed(bench).verdict == "withdraws"
    monkeypatch.setattr(store, "load_optimizer", lambda optimizer, tensors: None)
    answer = resumed(bench)
    assert answer.verdict == "confirms" and "tensors differ" in answer.seen


def test_fp32_confirms_a_precision_that_changes_the_loss(bench):
    class Louder(Language):
        def loss(self, model: Any, pack: Any) -> Loss:
            found = super().loss(model, pack)
            return Loss(found.total * 1.2, found.metrics)

    other = replace(bench.desk, objective=Louder())
    assert branches.fp32(bench.desk, None).verdict == "withdraws"
    assert branches.fp32(bench.desk, bench.desk).verdict == "withdraws"
    assert branches.fp32(other, bench.desk).verdict == "confirms"


# -- whole recipes and runs ---------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in arguments])
    return int(left.value.code or 0), capsys.readouterr().out


def test_a_recipe_before_its_run_in_words_and_as_an_object(work, capsys):
    path = write_recipe(work, recipe())
    before = sorted(str(one) for one in work.rglob("*"))
    status, out = call(capsys, "doctor", path, "--run-tests")
    assert status == 0 and "no fault found (11 tests" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert sorted(str(one) for one in work.rglob("*")) == before, "nothing is written"
    path = write_recipe(work, recipe(learning_rate=1e-7))
    status, out = call(capsys, "doctor", path, "--run-tests", "--json")
    value = json.loads(out)
    (decided,) = value["decided"]
    said = {one["name"]: one["verdict"] for one in decided["tests"]}
    assert status == 3 and value["confirmed"] and decided["verdict"] == "confirmed"
    assert tuple(said) == GENERAL and said["overfit"] == "confirms"


def found(name: str, first: int, last: int) -> Diagnosis:
    one = Finding(
        name, "title", 0.9, "loss", "seen", (), "test", {"do": "", "patch": {}}, (), first, last
    )
    return Diagnosis((one,))


@pytest.mark.parametrize(("rate", "expected"), [(0.3, "confirmed"), (3e-3, "withdrawn")])
def test_the_finding_of_a_run_is_confirmed_or_withdrawn(work, monkeypatch, rate, expected):
    keys = {"checkpoint_every": 5, "checkpoints_kept": 9, "guard": "off", "learning_rate": rate}
    _, folder, _ = go(write_recipe(work, recipe(**keys)))
    monkeypatch.setattr(deciding, "examine", lambda *_: found("falls_then_climbs", 6, 20))
    report = run_tests(folder)
    (decided,) = report.decided
    assert decided.verdict == expected, decided
    assert "from update 5" in decided.answers[0].seen
    monkeypatch.setattr(deciding, "examine", lambda *_: found("epoch_sawtooth", 6, 20))
    (decided,) = run_tests(folder).decided
    assert decided.verdict == "open" and not decided.answers, "no test can be run for that"
    monkeypatch.setattr(deciding, "examine", lambda *_: Diagnosis(()))
    assert "nothing suspicious" in run_tests(folder).notes[0]


def test_what_is_neither_recipe_nor_run_is_refused(work):
    (work / "curve.csv").write_text("1,2\n")
    with pytest.raises(RecipeError, match="a recipe"):
        run_tests(work / "curve.csv")
    with pytest.raises(RecipeError, match="the folder of a run"):
        run_tests(work / "base")
    with pytest.raises(RecipeError, match="a stage of the recipe: 01-sft"):
        run_tests(write_recipe(work, recipe()), stage="dpo")


def test_an_unknown_stage_is_refused_before_a_model_is_loaded(work, monkeypatch):
    monkeypatch.setattr(deciding, "prepare", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(RecipeError, match="01-sft"):
        run_tests(write_recipe(work, recipe()), stage="nope")
