"""Signatures on curves made by hand: each is named, and a healthy curve is not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lehr
from lehr.diagnosis.doctor import EXPLAINS, diagnose, doctor
from lehr.diagnosis.doctor_curve import curve_of_columns
from lehr.diagnosis.doctor_look import Context
from lehr.diagnosis.doctor_table import TABLE

VOCABULARY = 128
CHANCE = math.log(VOCABULARY)
UNIGRAM = 3.2


def falling(count: int = 300, seed: int = 0, end: float = 2.2, spread: float = 0.03) -> Any:
    """A healthy loss: from ln V down to `end`, with noise."""
    noise = np.random.default_rng(seed).normal(0.0, spread, count)
    return end + (CHANCE - end) * np.exp(-np.arange(count) / (0.12 * count)) + noise


def named(columns: dict[str, Any], **known: Any) -> list[str]:
    context = Context(**{"vocabulary": VOCABULARY, "unigram_entropy": UNIGRAM, **known})
    return [one.name for one in diagnose(curve_of_columns(columns), context).findings]


def evaluations(values: dict[int, float], count: int = 300) -> list[float | None]:
    return [values.get(index) for index in range(count)]


# -- healthy ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_curve_has_no_finding(seed: int):
    draw = np.random.default_rng(seed)
    loss = falling(int(draw.integers(60, 900)), seed, end=float(draw.uniform(1.5, 2.8)))
    steps = np.arange(len(loss))
    rate = (
        1e-3 * np.minimum((steps + 1) / 20, 1.0) * (0.55 + 0.45 * np.cos(np.pi * steps / len(loss)))
    )
    found = {20 * i: float(loss[20 * i]) + 0.02 for i in range(2, len(loss) // 20)}
    columns = {"loss": loss, "learning_rate": rate, "eval_loss": evaluations(found, len(loss))}
    assert named(columns) == []


# -- the loss's own shapes ----------------------------------------------------


def with_jump(at: int, height: float, length: int, count: int = 300) -> Any:
    loss = falling(count)
    loss[at : at + length] += height
    return loss


def flat(level: float, count: int = 300) -> Any:
    return level + np.random.default_rng(1).normal(0.0, 0.02, count)


def late(rise: float) -> Any:
    loss = falling()
    loss[180:] += np.linspace(0.0, rise, 120)
    return loss


def swinging() -> Any:
    """Undamped: swings of a period of 24 updates that double every 40."""
    steps = np.arange(300.0)
    growing = 0.02 * 2.0 ** (steps / 40.0) * (1.0 + np.sin(2 * np.pi * steps / 24.0))
    return falling() + growing


def plateau() -> Any:
    return np.concatenate([flat(CHANCE, 120), falling(180)])


def epochs(count: int = 300, rows: float = 50.0) -> Any:
    return (np.arange(count) + 1) / rows


def sawtooth() -> Any:
    return falling() + 0.3 * (epochs() % 1.0)


def bumps(period: int = 17) -> Any:
    loss = falling()
    loss[period::period] += 1.0
    return loss


CASES: list[tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]] = [
    ("flat_at_chance", lambda: {"loss": flat(CHANCE)}, {}),
    (
        "flat_at_unigram",
        lambda: {"loss": np.concatenate([np.linspace(CHANCE, UNIGRAM, 30), flat(UNIGRAM, 270)])},
        {},
    ),
    ("flat_from_start", lambda: {"loss": flat(1.9) * 0 + 1.9}, {}),
    ("start_above_chance", lambda: {"loss": falling() + 6 * np.exp(-np.arange(300) / 20)}, {}),
    ("scales_with_accumulation", lambda: {"loss": 4 * falling()}, {"accumulation": 4}),
    ("plateau_then_drop", lambda: {"loss": plateau()}, {}),
    ("spike_that_heals", lambda: {"loss": with_jump(150, 1.5, 3)}, {}),
    ("spike_that_stays", lambda: {"loss": with_jump(150, 1.5, 150)}, {}),
    ("periodic_bumps", lambda: {"loss": bumps()}, {}),
    ("epoch_sawtooth", lambda: {"loss": sawtooth(), "epoch": epochs()}, {}),
    ("late_creep", lambda: {"loss": late(0.3)}, {}),
    ("falls_then_climbs", lambda: {"loss": late(1.2)}, {}),
    ("growing_oscillation", lambda: {"loss": swinging()}, {}),
    ("jump_at_resume", lambda: {"loss": with_jump(150, 0.3, 60)}, {"resumes": (150.0,)}),
    ("too_low_too_soon", lambda: {"loss": falling(end=0.02), "epoch": epochs(rows=600)}, {}),
    (
        "train_down_eval_up",
        lambda: {
            "loss": falling(end=1.0),
            "eval_loss": evaluations({30 * i: 2.8 + 0.1 * abs(i - 3) for i in range(1, 10)}),
        },
        {},
    ),
    (
        "eval_below_train",
        lambda: {
            "loss": falling() + 0.3 * (1 - np.exp(-np.arange(300) / 60)),
            "eval_loss": evaluations(
                {30 * i: float(falling(spread=0)[30 * i]) for i in range(1, 10)}
            ),
        },
        {},
    ),
    (
        "eval_apart_from_start",
        lambda: {
            "loss": falling(),
            "eval_loss": evaluations({30 * i: CHANCE - 0.05 * i for i in range(1, 10)}),
        },
        {},
    ),
    (
        "never_left_warmup",
        lambda: {"loss": falling(), "learning_rate": np.linspace(1e-5, 1e-3, 300)},
        {},
    ),
    (
        "rate_ran_out",
        lambda: {"loss": falling(), "learning_rate": np.maximum(0.0, 1e-3 - np.arange(300) * 5e-6)},
        {},
    ),
]


@pytest.mark.parametrize(("name", "columns", "known"), CASES, ids=[case[0] for case in CASES])
def test_a_signature_is_named_first(name: str, columns: Any, known: dict[str, Any]):
    found = named(columns(), **known)
    assert found[:1] == [name], found


def test_not_a_number_at_the_first_step_and_later():
    assert named({"loss": [math.nan] * 20}) == ["nan_at_first_step"]
    later = falling()
    later[140] = math.nan
    found = diagnose(curve_of_columns({"loss": later})).findings
    assert [one.name for one in found] == ["nan_at_step"]
    assert found[0].first == 141


def test_lehrs_own_rows_name_a_skipped_update():
    rows = [{"update": i, "loss": 3.0 - i / 50, "skipped": False} for i in range(1, 30)]
    rows[20] = {"update": 21, "loss": None, "nonfinite": ["loss"], "skipped": True}
    assert [one.name for one in doctor(rows).findings] == ["nan_at_step"]


def test_a_learning_rate_of_zero_is_the_first_cause():
    found = doctor(
        [{"loss": CHANCE, "learning_rate": 0.0} for _ in range(50)], vocabulary=VOCABULARY
    ).findings
    assert found[0].causes[0] == "the learning rate is 0 in every row"


def test_what_a_finding_explains_is_no_second_finding():
    found = named({"loss": with_jump(150, 1.5, 150)})
    assert found == ["spike_that_stays"]


# -- preference and reinforcement learning ------------------------------------


def ramp(first: float, last: float, count: int = 100, spread: float = 0.0) -> list[float]:
    noise = np.random.default_rng(2).normal(0.0, 1.0, count) * spread
    return (np.linspace(first, last, count) + noise).tolist()


POLICY: list[tuple[str, dict[str, Any]]] = [
    (
        "both_fall",
        {"loss": ramp(0.69, 0.5), "logps/chosen": ramp(-80, -84), "logps/rejected": ramp(-80, -86)},
    ),
    (
        "chosen_collapses",
        {
            "loss": ramp(0.69, 0.2),
            "logps/chosen": ramp(-80, -105),
            "logps/rejected": ramp(-80, -118),
        },
    ),
    ("kl_runaway", {"reward": ramp(0, 1), "kl": [0.01 * 1.1**i for i in range(100)]}),
    (
        "reward_up_gold_down",
        {"reward": ramp(0, 3), "gold_score": [1 - ((i - 40) / 50) ** 2 for i in range(100)]},
    ),
    ("entropy_collapse", {"reward": ramp(0, 1), "entropy": [2 * 0.96**i for i in range(100)]}),
    ("zero_variance_groups", {"reward": ramp(0, 0.1), "frac_reward_zero_std": [0.8] * 100}),
    ("length_drift", {"reward": ramp(0, 1), "completions/mean_length": ramp(200, 900, spread=9)}),
    ("clip_fraction_stuck", {"reward": ramp(0, 1), "clip_fraction": [0.45] * 100}),
    ("never_stops", {"reward": ramp(0, 1), "completions/clipped_ratio": [0.97] * 100}),
]


@pytest.mark.parametrize(("name", "columns"), POLICY, ids=[case[0] for case in POLICY])
def test_a_signature_of_policy_learning_is_named_first(name: str, columns: dict[str, Any]):
    found = [one.name for one in diagnose(curve_of_columns(columns)).findings]
    assert found[:1] == [name], found


@pytest.mark.parametrize("chosen", [-78, -83])  # this loss usually lowers the chosen a little
def test_healthy_preference_learning_has_no_finding(chosen: float):
    columns = {
        "loss": ramp(0.69, 0.4, spread=0.02),
        "rewards/margins": ramp(0.0, 1.0, spread=0.05),
        "logps/chosen": ramp(-80, chosen, spread=0.5),
        "logps/rejected": ramp(-80, -90, spread=0.5),
    }
    assert diagnose(curve_of_columns(columns)).healthy


def test_answers_whose_end_is_not_trained_never_stop():
    assert named({"loss": falling()}, unended=1.0) == ["never_stops"]
    assert named({"loss": falling()}, unended=0.02) == []


# -- what every finding says --------------------------------------------------


def test_every_entry_has_causes_a_test_and_a_remedy():
    for name, entry in TABLE.items():
        assert entry.title and entry.test and entry.fix, name
        assert entry.causes, name
        assert 0.5 < entry.ceiling < 1.0, name


def test_what_explains_and_is_explained_stands_in_the_table():
    for name, explained in EXPLAINS.items():
        assert name in TABLE
        assert {one for one in explained if one != "*"} <= set(TABLE)


def test_patches_are_keys_of_a_stage():
    from lehr.recipe.schema import PreferenceStage, SftStage

    for name, entry in TABLE.items():
        kind = PreferenceStage if "beta" in entry.patch else SftStage
        assert kind(data={"chats": 1.0}, **{"learning_rate": 1e-4, **entry.patch}), name


def test_the_object_of_the_contract():
    found = doctor([3.0, 2.0, math.nan]).as_json()
    assert found["healthy"] is False
    needed = {"name", "confidence", "where", "causes", "decisive_test", "fix"}
    assert needed <= set(found["findings"][0])
    assert 0.5 <= found["findings"][0]["confidence"] < 1.0


def test_the_package_has_it():
    assert lehr.doctor([2.0] * 3).healthy


@pytest.mark.parametrize("count", [1, 2, 5, 11, 13])
def test_few_points_say_that_they_are_few(count: int):
    found = doctor(falling(300)[:count].tolist())
    assert found.healthy
    assert count >= 12 or "too few" in found.notes[-1]


def test_a_million_points_take_less_than_two_seconds():
    loss = falling(1_000_000, spread=0.1)
    began = time.process_time()
    assert doctor(loss.tolist(), vocabulary=VOCABULARY).healthy
    loss[600_000:600_900] += 3.0
    assert [one.name for one in doctor(loss.tolist()).findings] == ["spike_that_heals"]
    assert time.process_time() - began < 4.0  # two diagnoses


def test_an_evaluation_is_not_apart_from_a_loss_that_fell_less_than_its_noise_allows():
    def columns(spread: float) -> dict[str, Any]:
        loss = np.linspace(2.0, 1.8, 300) + np.random.default_rng(3).normal(0.0, spread, 300)
        return {"loss": loss, "eval_loss": evaluations({30 * i: 2.0 for i in range(1, 10)})}

    assert "eval_apart_from_start" in named(columns(0.01))
    assert "eval_apart_from_start" not in named(columns(0.1))


def test_a_gap_that_opens_on_repeated_data_is_overfitting_without_a_rise():
    still = {30 * i: max(2.4, 3.2 - 0.3 * i) for i in range(1, 10)}
    columns = {"loss": falling(end=0.8), "eval_loss": evaluations(still)}
    assert named({**columns, "epoch": epochs(rows=20)})[:1] == ["train_down_eval_up"]
    assert "train_down_eval_up" not in named({**columns, "epoch": epochs(rows=200)})


def test_a_jump_under_a_rate_that_goes_on_rising_is_the_rates():
    rising = 1e-5 * 10 ** (np.arange(300) / 150)
    jump = {"loss": with_jump(150, 1.5, 150)}
    assert named(jump)[:1] == ["spike_that_stays"]
    assert named({**jump, "learning_rate": rising})[:1] == ["falls_then_climbs"]


@pytest.mark.parametrize(("updates", "named"), [(400, True), (20_000, False), (1_000_000, False)])
def test_pretraining_comes_low_in_its_many_updates(updates: int, named: bool) -> None:
    steps = np.arange(0, updates, updates / 500)
    noise = np.random.default_rng(0).normal(0, 0.03, len(steps))
    fast, slow = np.exp(-steps / (0.03 * updates)), np.exp(-steps / (0.2 * updates))
    loss = 2.0 + 5.6 * fast + 2.4 * slow + noise
    found = diagnose(curve_of_columns({"step": steps, "loss": loss}))
    assert ("too_low_too_soon" in [one.name for one in found.findings]) is named


def test_a_loss_that_is_exactly_zero_is_read() -> None:
    loss = np.concatenate([np.linspace(3.0, 0.0, 60), np.zeros(60)])
    told = evaluations({10 * i: 0.5 + 0.1 * abs(i - 8) for i in range(1, 12)})[: len(loss)]
    diagnose(curve_of_columns({"loss": loss, "eval_loss": told}))
