"""The decode loop against full forward passes, other batch sizes and bad input."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from lehr.errors import Diverged, LehrError
from lehr.generation.decode import Generated, generate

VOCABULARY = 48
STOP = frozenset({3})


def llama(context: int = 64) -> SimpleNamespace:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
    )
    return SimpleNamespace(network=LlamaForCausalLM(config).eval())


def some_prompts(n: int = 16) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))] for _ in range(n)]


def by_full_passes(model: SimpleNamespace, prompt: list[int], max_new: int) -> Generated:
    """The oracle: no cache, no batch, the whole text again for every token."""
    ids, values, stopped = list(prompt), [], False
    for _ in range(max_new):
        with torch.no_grad():
            logits = model.network(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        token = int(logits.argmax())
        ids.append(token)
        values.append(float(logits[token]))
        if token in STOP:
            stopped = True
            break
    return Generated(ids[len(prompt) :], stopped, values)


def assert_same(left: list[Generated], right: list[Generated], tolerance: float = 1e-4) -> None:
    assert [one.ids for one in left] == [one.ids for one in right]
    assert [one.stopped for one in left] == [one.stopped for one in right]
    for one, other in zip(left, right, strict=True):
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=tolerance)


@pytest.mark.parametrize("through", ["lean", "network"])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_greedy_equals_full_passes_at_any_batch_size(batch_size: int, through: Any) -> None:
    model, prompts = llama(), some_prompts()
    wanted = [by_full_passes(model, prompt, 12) for prompt in prompts]
    assert any(one.stopped for one in wanted) and any(not one.stopped for one in wanted)
    got = generate(
        model, prompts, max_new_tokens=12, stop_ids=STOP, batch_size=batch_size, through=through
    )
    assert_same(got, wanted)


def test_order_of_prompts_changes_nothing() -> None:
    model, prompts = llama(), some_prompts()
    got = generate(model, prompts, max_new_tokens=8, stop_ids=STOP)
    turned = generate(model, prompts[::-1], max_new_tokens=8, stop_ids=STOP, batch_size=3)
    assert_same(got, turned[::-1])


def test_other_families_agree_with_full_passes() -> None:
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
    networks = [
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **common)),
        MistralForCausalLM(
            MistralConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                sliding_window=8,
                max_position_embeddings=64,
                **common,
            )
        ),
    ]
    prompts = some_prompts(6)
    for network in networks:
        model = SimpleNamespace(network=network.eval())
        wanted = [by_full_passes(model, prompt, 12) for prompt in prompts]
        got = generate(model, prompts, max_new_tokens=12, stop_ids=STOP, batch_size=4)
        assert_same(got, wanted)


def test_samples_do_not_depend_on_the_batch_but_on_seed_item_and_position() -> None:
    model, prompts = llama(), some_prompts(8)
    settings = {"max_new_tokens": 10, "stop_ids": STOP, "temperature": 1.0, "top_p": 0.9}
    one = generate(model, prompts, batch_size=1, seed=7, **settings)
    assert_same(generate(model, prompts, batch_size=8, seed=7, **settings), one)
    other = generate(model, prompts, batch_size=8, seed=8, **settings)
    assert [g.ids for g in other] != [g.ids for g in one]
    # The same prompt twice is two items: two independent samples.
    twins = generate(model, [prompts[0]] * 4, batch_size=4, **settings)
    assert len({tuple(g.ids) for g in twins}) > 1


def test_a_distinct_prompt_is_prefilled_once() -> None:
    model = llama()
    rows: list[tuple[int, ...]] = []
    forward = model.network.forward

    def counting(**kwargs: object) -> object:
        rows.append(tuple(kwargs["input_ids"].shape))  # type: ignore[attr-defined]
        return forward(**kwargs)

    model.network.forward = counting
    prompts = [[1, 2, 4, 5, 6]] * 6 + [[7, 8]] * 2
    settings = {"max_new_tokens": 3, "stop_ids": (), "batch_size": 8, "through": "network"}
    generate(model, prompts, temperature=1.0, **settings)
    assert [shape for shape in rows if shape[1] > 1] == [(2, 5)]
    assert rows[1] == (8, 1)
    rows.clear()
    generate(model, prompts, **settings)
    assert rows[1] == (2, 1), "equal prompts have one greedy answer"


def test_finished_sequences_leave_the_batch() -> None:
    model, prompts = llama(), some_prompts()
    widths: list[int] = []
    forward = model.network.forward

    def counting(**kwargs: object) -> object:
        widths.append(kwargs["input_ids"].shape[0])  # type: ignore[attr-defined]
        return forward(**kwargs)

    model.network.forward = counting
    results = generate(
        model, prompts, max_new_tokens=12, stop_ids=STOP, batch_size=16, through="network"
    )
    # Every token but an answer's last needs a forward pass of its own; none is wasted.
    assert sum(widths[1:]) == sum(len(one.ids) - 1 for one in results)


def test_sampling_follows_the_distribution() -> None:
    model = llama()
    prompt = [5, 6, 7]
    with torch.no_grad():
        logits = model.network(torch.tensor([prompt])).logits[0, -1]
    wanted = torch.softmax(logits.double() / 0.7, -1)
    draws = generate(
        model, [prompt] * 4000, max_new_tokens=1, stop_ids=(), temperature=0.7, batch_size=4000
    )
    counts = torch.bincount(torch.tensor([g.ids[0] for g in draws]), minlength=VOCABULARY)
    chi_square = ((counts - 4000 * wanted) ** 2 / (4000 * wanted).clamp_min(1e-9))[wanted > 1e-3]
    assert float(chi_square.sum()) < 2.0 * VOCABULARY
    narrow = generate(
        model, [prompt] * 50, max_new_tokens=1, stop_ids=(), temperature=1.0, top_p=1e-6
    )
    assert {g.ids[0] for g in narrow} == {int(logits.argmax())}


def test_stop_context_and_empty_budgets() -> None:
    model = llama(context=16)
    prompt = list(range(4, 14))
    long = generate(model, [prompt], max_new_tokens=50, stop_ids=())[0]
    assert len(long.ids) == 6 and not long.stopped, "the context of 16 ends the answer"
    first = long.ids[0]
    stopped = generate(model, [prompt], max_new_tokens=50, stop_ids={first})[0]
    assert stopped.ids == [first] and stopped.stopped and stopped.answer_ids == []
    assert generate(model, [], max_new_tokens=5, stop_ids=()) == []
    assert generate(model, [prompt], max_new_tokens=0, stop_ids=())[0].ids == []


def test_the_network_is_left_as_it_was() -> None:
    model = llama()
    model.network.train()
    model.network.set_attn_implementation("eager")
    generate(model, [[1, 2]], max_new_tokens=2, stop_ids=())
    assert model.network.training and model.network.config._attn_implementation == "eager"
    model.network.forward = None
    with pytest.raises(TypeError):
        generate(model, [[1, 2]], max_new_tokens=2, stop_ids=(), through="network")
    assert model.network.training and model.network.config._attn_implementation == "eager"


def test_training_still_works_after_decoding() -> None:
    model = llama()
    generate(model, some_prompts(4), max_new_tokens=3, stop_ids=STOP)
    model.network(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.network.lm_head.weight.grad is not None


def test_bad_input_is_named() -> None:
    model = llama(context=16)
    with pytest.raises(LehrError) as caught:
        generate(
            model,
            [[1], [], [1] * 16],
            max_new_tokens=-1,
            stop_ids=(),
            temperature=float("nan"),
            top_p=0.0,
            top_k=-1,
            min_p=1.0,
            batch_size=0,
        )
    places = [problem.where for problem in caught.value.problems]
    assert places == [
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "batch_size",
        "prompt 1",
        "prompt 2",
    ]


def test_nonfinite_logits_stop_generation() -> None:
    model = llama()
    with torch.no_grad():
        model.network.lm_head.weight[4, 0] = float("nan")
    with pytest.raises(Diverged):
        generate(model, [[1, 2]], max_new_tokens=3, stop_ids=())
