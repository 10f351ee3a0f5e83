"""The engine with its model on a pretended card: the CPU's numbers, and nothing left behind.

tests/card.py raises where tensors of two devices meet. It says nothing about a card's kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.families import model_of

from card import DEVICE, Card, pretended_card
from lehr.data.groups import group_of
from lehr.data.loader import UpdateBatches
from lehr.data.packing import merge, single
from lehr.data.shapes import Encoded, Origin
from lehr.evaluation.divergence import kl_per_sequence
from lehr.evaluation.likelihood import sequence_scores
from lehr.generation.decode import generate
from lehr.models.language_model import LanguageModel
from lehr.objectives.language import Language
from lehr.objectives.policy import Policy, Samples
from lehr.objectives.preference import Dpo
from lehr.stages.preference import log_probabilities
from lehr.training import engine as engine_module
from lehr.training import events, order
from lehr.training.averaging import AverageSettings
from lehr.training.engine import Engine
from lehr.training.guard import GuardSettings
from lehr.training.optimizers import OptimizerSettings
from lehr.training.settings import EngineSettings

ORIGIN = Origin("s", "f", 1)


def rows(count: int = 12) -> list[Encoded]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(3, 97, (6 + number % 5,), generator=generator)
        found.append(Encoded(ids, torch.arange(len(ids)) > 2, ORIGIN))
    return found


def pairs(count: int = 4) -> list[Encoded]:
    return [group_of([3, 4, 5 + n], [[6, 7 + n], [8]], ORIGIN) for n in range(count)]


def model_on(device: str, family: str = "Llama", **adapter: Any) -> LanguageModel:
    model = model_of(family)
    model.to(device)
    if adapter.pop("everything", False):
        model.train_all()
    else:
        model.add_adapter(rank=2, **adapter)  # type: ignore[arg-type]
    return model


class Stop(Exception):
    """The process is gone."""


def train(
    model: LanguageModel,
    folder: Path,
    objective: Any = None,
    encoded: list[Encoded] | None = None,
    until: int | None = None,
    **settings: Any,
) -> list[Any]:
    """Four updates; what the engine said. until: killed after that update's checkpoint."""
    heard: list[Any] = []

    def observe(event: Any) -> None:
        heard.append(event)
        if isinstance(event, events.CheckpointWritten) and event.update == until:
            raise Stop

    data = UpdateBatches({"s": encoded or rows()}, {"s": 1.0}, 4, 0, 32)
    given = {"updates": 4, "learning_rate": 1e-2, "checkpoint_every": 1, **settings}
    evaluating = {"loss": lambda: -sequence_scores(model, rows(2))[0][0].log_probability}
    engine = Engine(
        model, objective or Language(z_loss=1e-4), data, EngineSettings(**given), folder,
        (0, "card"), (observe,), lambda _: {k: v() for k, v in evaluating.items()}, merge=merge,
    )  # fmt: skip
    try:
        engine.run()
    except Stop:
        assert until is not None
    return heard


def lines(heard: list[Any]) -> list[dict[str, Any]]:
    """Numbers of the updates that are no timings."""
    found = [dict(one.row) for one in heard if isinstance(one, events.UpdateDone)]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


def require_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, float):
            assert value == pytest.approx(other[name], rel=1e-3, abs=1e-4), name


EVERYTHING = {
    "ema": AverageSettings(0.5),
    "guard": GuardSettings(attention_queries=2),
    "gradient_flow_every": 2,
    "noise_scale_every": 2,
    "evaluate_every": 2,
    "micro_batch": 1,
}


@pytest.mark.parametrize(
    ("adapter", "settings", "recompute"),
    [
        ({"dropout": 0.3, "rows": (5, 6)}, EVERYTHING, "none"),
        ({"dropout": 0.3}, {"optimizer": OptimizerSettings("muon")}, "full"),
        ({"everything": True}, {"optimizer": OptimizerSettings(watch_every=2)}, "selective"),
        ({}, {"optimizer": OptimizerSettings("sgd", momentum=0.9), "micro_batch": 2}, "none"),
    ],
)
def test_updates_have_the_cpus_numbers(
    adapter: dict[str, Any], settings: dict[str, Any], recompute: Any, tmp_path: Path
) -> None:
    """Average, guard, flow, noise, dropout, recomputation, optimizers, evaluations, checkpoints."""
    model = model_on("cpu", **adapter)
    model.recompute(recompute)
    wanted, state = lines(train(model, tmp_path / "cpu", **settings)), model.state()
    with pretended_card():
        there = model_on("cuda", **adapter)
        there.recompute(recompute)
        heard = train(there, tmp_path / "card", **settings)
        found = there.state()
        assert {one.device for one in there.parameters()} == {DEVICE}
    for one, other in zip(lines(heard), wanted, strict=True):
        require_close(one, other)
    for name, value in found.items():
        assert value.device.type == "cpu"
        assert (value - state[name]).abs().max() < 1e-3, name
    assert not any(isinstance(one, events.OrderUnknown) for one in heard)


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Weights, moments, average and dropout come back to the card as they were."""
    settings = {"ema": AverageSettings(0.5), "guard": GuardSettings()}
    with pretended_card():
        model = model_on("cuda", dropout=0.3)
        whole = lines(train(model, tmp_path / "whole", **settings))
        train(model_on("cuda", dropout=0.3), tmp_path / "cut", until=2, **settings)
        again = model_on("cuda", dropout=0.3)
        heard = train(again, tmp_path / "cut", **settings)
        assert lines(heard) == whole[2:]
        assert not any(isinstance(one, events.ResumeInexact) for one in heard)
        for name, value in again.state().items():
            assert torch.equal(value, model.state()[name]), name


def test_going_on_on_another_device_is_said(tmp_path: Path) -> None:
    train(model_on("cpu"), tmp_path, until=2)
    with pretended_card():
        heard = train(model_on("cuda"), tmp_path)
    (said,) = [one for one in heard if isinstance(one, events.ResumeInexact)]
    assert "device was cpu, is cuda:0" in str(said)
    assert len(lines(heard)) == 2


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_preference_and_policy_with_their_references(family: str) -> None:
    """Windows, soft caps, prompts with branches; the reference pass through `as_of`."""

    def numbers(device: str) -> list[float]:
        model = model_on(device, family)
        reference = log_probabilities(model, list(enumerate(pairs())), model.state(), 32)
        samples = Samples([1.0, -1.0], reference=[torch.zeros(2), torch.zeros(1)])
        found = [value for pair in reference.values() for value in pair]
        for objective in (Dpo(reference=reference), Policy({0: samples}, beta=0.1)):
            model.train()
            total = objective.loss(model, single(0, pairs()[0])).total
            total.backward()
            gradients = [one.grad for one in model.trained().values() if one.grad is not None]
            found += [float(total.detach()), sum(float(one.abs().sum()) for one in gradients)]
        return found

    wanted = numbers("cpu")
    with pretended_card():
        assert numbers("cuda") == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_evaluation_divergence_and_sampling() -> None:
    def numbers(device: str) -> Any:
        model = model_on(device)
        scores = [one.log_probability for row in sequence_scores(model, rows(3)) for one in row]
        nats = [value for value, _ in kl_per_sequence(model, None, rows(3))]
        written = generate(
            model, [[3, 4, 5], [7, 8, 9, 10], [3, 4, 5]], max_new_tokens=5, stop_ids={2},
            temperature=1.0, top_k=20,
        )  # fmt: skip
        return scores + nats, [one.ids for one in written]

    wanted, ids = numbers("cpu")
    with pretended_card():
        found, written = numbers("cuda")
    assert found == pytest.approx(wanted, abs=1e-4) and written == ids


def loss_on(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers asks each pass whether its positions are those of packed rows.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    model = model_on("cuda")
    model.train()
    pack = merge([single(0, pairs()[0]), single(1, rows()[0])])
    card.waits.clear()
    card.copies.clear()
    Language().loss(model, pack).total.backward()


def test_a_pack_asks_the_card_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets in range and positions twice are looked up on the CPU, before the pack is moved."""
    with pretended_card() as card:
        loss_on(card, monkeypatch)
        assert not card.waits
        assert card.copies["pinned"] and not card.copies["pageable"]


def test_a_question_to_the_card_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: pairs that are moved before they are looked at."""
    usual = LanguageModel.token_stats

    def moved_first(self: Any, hidden: Any, predict_from: Any, targets: Any, **how: Any) -> Any:
        return usual(self, hidden, predict_from.to("cuda"), targets.to("cuda"), **how)

    monkeypatch.setattr(LanguageModel, "token_stats", moved_first)
    with pretended_card() as card:
        loss_on(card, monkeypatch)
        assert sum(card.waits.values()) >= 3 and card.copies["pageable"]


def test_a_tensor_left_on_the_cpu_is_seen() -> None:
    """The fault: a model of which a part was not moved."""
    with pretended_card():
        model = model_on("cuda")
        model.network.model.norm.to("cpu")
        with pytest.raises(RuntimeError, match="one device"):
            Language().loss(model, single(0, rows()[0]))


def test_an_operation_without_an_order_is_said_and_the_attempt_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, refused = engine_module.accumulate, []

    def accumulate(*args: Any, **kwargs: Any) -> Any:
        done = usual(*args, **kwargs)  # gradients are there, and must go
        if torch.are_deterministic_algorithms_enabled():
            refused.append(1)
            raise RuntimeError("histc_cuda does not have a deterministic implementation, but")
        return done

    with pretended_card():
        wanted = lines(train(model_on("cuda"), tmp_path / "usual"))
        monkeypatch.setattr(engine_module, "accumulate", accumulate)
        heard = train(model_on("cuda"), tmp_path / "one")
    said = [one for one in heard if isinstance(one, events.OrderUnknown)]
    assert [one.operation for one in said] == ["histc_cuda"] and len(refused) == 1
    assert lines(heard) == wanted


def test_another_error_of_a_card_is_no_question_of_order() -> None:
    surround = order.FixedOrder(DEVICE, lambda _: None)
    with pretended_card(), pytest.raises(RuntimeError, match="illegal"), surround():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert surround.kept
