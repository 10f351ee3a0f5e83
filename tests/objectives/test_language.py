import dataclasses
import math

import pytest
import torch
from table_model import VOCABULARY, TableModel, text_pack

from lehr.objectives.language import Language


def mean(loss, name):
    total, count = loss.metrics[name]
    return float(total) / float(count)


def test_uniform_model_has_ln_v_per_token():
    model = TableModel()
    torch.nn.init.zeros_(model.table)
    pack = text_pack([[0, 1, 2], [3, 4]])
    loss = Language().loss(model, pack)
    assert Language().weight(pack) == 3.0
    assert loss.total.item() == pytest.approx(3 * math.log(VOCABULARY), rel=1e-6)
    assert mean(loss, "loss") == pytest.approx(math.log(VOCABULARY), rel=1e-6)


def test_sum_of_minus_weighted_log_probabilities():
    model = TableModel()
    pack = dataclasses.replace(
        text_pack([[0, 1, 2], [3, 4]]), weights=torch.tensor([1.0, 0.5, 2.0])
    )
    log_probability = model.log_probability
    expected = -(log_probability(0, 1) + 0.5 * log_probability(1, 2) + 2.0 * log_probability(3, 4))
    loss = Language().loss(model, pack)
    assert loss.total.item() == pytest.approx(expected, rel=1e-6)
    assert Language().weight(pack) == 3.5
    assert mean(loss, "loss") == pytest.approx(expected / 3.5, rel=1e-6)


def test_accuracy_counts_the_most_likely_token():
    model = TableModel()
    best = model.table.argmax(-1).tolist()
    wrong = (best[1] + 1) % VOCABULARY
    pack = text_pack([[0, best[0]], [1, wrong], [2, best[2]]])
    assert mean(Language().loss(model, pack), "accuracy") == pytest.approx(2 / 3)
    assert "accuracy" not in Language(accuracy=False).loss(model, pack).metrics


def test_any_cut_adds_up():
    model = TableModel()
    rows = [[0, 1, 2], [3, 4], [5, 6, 0, 1], [2, 2]]
    sources = ["law", "web", "law", "chats"]
    whole = Language().loss(model, text_pack(rows, sources))
    parts = [
        Language().loss(model, text_pack(rows[:1], sources[:1])),
        Language().loss(model, text_pack(rows[1:], sources[1:])),
    ]
    assert whole.total.item() == pytest.approx(sum(p.total.item() for p in parts), rel=1e-6)
    for name, (total, count) in whole.metrics.items():
        pieces = [p.metrics[name] for p in parts if name in p.metrics]
        assert float(total) == pytest.approx(sum(float(t) for t, _ in pieces), rel=1e-6), name
        assert float(count) == sum(float(c) for _, c in pieces)


def test_sources_are_told_apart():
    model = TableModel()
    loss = Language().loss(model, text_pack([[0, 1, 2], [3, 4]], ["law", "web"]))
    law = -(model.log_probability(0, 1) + model.log_probability(1, 2)) / 2
    assert mean(loss, "source.law.loss") == pytest.approx(law, rel=1e-6)
    web = -model.log_probability(3, 4)
    assert mean(loss, "source.web.loss") == pytest.approx(web, rel=1e-6)
    assert not any(
        "source" in n for n in Language(per_source=False).loss(model, text_pack([[0, 1]])).metrics
    )


def test_gradient_is_probability_minus_target():
    model = TableModel()
    Language().loss(model, text_pack([[0, 1]])).total.backward()
    expected = torch.softmax(model.table[0].detach(), -1)
    expected[1] -= 1.0
    torch.testing.assert_close(model.table.grad[0], expected)
