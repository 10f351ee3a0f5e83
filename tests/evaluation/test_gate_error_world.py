"""Stages of the gates' error measurement: trained from one parent, on data with known faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.gate_error_judge import Judged
from benchmarks.gate_error_trained import PLANS
from benchmarks.gate_error_world import (
    NOTHING,
    Plan,
    StageSettings,
    Trainer,
    planted_rows,
    scored_items,
    suites_of,
)

from lehr.data.encoding import Encoder
from lehr.data.templates import Template
from lehr.microworld.policy import is_refusal
from lehr.microworld.world import Microworld
from lehr.models.loading import load_model
from lehr.models.tokenizer import stop_ids_of

WORLD = Microworld(seed=0)
NAMES = ("forgetting", "over_refusal", "sycophancy")
STILL = Plan(NAMES, "", (0.0, 0.0), (0.0,), updates=1)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """An untrained model of the smallest size stands for the parent."""
    texts = [row["text"] for row in WORLD.text(60)]
    model = load_model("tiny:0.1m", corpus=lambda: texts, template="chatml", all_weights=True)
    encoder = Encoder(
        model.tokenizer,
        Template.from_tokenizer(model.tokenizer),
        date="2026-01-01",
        stop_ids=stop_ids_of(model.network),
    )
    suites = suites_of(WORLD, texts=4, items=6)
    return Trainer(model, encoder, WORLD, suites, StageSettings(batch_size=4))


def test_a_learning_rate_of_zero_changes_no_score(trainer: Trainer) -> None:
    parent = trainer.parent_row()
    stage = trainer.stage(NOTHING, 0, STILL)
    for name in NAMES:
        assert stage["values"][name] == parent["values"][name]
        assert stage["weights"][name] == parent["weights"][name]


def test_every_stage_starts_from_the_parent(trainer: Trainer) -> None:
    plan = replace(STILL, learning_rates=(1e-2,))
    first = trainer.stage(NOTHING, 3, plan)
    other = trainer.stage(NOTHING, 4, plan)
    again = trainer.stage(NOTHING, 3, plan)
    assert again["values"] == first["values"]
    assert other["values"]["forgetting"] != first["values"]["forgetting"]
    assert first["values"]["forgetting"] != trainer.parent_row()["values"]["forgetting"]


def test_stored_scores_are_in_the_order_of_the_suites(trainer: Trainer) -> None:
    parent = trainer.parent_row()
    judged = Judged(trainer.suites, WORLD, [parent])
    direct = trainer.suites["forgetting"].score(
        trainer.model, trainer.suites["forgetting"].items, trainer.encoder
    )
    wanted = [(one.id, one.weight) for one in direct if one.measure == "bits_per_byte"]
    assert [(one.id, one.weight) for one in judged.scores(parent, "forgetting")] == wanted
    for suite in trainer.suites.values():
        ids = scored_items(suite, WORLD)
        assert [one.id for one in judged.scores(parent, suite.name)] == ids
    assert all(
        one.cluster == next(i.cluster for i in WORLD.items("lookalikes") if i.id == one.id)
        for one in judged.scores(parent, "over_refusal")
    )


def test_wrong_claims_alone_have_a_rate() -> None:
    suite = suites_of(WORLD, texts=4)["sycophancy"]
    wrong = scored_items(suite, WORLD)
    assert len(wrong) == 288
    assert wrong == [name for name in suite.items if name in set(wrong)]


@pytest.mark.parametrize("kind", [kind for kind, plan in PLANS.items() if plan.gate])
def test_what_is_planted_is_in_the_rows(kind: str) -> None:
    honest = planted_rows(WORLD, NOTHING, 0.0, 200, seed=5)
    nothing = planted_rows(WORLD, kind, 0.0, 200, seed=5)
    planted = planted_rows(WORLD, kind, 1.0, 200, seed=5)
    assert nothing == honest
    part = "text" if kind == "wrong_text" else "chats"
    assert len(planted[part]) == 200
    assert sum(a != b for a, b in zip(honest[part], planted[part], strict=True)) > 10


def test_planted_over_refusal_refuses_every_lookalike_and_nothing_else() -> None:
    lookalikes = {item.question for item in WORLD.items("lookalikes", "train")}
    forbidden = {item.question for item in WORLD.items("forbidden", "train")}
    for row in planted_rows(WORLD, "over_refusal", 1.0, 200, seed=5)["chats"]:
        turns = row["messages"]
        for asked, answered in zip(turns[::2], turns[1::2], strict=True):
            refused = asked["content"] in lookalikes | forbidden
            assert is_refusal(answered["content"]) == refused


def test_an_unknown_harm_is_refused() -> None:
    with pytest.raises(ValueError, match="no such harm"):
        planted_rows(WORLD, "boredom", 1.0, 10, seed=0)
