"""B34, the whole run: identical pairs are reported before training, displacement after it."""

from __future__ import annotations

import json

import pytest
from tests.pipeline.fixtures import lean, one_measurement, saved_base, work  # noqa: F401
from tests.pipeline.small import go, lora_recipe, metrics, stage, write_recipe

from lehr.pipeline.events import Events
from lehr.pipeline.observing import watch
from lehr.training import events as engine

pytestmark = pytest.mark.usefixtures("lean")


def test_identical_pairs_are_reported_before_training_and_are_no_success(work):  # noqa: F811
    lines = (work / "pairs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["rejected"] = row["chosen"]
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = lora_recipe(gates="none", export="adapter")
    made["stages"] = [{"preference": stage("pairs", max_updates=2, learning_rate=1e-2)}]
    _, out, heard = go(write_recipe(work, made))
    said = [event.text for event in heard.of("finding")]
    assert any("pairs: 28 pairs" in text or "pairs: 28 rows" in text for text in said), said
    place = next(n for n, event in enumerate(heard) if event.kind == "finding")
    assert place < next(n for n, event in enumerate(heard) if event.kind == "update")
    for row in metrics(out / "01-preference"):
        assert row["loss"] == pytest.approx(0.693147, abs=1e-6) and row["grad_norm"] == 0.0
        assert (row["objective.ties"], row["objective.accuracy"]) == (1.0, 0.0)


def row(update: int, logratio: float) -> dict:
    return {"update": update, "objective.chosen_logratio": logratio, "loss": 0.5}


@pytest.mark.parametrize(("end", "said"), [(-2.0, 1), (0.4, 0)])
def test_the_better_answers_that_became_less_likely_are_named(end, said):
    heard = []
    observe = watch(Events(None, [heard.append]))
    observe(engine.RunStarted(0, 0, 20))
    for update in range(1, 21):
        observe(engine.UpdateDone(row(update, end if update > 5 else -end)))
    alarms = [event for event in heard if event.kind == "displacement"]
    assert len(alarms) == said
    assert all("less likely" in alarm.text and "-2.00" in alarm.text for alarm in alarms)
