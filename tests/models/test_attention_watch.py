"""The largest attention logit: of all queries exact, of a sample a bound, of any cut the same."""

from __future__ import annotations

import pytest
import torch
from families import model_of
from test_attention import TREE, _allowed, _plan, _random

from lehr.models.attention_watch import AttentionWatch, largest_logit, sampled_queries
from lehr.models.probe import probe_pack

ALL = 1000  # more than any segment has


def by_hand(query: torch.Tensor, key: torch.Tensor, allowed: torch.Tensor, scale: float) -> float:
    repeats = query.shape[1] // key.shape[1]
    logits = scale * query @ key.repeat_interleave(repeats, 1).transpose(2, 3)
    return logits.masked_fill(~allowed, float("-inf")).max().item()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads, keys", [(4, 4), (4, 2)])
def test_of_all_queries_it_is_the_largest_one(heads, keys, window):
    query, key, _ = _random(heads, keys, 14, torch.float64)
    found = largest_logit(query[0], key[0], _plan(*TREE), 0.5, window, ALL)
    assert found.item() == pytest.approx(by_hand(query, key, _allowed(window), 0.5), rel=1e-6)


def test_what_a_query_does_not_see_does_not_count():
    query, key, _ = (x.detach() for x in _random(2, 2, 14, torch.float64))
    before = largest_logit(query[0], key[0], _plan(*TREE), 1.0, None, 1)
    key[0, :, 5:9] *= 1e6  # segment 1 is seen by itself only: look at the last of 0, 2 and 3
    query[0, :, 5:9] = 0
    others = largest_logit(query[0], key[0], _plan(*TREE), 1.0, None, 1)
    assert 0 <= float(others) <= max(0.0, float(before)) and float(others) < 1e3


def test_a_sample_has_the_last_query_and_bounds_from_below():
    query, key, _ = _random(2, 1, 14, torch.float64)
    values = [float(largest_logit(query[0], key[0], _plan(*TREE), 1.0, None, n)) for n in (1, 2, 4)]
    exact = float(largest_logit(query[0], key[0], _plan(*TREE), 1.0, None, ALL))
    assert all(value <= exact for value in values) and values == sorted(values)
    for length in range(1, 30):
        for count in (1, 2, 5, 40, 10**12):
            found = sampled_queries(length, count)
            assert found[-1] == length - 1 and len(found) == min(length, count)


def test_only_passes_with_gradients_are_looked_at():
    model, stream = model_of("Llama"), torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 60, (n,), generator=stream) for n in (5, 9, 7)]
    model.watch_attention(2)
    with torch.no_grad():
        model.hidden(probe_pack([(rows[0], -1)]))
    assert model.largest_attention_logit() is None
    for row in rows:
        model.hidden(probe_pack([(row, -1)]))
    apart = model.largest_attention_logit()
    together = probe_pack([(row, -1) for row in rows])
    model.hidden(together)
    assert model.largest_attention_logit() == pytest.approx(apart, rel=1e-5), "any cut"
    assert model.largest_attention_logit() is None, "a look empties it"
    model.train_all()
    model.recompute("full")
    model.hidden(together).sum().backward()
    assert model.largest_attention_logit() == pytest.approx(apart, rel=1e-5)
    model.watch_attention(0)
    model.hidden(together)
    assert model.largest_attention_logit() is None


def test_it_grows_with_the_logits_and_changes_no_number():
    query, key, _ = _random(2, 2, 14, torch.float32)
    watch = AttentionWatch(2)
    watch.look(query[0], key[0], _plan(*TREE), 1.0, None)
    watch.look(3 * query[0], key[0], _plan(*TREE), 1.0, None)
    largest = watch.take()
    watch.look(query[0], key[0], _plan(*TREE), 1.0, None)
    assert largest == pytest.approx(3 * watch.take(), rel=1e-6)
    model = model_of("Llama")
    one = probe_pack([(torch.arange(12), -1)])
    plain = model.hidden(one)
    model.watch_attention(4)
    assert torch.equal(model.hidden(one), plain)
