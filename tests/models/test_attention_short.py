"""Short segments in padded batches: equal to segment by segment, and padding reaches no one."""

from __future__ import annotations

import pytest
import torch

import oracle
from lehr.data.shapes import Segments
from lehr.models import attention_short
from lehr.models.attention import attention_by_autograd
from lehr.models.attention_cpu import CpuSegments
from lehr.models.attention_short import in_batches, lay_out, pieces
from lehr.models.segments import SegmentPlan, Span, plan_segments

# Prompts with answers of many lengths, plain sequences, one chain; as (length, prefix).
RAGGED = [(70, -1), (3, 0), (90, 0), (1, 0), (150, -1), (149, -1), (9, -1), (40, 6), (17, 7)]
RAGGED += [(2, 4)]


def _ragged() -> SegmentPlan:
    length = torch.tensor([length for length, _ in RAGGED])
    start = length.cumsum(0) - length
    prefix = torch.tensor([prefix for _, prefix in RAGGED])
    return plan_segments(Segments(start, length, prefix), int(length.sum()))


def _inputs(tokens: int, heads: int = 6, groups: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(count, tokens, 8, generator=generator).requires_grad_()
        for count in (heads, groups, groups)
    ]


def _with_gradients(run, inputs):
    out = run(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    return out, torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("heads, groups", [(6, 2), (3, 3), (4, 1)])
def test_batches_equal_segment_by_segment(window, heads, groups):
    plan = _ragged()
    inputs = _inputs(plan.tokens, heads, groups)
    out, grads = _with_gradients(lambda *x: CpuSegments.apply(*x, plan, 0.3, window), inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted, wanted_grads = _with_gradients(
        lambda *x: attention_by_autograd(*x, plan, 0.3, window), wide
    )
    assert (out - wanted).abs().max() < 5e-6
    for one, two in zip(grads, wanted_grads, strict=True):
        assert oracle.relative_gap(one, two) < 1e-6


def test_the_same_pack_gives_the_same_bits():
    plan, again = _ragged(), _ragged()
    inputs = _inputs(plan.tokens)
    first = _with_gradients(lambda *x: CpuSegments.apply(*x, plan, 0.3, None), inputs)
    second = _with_gradients(lambda *x: CpuSegments.apply(*x, again, 0.3, None), inputs)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_a_neighbour_in_the_batch_changes_no_bit():
    plan = _ragged()
    query, key, value = (x.detach() for x in _inputs(plan.tokens))
    before = CpuSegments.apply(query, key, value, plan, 0.3, None)
    changed = plan.spans[5]  # of 149 tokens, beside one of 150
    rows = slice(changed.start, changed.start + changed.length)
    for each in (query, key, value):
        each[:, rows] += 5.0
    after = CpuSegments.apply(query, key, value, plan, 0.3, None)
    others = torch.ones(plan.tokens, dtype=torch.bool)
    others[rows] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[rows], after[rows])


def test_padding_takes_no_gradient(monkeypatch):
    """Known fault: a padded row repeats its segment's last token and counts it again."""
    plan = _ragged()
    inputs = _inputs(plan.tokens)
    _, grads = _with_gradients(lambda *x: CpuSegments.apply(*x, plan, 0.3, None), inputs)
    monkeypatch.setattr(torch.Tensor, "index_fill_", lambda self, *_: self)
    _, faulty = _with_gradients(lambda *x: CpuSegments.apply(*x, _ragged(), 0.3, None), inputs)
    assert oracle.relative_gap(faulty[2], grads[2]) > 1e-3


def test_every_row_of_the_output_has_one_place():
    plan = _ragged()
    layout = lay_out(plan.spans, plan.tokens, 6, 2, None, torch.device("cpu"))
    rows, places = layout.own
    assert torch.equal(rows, torch.arange(plan.tokens * 6))
    assert torch.equal(layout.query_rows[places], rows)
    assert layout.whole
    # The first prompt (70 tokens, in one piece) is seen by itself and by three answers, of
    # which one comes in pieces.
    times = [int((found == 0).sum()) for found, _ in layout.appearances]
    assert times == [1] * (3 + len(pieces(plan.spans[2])))


def test_pieces_continue_one_another_and_keep_their_context():
    span = Span(10, 130, ((0, 4),))
    first, second = pieces(span)
    assert first == Span(10, 65, ((0, 4),))
    assert second == Span(75, 65, ((0, 4), (10, 65)))
    assert pieces(Span(0, 1)) == [Span(0, 1)]


def test_what_pads_a_batch_stays_below_the_price_of_another():
    spans = [Span(0, length) for length in range(1, 190, 3)]
    for batch in in_batches(spans):
        length, seen = batch[0].length, batch[0].context_length + batch[0].length
        area = length * seen * len(batch)
        real = sum(span.length * (span.context_length + span.length) for span in batch)
        assert area - real <= attention_short.BATCH_COST_PAIRS + area // 10
    assert len(in_batches(spans)) < len(spans) / 3
