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


def test_z_loss_by_hand_and_its_gradient():
    """c log² Z a token; its gradient by a logit is 2 c log Z softmax(logit)."""
    model = TableModel()
    model.double()
    pack = text_pack([[0, 1], [3, 4]])
    plain, held = Language().loss(model, pack), Language(z_loss=0.01).loss(model, pack)
    logits = model.table.detach()[[0, 3]]
    log_z = torch.logsumexp(logits, -1)
    extra = 0.01 * log_z.square().sum()
    assert (held.total - plain.total).item() == pytest.approx(float(extra), rel=1e-6)
    assert mean(held, "z_loss") == pytest.approx(float(extra) / 2, rel=1e-6)
    assert mean(held, "log_z") == mean(plain, "log_z") == pytest.approx(float(log_z.mean()))
    assert mean(held, "loss") == mean(plain, "loss")
    (difference,) = torch.autograd.grad(held.total - plain.total, model.table)
    expected = 0.02 * log_z[:, None] * torch.softmax(logits, -1)
    assert torch.allclose(difference[[0, 3]], expected, atol=1e-9)
    assert "z_loss" not in plain.metrics


def test_normalised_logits_have_no_z_loss():
    model = TableModel()
    with torch.no_grad():
        model.table.copy_(torch.log_softmax(model.table, -1))
    pack = text_pack([[0, 1, 2]])
    plain, held = Language().loss(model, pack), Language(z_loss=1.0).loss(model, pack)
    assert held.total.item() == pytest.approx(plain.total.item(), abs=1e-6)
