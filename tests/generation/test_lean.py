"""The lean pass: the networks' own numbers, adapters, windows, batches, the training pass."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, model_of, network_of
from torch import Tensor

from lehr.data.packing import single
from lehr.data.shapes import Encoded, Origin
from lehr.errors import Diverged, LehrError
from lehr.generation import admission
from lehr.generation.admission import why_not_lean
from lehr.generation.decode import Generated, generate
from lehr.generation.lean_batch import LeanBatch
from lehr.generation.lean_network import HeadProduct, LeanNetwork, attend
from lehr.generation.products import Product, packing_possible, to_int8
from lehr.generation.rows import Group
from lehr.generation.step_desk import StepDesk
from lehr.models.head import head_of
from lehr.models.language_model import LanguageModel

LEAN = ("Llama", "Mistral", "Qwen2", "Qwen3")
STOP = frozenset({3, 4, 5})
PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14], [20], [31, 32, 33], [7, 8, 9], [60, 61, 62, 63, 64, 65]]


def adapted(family: str, precision: str = "fp32", rows: tuple[int, ...] = ()) -> LanguageModel:
    """A model with a LoRA whose numbers are random, so that it matters."""
    model = model_of(family, precision=precision)
    model.add_adapter(rank=3, rows=rows)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.trained().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def training_gaps(model: LanguageModel, prompts: Any, written: list[Generated]) -> Tensor:
    """Log-probabilities while decoding less those of the training pass, of every new token."""
    gaps = []
    for prompt, one in zip(prompts, written, strict=True):
        ids = torch.tensor([*prompt, *one.ids])
        supervised = torch.arange(len(ids)) >= len(prompt)
        pack = single(0, Encoded(ids, supervised, Origin("test", "sample", 0)))
        with torch.no_grad():
            hidden = model.hidden(pack)
            values = model.token_stats(hidden, pack.predict_from, pack.targets).log_probability
        gaps.append(torch.tensor(one.log_probabilities) - values)
    return torch.cat(gaps)


@pytest.mark.parametrize("family", FAMILIES)
def test_admitted_are_the_llama_shapes_alone(family: str) -> None:
    reason = why_not_lean(network_of(family))
    assert (reason == "") == (family in LEAN), reason


def test_what_only_a_measurement_shows_is_refused() -> None:
    # Granite has the modules of a Llama, and multiplies embeddings and residuals.
    assert "differ from the network's own" in why_not_lean(network_of("Granite"))


@pytest.mark.parametrize("family", [*FAMILIES, "Gemma"])
def test_every_family_decodes_what_the_training_pass_says(family: str) -> None:
    model = model_of(family)
    settings: dict[str, Any] = {"max_new_tokens": 14, "stop_ids": STOP, "seed": 3}
    for temperature in (0.0, 1.0):
        written = generate(model, PROMPTS, temperature=temperature, batch_size=3, **settings)
        assert float(training_gaps(model, PROMPTS, written).abs().max()) <= 1e-4
        alone = generate(model, PROMPTS, temperature=temperature, batch_size=1, **settings)
        assert [one.ids for one in written] == [one.ids for one in alone]
        assert [one.stopped for one in written] == [one.stopped for one in alone]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=["every head its own", "one group", "biases", "another activation", "scaled positions"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_llama_may_vary(changes: dict[str, Any], precision: str) -> None:
    model = model_of("Llama", precision=precision, **changes)
    written = generate(
        model, PROMPTS, through="lean", max_new_tokens=16, stop_ids=(), temperature=1.0
    )
    gaps = training_gaps(model, PROMPTS, written).abs()
    assert float(gaps.max() if precision == "fp32" else gaps.mean()) <= (
        1e-4 if precision == "fp32" else 3e-2
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_are_refused(kind: str) -> None:
    network = network_of("Llama")
    network.config.rope_parameters = {**network.config.rope_parameters, "rope_type": kind}
    assert kind in why_not_lean(network)


def test_a_window_that_is_not_understood_is_refused() -> None:
    network = network_of("Llama")
    network.config.sliding_window = 64  # longer than any probe
    assert "window" in why_not_lean(network)


@pytest.mark.parametrize("merge", [False, True], ids=["unmerged", "merged"])
@pytest.mark.parametrize("family", LEAN)
def test_an_adapter_in_the_lean_pass(family: str, merge: bool) -> None:
    model = adapted(family, rows=(11, 40))
    own = {"max_new_tokens": 10, "stop_ids": STOP, "temperature": 1.0}
    written = generate(model, PROMPTS, through="lean", merge_adapter=merge, **own)
    assert float(training_gaps(model, PROMPTS, written).abs().max()) <= 1e-4
    by_network = generate(model, PROMPTS, through="network", **own)
    assert [one.ids for one in written] == [one.ids for one in by_network]
    with model.as_of(None):
        bare = generate(model, PROMPTS, through="lean", merge_adapter=merge, **own)
    assert [one.ids for one in bare] != [one.ids for one in written]


@pytest.mark.parametrize("family", LEAN)
def test_bf16_stays_near_the_training_pass(family: str) -> None:
    model = adapted(family, precision="bf16")
    written = generate(
        model, PROMPTS * 4, through="lean", max_new_tokens=24, stop_ids=(), temperature=1.0
    )
    assert float(training_gaps(model, PROMPTS * 4, written).abs().mean()) <= 3e-2


def test_rows_do_not_depend_on_who_shares_the_batch() -> None:
    model = model_of("Mistral")
    settings: dict[str, Any] = {"max_new_tokens": 9, "stop_ids": STOP, "temperature": 1.0}
    seeds = [50, 51, 52, 53, 54]
    all_of_them = generate(model, PROMPTS, row_seeds=seeds, batch_size=2, **settings)
    turned = generate(model, PROMPTS[::-1], row_seeds=seeds[::-1], batch_size=4, **settings)
    assert [one.ids for one in turned[::-1]] == [one.ids for one in all_of_them]
    for prompt, seed, one in zip(PROMPTS, seeds, all_of_them, strict=True):
        assert generate(model, [prompt], row_seeds=[seed], **settings)[0].ids == one.ids


def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[int]]:
    """(lengths of the prompts of each prefill, rows of each step) from now on."""
    prefills: list[list[int]] = []
    steps: list[int] = []
    prefill, step = LeanNetwork.prefill, LeanNetwork.step

    def counting_prefill(self: Any, prompts: Any) -> Any:
        prefills.append([len(prompt) for prompt in prompts])
        return prefill(self, prompts)

    def counting_step(self: Any, tokens: Tensor, *others: Any) -> Any:
        steps.append(tokens.numel())
        return step(self, tokens, *others)

    monkeypatch.setattr(LeanNetwork, "prefill", counting_prefill)
    monkeypatch.setattr(LeanNetwork, "step", counting_step)
    return prefills, steps


def test_a_distinct_prompt_is_prefilled_once_though_its_answers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("Llama")
    assert why_not_lean(model.network) == ""  # the probe is not counted
    prefills, _ = counted(monkeypatch)
    prompts = [[7, 8, 9, 10]] * 7 + [[20, 21]] * 5 + [[30]]
    settings: dict[str, Any] = {"max_new_tokens": 6, "stop_ids": STOP, "temperature": 1.0}
    written = generate(model, prompts, batch_size=3, **settings)
    assert sorted(length for one in prefills for length in one) == [1, 2, 4]
    separate = generate(model, prompts, batch_size=1, **settings)
    assert [one.ids for one in written] == [one.ids for one in separate]


def test_finished_rows_leave_and_waiting_ones_take_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("Qwen3")
    assert why_not_lean(model.network) == ""
    _, steps = counted(monkeypatch)
    prompts = [[n, n + 1, n + 2] for n in range(6, 46)]
    written = generate(
        model, prompts, max_new_tokens=12, stop_ids=STOP, temperature=1.0, batch_size=8
    )
    assert len({len(one.ids) for one in written}) > 3
    # Every token but an answer's last is one row of one step; none is wasted.
    assert sum(steps) == sum(len(one.ids) - 1 for one in written)
    # While prompts wait, a free row misses one step at most.
    half = steps[: len(steps) // 2]
    assert max(half) == 8 and all(a + b > 8 for a, b in itertools.pairwise(half))
    assert sum(half) > 7 * len(half)


def test_slots_move_with_their_rows() -> None:
    network = network_of("Llama")
    lean = LeanBatch(LeanNetwork(network), 4)
    with torch.no_grad():
        lean.admit([Group(tuple(prompt), ((i,),)) for i, prompt in enumerate(PROMPTS[:4])])
        order = lean.keep([1, 3])
        assert sorted(order) == [1, 3]
        got = lean.step(torch.tensor([50, 51]))
        for row, source in enumerate(order):
            ids = torch.tensor([[*PROMPTS[source], 50 + row]])
            assert torch.allclose(got[row], network(ids).logits[0, -1], atol=1e-5)


def test_the_head_is_that_of_training() -> None:
    for family, rows in (("Llama", ()), ("Llama", (5, 90)), ("Qwen2", (0,))):
        model = adapted(family, rows=rows)
        hidden = torch.randn(4, 32)
        own = HeadProduct(model.network, "plain")(hidden)
        assert torch.equal(own, head_of(model.network).detached().logits(hidden))


def test_products_are_the_layers_one_by_one() -> None:
    model = adapted("Qwen2")  # with biases
    attention: Any = model.network.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(5, 32)
    wanted = torch.cat([layer(x) for layer in layers], dim=1).detach()
    for merge in (False, True):
        got = Product(layers, torch.float32, "plain", merge)(x)
        assert torch.allclose(got, wanted, atol=1e-5)
    assert torch.equal(wanted, torch.cat([layer(x) for layer in layers], dim=1)), "weights moved"


def test_large_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lehr.generation.products.FUSED_ELEMENTS", 10)
    model = adapted("Qwen2")
    written = generate(model, PROMPTS, max_new_tokens=6, stop_ids=STOP, through="lean")
    assert float(training_gaps(model, PROMPTS, written).abs().max()) <= 1e-4


@pytest.mark.parametrize("positions", [3, 40])
def test_one_row_kept_in_fp32_attends_as_many_in_bf16_do(positions: int) -> None:
    network = LeanNetwork(model_of("Qwen3", precision="bf16").network)
    generator = torch.Generator().manual_seed(positions)
    shape = network.shape
    query = torch.randn(1, shape.heads, shape.head_size, generator=generator).bfloat16()
    seen = []
    for rows in (1, 2):
        cache = network.new_cache(rows)
        assert cache.dtype == (torch.float32 if rows == 1 else torch.bfloat16)
        size = (len(network.blocks), shape.groups, positions, shape.head_size)
        for slot in range(rows):
            cached = torch.Generator().manual_seed(1)
            cache.place(slot, *(torch.randn(size, generator=cached).bfloat16() for _ in range(2)))
        at = torch.tensor([positions - 1] * rows)
        desk = StepDesk(rows, cache)
        mask = desk.masks(at, [None])[None]
        seen.append(attend(query.expand(rows, -1, -1), desk.layers[0], mask, 0.3)[0])
    torch.testing.assert_close(seen[0], seen[1], rtol=2e-2, atol=2e-3)


@pytest.mark.skipif(not packing_possible(torch.bfloat16), reason="no bf16 products here")
def test_packed_weights_give_the_same_bits() -> None:
    model = model_of("Llama", precision="bf16")
    packed, plain = (LeanNetwork(model.network, kind) for kind in ("packed", "plain"))
    with torch.no_grad():
        assert torch.equal(packed.prefill(PROMPTS)[0], plain.prefill(PROMPTS)[0])


@pytest.mark.skipif(not packing_possible(torch.bfloat16), reason="no bf16 products here")
def test_in_bf16_a_row_has_the_same_bits_beside_any_others() -> None:
    model = model_of(
        "Llama", precision="bf16", hidden_size=192, intermediate_size=1536, num_hidden_layers=4
    )
    prompts = [[n, n + 1, *range(40, 40 + n % 7)] for n in range(6, 18)]
    settings: dict[str, Any] = {"max_new_tokens": 20, "stop_ids": STOP, "temperature": 1.0}
    wanted = generate(model, prompts, batch_size=12, **settings)
    for batch_size in (2, 5, 7):
        got = generate(model, prompts, batch_size=batch_size, **settings)
        assert [one.log_probabilities for one in got] == [one.log_probabilities for one in wanted]
        assert [one.ids for one in got] == [one.ids for one in wanted]


def test_eight_bits_are_near_and_say_so() -> None:
    codes, scales = to_int8(torch.tensor([[1.0, -2.0, 0.3], [0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[64, -127, 19], [0, 0, 0]]
    assert float(scales[0]) == pytest.approx(2 / 127)
    model = adapted("Llama", precision="bf16")
    settings: dict[str, Any] = {"max_new_tokens": 16, "stop_ids": (), "temperature": 1.0}
    gaps = training_gaps(model, PROMPTS, generate(model, PROMPTS, int8=True, **settings))
    near = training_gaps(model, PROMPTS, generate(model, PROMPTS, **settings))
    assert float(near.abs().mean()) < float(gaps.abs().mean()) < 0.2


def test_what_needs_the_lean_pass_is_refused_elsewhere() -> None:
    model = SimpleNamespace(network=network_of("Gemma2"))
    for how in ({"int8": True}, {"merge_adapter": True}, {"through": "lean"}):
        with pytest.raises(LehrError, match="lean pass"):
            generate(model, PROMPTS, max_new_tokens=2, stop_ids=(), **how)


def test_weights_that_are_not_finite_raise_and_leave_no_verdict() -> None:
    model = model_of("Llama")
    weight = model.network.lm_head.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[9, 0] = float("nan")
        with pytest.raises(Diverged, match="finite logits"):
            generate(model, PROMPTS, max_new_tokens=3, stop_ids=())
        weight.copy_(kept)
    assert why_not_lean(model.network) == ""


def test_the_verdict_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of("Llama")
    assert why_not_lean(network) == ""
    monkeypatch.setattr(admission, "_measured", lambda _: pytest.fail("measured again"))
    assert why_not_lean(network) == ""


def test_weights_of_the_moment_are_used() -> None:
    model = adapted("Llama")
    settings: dict[str, Any] = {"max_new_tokens": 8, "stop_ids": (), "through": "lean"}
    before = generate(model, PROMPTS, **settings)
    with torch.no_grad():
        for parameter in model.trained().values():
            parameter.mul_(-2.0)
    after = generate(model, PROMPTS, **settings)
    assert [one.ids for one in after] != [one.ids for one in before]
    assert float(training_gaps(model, PROMPTS, after).abs().max()) <= 1e-4
