"""Attention in padded batches, which a card computes by: on a CPU, against the dense sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import model_of, tree_pack

import oracle
from lehr.data.shapes import Segments
from lehr.models import attention as attention_module
from lehr.models import attention_padded
from lehr.models.attention import attention_by_autograd
from lehr.models.attention_padded import lay_out, padded_attention
from lehr.models.segments import SegmentPlan, plan_segments

# (start, length, continues): a prompt, a plain one, a branch that is not beside its prompt, a
# branch of the branch, one of a single token, and a long plain one.
TREE = [(0, 5, -1), (5, 4, -1), (9, 3, 0), (12, 2, 2), (14, 1, 0), (15, 21, -1)]
TOKENS = 36


def plan_of(segments: list[tuple[int, int, int]]) -> SegmentPlan:
    start, length, prefix = (torch.tensor(column) for column in zip(*segments, strict=True))
    return plan_segments(Segments(start, length, prefix), int(length.sum()))


def inputs_of(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(heads, tokens, 8, dtype=dtype, generator=generator).requires_grad_()
        for heads in (6, 2, 2)
    ]


def allowed(window: int | None) -> torch.Tensor:
    """Who sees whom, token by token, without any of the code above."""
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for start, length, prefix in TREE:
        chain = list(range(start, start + length))
        while prefix >= 0:
            first, count, prefix = TREE[prefix]
            chain = [*range(first, first + count), *chain]
        for place, token in enumerate(chain):
            if start <= token < start + length:
                for seen, other in enumerate(chain[: place + 1]):
                    mask[token, other] = window is None or place - seen < window
    return mask


def dense(
    inputs: list[torch.Tensor], mask: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    query, key, value = inputs
    key, value = (each.repeat_interleave(3, 0) for each in (key, value))
    logits = query @ key.transpose(1, 2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits.masked_fill(~mask, float("-inf")).softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 300])
@pytest.mark.parametrize("cost", [0, 50, 10**6])
def test_it_is_the_dense_sum_with_its_gradients(
    window: int | None, softcap: float | None, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the segments are put together: each alone, some, all that may be."""
    monkeypatch.setattr(attention_padded, "BATCH_COST_PAIRS", cost)
    inputs, plan = inputs_of(TOKENS), plan_of(TREE)
    found = padded_attention(*inputs, plan, 0.3, window, softcap)
    wanted = dense(inputs, allowed(window), 0.3, softcap)
    gap = 1e-6 if softcap else 1e-13  # a soft cap's shares are fp32
    assert (found - wanted).abs().max() < gap
    weight = torch.randn(found.shape, dtype=torch.float64)
    for one, two in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs),
        strict=True,
    ):
        assert oracle.relative_gap(one, two) < 10 * gap


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "Gemma3Text", "GPT2"])
def test_a_network_computes_the_same_by_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, windows, soft caps; a pack with branches."""
    model, pack = model_of(family), tree_pack()
    with torch.no_grad():
        usual = model.hidden(pack)
        monkeypatch.setattr(attention_module, "OF_CPU", ())
        padded = model.hidden(pack)
    assert (usual - padded).abs().max() < 2e-5 * usual.abs().max().clamp_min(1)


def test_like_segments_share_a_call_and_no_mask_is_of_the_pack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault: 24 segments, 24 calls a layer."""
    calls: list[Any] = []
    usual = F.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[3])
        return usual(*args, **kwargs)

    segments, at = [], 0
    for number in range(24):
        segments.append((at, 100 + number, -1))
        at += 100 + number
    for number in range(8):  # answers to the first four
        segments.append((at, 20, number % 4))
        at += 20
    plan = plan_of(segments)
    inputs = inputs_of(at, torch.float32)
    wanted = attention_by_autograd(*inputs, plan, 0.3)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    found = padded_attention(*inputs, plan, 0.3)
    assert (found - wanted).abs().max() < 2e-6
    assert [mask is None for mask in calls] == [True, False]
    assert calls[1].shape == (8, 1, 20, 128)  # of 123 tokens seen at most


def test_no_gradient_is_added_twice_at_once() -> None:
    """Sums of one token's gradients have an order on a card too: no index repeats in a round."""
    layout = lay_out(plan_of(TREE).spans, TOKENS, None, False, torch.float32, torch.device("cpu"))
    assert len(layout.seen.further) == 3  # the prompt: itself, and three that continue it
    for tokens, rows in layout.seen.further:
        assert len(tokens.unique()) == len(tokens) and len(rows.unique()) == len(rows)
        assert torch.equal(layout.seen.tokens[rows], tokens)
    assert torch.equal(layout.queries.tokens[layout.queries.own], torch.arange(TOKENS))
    assert not layout.queries.further


def test_the_layout_is_made_once_a_pack() -> None:
    plan = plan_of(TREE)
    inputs = inputs_of(TOKENS)
    for _ in range(2):
        padded_attention(*inputs, plan, 0.3)
    assert len(plan.layouts) == 1
    padded_attention(*inputs, plan, 0.3, window=3)
    assert len(plan.layouts) == 2
