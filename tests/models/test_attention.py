"""Attention over segments: equal to rows alone, isolated, exact gradients, nothing ignored."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, model_of, network_of, tree_pack

import oracle
from lehr.data.shapes import Segments
from lehr.models import attention_cpu as attention_module
from lehr.models import segments as segments_module
from lehr.models.attention import (
    NAME,
    UnsupportedAttentionError,
    attention_by_autograd,
    segment_attention,
    use_segments,
)
from lehr.models.language_model import LanguageModel
from lehr.models.probe import probe_pack
from lehr.models.segments import SegmentPlan, plan_segments


def _plan(*segments: tuple[int, int, int]) -> SegmentPlan:
    start, length, prefix = (torch.tensor(column) for column in zip(*segments, strict=True))
    return plan_segments(Segments(start, length, prefix), int(length.sum()))


def _random(heads: int, keys: int, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, tokens, 8, dtype=dtype, generator=generator).requires_grad_()
        for count in (heads, keys, keys)
    ]


def _dense(query, key, value, allowed, scale=None):
    """Softmax attention in full, under a mask of the whole pack."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
    weights = logits.masked_fill(~allowed, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


# A prompt (0), a plain sequence (1), a branch of 0 that is not beside it (2), one of 2 (3).
TREE = [(0, 5, -1), (5, 4, -1), (9, 3, 0), (12, 2, 2)]


def _allowed(window: int | None) -> torch.Tensor:
    chains = {0: [0], 1: [1], 2: [0, 2], 3: [0, 2, 3]}
    mask = torch.zeros(14, 14, dtype=torch.bool)
    for segment, chain in chains.items():
        where = [p for s in chain for p in range(TREE[s][0], TREE[s][0] + TREE[s][1])]
        own = range(TREE[segment][0], TREE[segment][0] + TREE[segment][1])
        for p in own:
            for distance, key in enumerate(reversed(where[: where.index(p) + 1])):
                mask[p, key] = window is None or distance < window
    return mask


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tree_equals_dense_attention_with_its_gradients(window, dtype):
    inputs = _random(6, 2, 14, dtype)
    plan = _plan(*TREE)
    mask = None if window is None else torch.tensor(window)
    module = torch.nn.Module()
    out, _ = segment_attention(module, *inputs, mask, sliding_window=window, segments=plan)
    expected = _dense(*inputs, _allowed(window))
    assert (out - expected).abs().max() < 2e-6
    weight = torch.randn(out.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for one, two in zip(found, wanted, strict=True):
        assert oracle.relative_gap(one, two) < 1e-5


@pytest.mark.parametrize("window", [2, 3, 4])
def test_a_window_in_blocks_equals_dense_attention_with_its_gradients(window, monkeypatch):
    """In blocks of two queries, where real ones are of hundreds."""
    monkeypatch.setattr(segments_module, "BLOCK", (2, 2))
    seen = _plan(*TREE).seen(window)
    assert max(span.length for span in seen) == 2
    assert max(span.context_length for span in seen) == window - 1
    for dtype in (torch.float32, torch.float64):
        test_a_tree_equals_dense_attention_with_its_gradients(window, dtype)


def test_a_window_over_a_long_segment_needs_no_mask_of_it():
    """The fault: a mask of 8,192 x 8,192, and work that grows with the square of the length."""
    plan = _plan((0, 8192, -1), (8192, 600, 0))
    seen = plan.seen(1024)
    for span in seen:
        plan.mask(span, 1024, torch.bfloat16, torch.device("cpu"))
    assert sum(span.length for span in seen) == 8792
    assert max(mask.numel() for mask in plan._masks.values()) <= 512 * (512 + 1024)
    looked_at = sum(span.length * (span.context_length + span.length) for span in seen)
    assert looked_at < 1.7 * plan.pairs(1024)


def test_autograd_path_passes_gradcheck_with_a_soft_cap():
    inputs = [x[0].detach().requires_grad_() for x in _random(2, 1, 14, torch.float64)]
    plan = _plan(*TREE)
    assert torch.autograd.gradcheck(
        lambda *x: attention_by_autograd(*x, plan, 0.3, 3, None), inputs
    )


def test_direct_kernel_equals_autograd_path_in_bf16():
    query, key, value = (x.detach().bfloat16() for x in _random(6, 2, 14, torch.float32))
    plan = _plan(*TREE)
    out, _ = segment_attention(torch.nn.Module(), query, key, value, None, segments=plan)
    expected = attention_by_autograd(query[0], key[0], value[0], plan, 8**-0.5)
    assert (out[0].float() - expected.float()).abs().max() < 2e-2


@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_long_segments_is_dense_attention(window, monkeypatch):
    """Segments beyond SHORT, and those beside shorter ones that continue them."""
    for short in (0, 5):
        monkeypatch.setattr(attention_module, "SHORT", short)
        test_a_tree_equals_dense_attention_with_its_gradients(window, torch.float32)


def test_gradients_in_bf16_are_those_of_fp32_rounded():
    wide = _random(6, 2, 14, torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    grads = []
    for inputs in (wide, narrow):
        out, _ = segment_attention(torch.nn.Module(), *inputs, None, segments=_plan(*TREE))
        grads.append(torch.autograd.grad((out.float() ** 2).sum(), inputs))
    for one, two in zip(*grads, strict=True):
        assert oracle.relative_gap(two.float(), one) < 2e-2


def test_gradients_in_bf16_stay_right_where_scores_are_large():
    """Scores of hundreds: rounded to bf16 they would be off by units, and e^unit is no rounding."""
    query, key, value = (x.detach() for x in _random(6, 2, 14, torch.float32))
    wide = [x.bfloat16().float().requires_grad_() for x in (30 * query, 30 * key, value)]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    grads = []
    for inputs in (wide, narrow):
        out, _ = segment_attention(torch.nn.Module(), *inputs, None, segments=_plan(*TREE))
        grads.append(torch.autograd.grad((out.float() ** 2).sum(), inputs))
    assert oracle.relative_gap(grads[1][2].float(), grads[0][2]) < 2e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_pack_equals_rows_alone_with_gradients(family):
    network = network_of(family)
    pack = tree_pack()
    parameters = dict(network.named_parameters())
    model = LanguageModel(network, None, family)
    model.train_all()
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    wanted = oracle.pack_log_probabilities(network, pack)
    assert (stats.log_probability - wanted).abs().max() < 2e-5
    weight = torch.linspace(-1, 1, len(wanted))
    found = oracle.gradients((stats.log_probability * weight).sum(), parameters)
    expected = oracle.gradients((wanted * weight).sum(), parameters)
    total = torch.cat([g.flatten() for g in expected.values()]).norm()
    for name in parameters:
        apart = (found[name] - expected[name]).norm()
        assert apart < 1e-5 * max(expected[name].norm(), 1e-3 * total), name


def test_a_prompt_of_several_branches_gets_the_same_gradient_every_time():
    model = model_of("Llama")
    model.train_all()
    pack = tree_pack()
    runs = []
    for _ in range(2):
        stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
        runs.append(oracle.gradients(stats.log_probability.sum(), model.trained()))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_plan_joins_neighbours_and_refuses_gaps():
    assert _plan((0, 3, -1), (3, 2, 0), (5, 2, 1)).spans[2].context == ((0, 5),)
    with pytest.raises(ValueError, match="token 3"):
        _plan((0, 3, -1), (4, 2, -1))
    with pytest.raises(ValueError, match="not before it"):
        _plan((0, 3, 1), (3, 2, -1))
    with pytest.raises(ValueError, match="cover 3 tokens of a pack of 4"):
        plan_segments(Segments(*(torch.tensor([x]) for x in (0, 3, -1))), 4)


def test_an_empty_segment_is_harmless():
    assert len(_plan((0, 3, -1), (3, 0, -1), (3, 2, 1)).spans) == 2


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux="),
        ({"position_bias": torch.zeros(1)}, "position_bias="),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1, 1, 14, 14)}, "mask"),
        ({"sliding_window": 3}, "window of 3"),
        ({"attention_mask": torch.tensor(7)}, "window of 7"),
    ],
)
def test_what_would_be_ignored_raises_by_name(keywords, name):
    keywords = {"attention_mask": None, **keywords}
    with pytest.raises(UnsupportedAttentionError, match=name):
        segment_attention(
            torch.nn.Module(), *_random(2, 2, 14, torch.float32), segments=_plan(*TREE), **keywords
        )


def test_padding_and_caches_raise_under_this_name():
    network = network_of("Llama")
    use_segments(network)
    ids = torch.arange(3, 10)[None]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    with pytest.raises(UnsupportedAttentionError, match="padding"):
        network(input_ids=ids, attention_mask=mask)
    with pytest.raises(UnsupportedAttentionError, match="segments="):
        network(input_ids=ids)
    plan = _plan((0, 7, -1))
    cache = network(input_ids=ids, use_cache=True, segments=plan).past_key_values
    with pytest.raises(UnsupportedAttentionError, match="cache"):
        network(input_ids=ids[:, :1], past_key_values=cache, segments=_plan((0, 1, -1)))


def test_other_attention_for_a_while_and_back():
    model = model_of("Gemma2")
    with model.attention():
        assert model.config._attn_implementation == "eager"
    with model.attention("sdpa"), pytest.raises(ValueError, match="softcap"):
        model.network(input_ids=torch.arange(4)[None])
    assert model.config._attn_implementation == NAME


def test_a_long_row_needs_no_mask_and_a_window_spans_branches():
    model = model_of("Mistral")
    ids = torch.randint(3, 97, (60,), generator=torch.Generator().manual_seed(3))
    pack = probe_pack([(ids[:40], -1), (ids[40:50], 0), (ids[50:], 0)])
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    wanted = oracle.pack_log_probabilities(model.network, pack)
    assert (stats.log_probability - wanted).abs().max() < 2e-5
