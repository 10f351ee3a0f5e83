"""A base in four bits: against arithmetic by hand, and against the same base dequantised."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lehr.errors import RecipeError
from lehr.generation.admission import decode_in_place, why_not_lean
from lehr.generation.decode import generate
from lehr.models import bitsandbytes as library
from lehr.models import nf4
from lehr.models.language_model import LanguageModel
from lehr.models.loading import load_model
from lehr.models.probe import admission_probe, probe_pack
from lehr.models.recompute_costs import Costs
from lehr.models.saving import base_weights

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: lehr[quant]")

WHOLE_BLOCKS = [(10, 64), (3, 128), (64, 576), (300, 64)]
CUT_BLOCKS = [(10, 96), (64, 48), (7, 100), (5, 33), (3, 7), (2, 190), (1, 1)]


def network(tied: bool = False, hidden: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=tied)).eval()


def pair(precision: str = "fp32", dropout: float = 0.0) -> tuple[LanguageModel, LanguageModel]:
    """A base in four bits, and the same one dequantised; both with the same adapter."""
    found = []
    for put in (nf4.quantise, nf4.round_trip):
        made = network()
        put(made)
        made.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        model = LanguageModel(made, None, "n", precision=precision)
        model.add_adapter(rank=4, dropout=dropout)
        with torch.no_grad():
            for number, tensor in enumerate(model.trained().values()):
                torch.manual_seed(number)
                tensor.normal_(std=0.05)
        found.append(model)
    return found[0], found[1]


def gradient(model: LanguageModel) -> dict[str, torch.Tensor]:
    pack = probe_pack([(torch.arange(20) % 90, -1), (torch.arange(9), -1)])
    for tensor in model.trained().values():
        tensor.grad = None
    model.train()
    torch.manual_seed(7)
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    stats.log_probability.sum().backward()
    return {name: tensor.grad for name, tensor in model.trained().items()}


def by_hand(weight: torch.Tensor) -> torch.Tensor:
    """NF4 with scales in fp32, number by number: what 8 bits a scale then change is small."""
    flat, found = weight.reshape(-1), []
    for block in flat.split(64):
        largest = block.abs().max()
        table = torch.tensor(nf4.CODES)
        nearest = (block[:, None] / largest - table).abs().argmin(1)
        found.append(table[nearest] * largest)
    return torch.cat(found).view(weight.shape)


# The numbers


def test_codes_are_the_sixteen_of_the_paper_times_the_largest_of_a_block():
    weight = torch.tensor(nf4.CODES).repeat(4).view(1, 64) * 0.5
    back = nf4.Nf4Weight.of(weight).dense(torch.float32)
    # A block's scale is rounded to 8 bits: within a 256th.
    assert torch.allclose(back, weight, atol=0.5 / 128)
    between = torch.full((1, 64), 0.02)
    between[0, 0] = 1.0
    assert torch.allclose(nf4.Nf4Weight.of(between).dense(torch.float32)[0, 1:], torch.zeros(63))


@pytest.mark.parametrize("shape", WHOLE_BLOCKS + CUT_BLOCKS)
def test_every_weight_comes_back_as_its_nearest_code(shape):
    """bitsandbytes' own way back has errors of a whole block's largest where rows cut blocks."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = nf4.Nf4Weight.of(weight).dense(torch.float32)
    expected = by_hand(weight)
    # Scales lie within a few percent of each other, and 8 bits cover their range.
    assert (found - expected).abs().max() < 0.02 * weight.abs().max()


@pytest.mark.parametrize("shape", WHOLE_BLOCKS + CUT_BLOCKS)
def test_codes_and_scales_are_bitsandbytes_own(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.03
    own = library.functional()
    packed, state = own.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    made = nf4.Nf4Weight.of(weight)
    assert torch.equal(made.packed[: len(packed)], packed)
    assert torch.equal(made.scales, state.absmax) and torch.equal(made.offset, state.offset)
    assert torch.equal(made.outer.absmax, state.state2.absmax)
    again = nf4.Nf4Weight.from_state(packed, state)
    assert torch.equal(again.dense(torch.float32), made.dense(torch.float32))
    if shape in WHOLE_BLOCKS:
        assert torch.equal(made.dense(torch.float32), own.dequantize_4bit(packed, state))
    # Rounded once: bf16 is fp32, cast. From files in bf16 or fp32, the same numbers.
    assert torch.equal(made.dense(torch.bfloat16), made.dense(torch.float32).bfloat16())
    narrow = weight.bfloat16()
    assert torch.equal(nf4.Nf4Weight.of(narrow).packed, nf4.Nf4Weight.of(narrow.float()).packed)


def test_bytes_by_hand():
    assert nf4.nf4_bytes(4096 * 4096) == 4096 * 4096 // 2 + 262_144 + 4 * 1024
    for shape in ((64, 128), (5, 33)):
        made = nf4.Nf4Weight.of(torch.randn(shape))
        assert made.bytes == made.packed.nbytes + made.scales.nbytes + made.outer.absmax.nbytes
        there = nf4.Nf4Weight.of(torch.empty(shape, device="meta"))
        assert (there.bytes, there.packed.nbytes) == (made.bytes, made.packed.nbytes)


def test_moved_and_cast_the_codes_stay():
    layer = nf4.Nf4Linear(nf4.Nf4Weight.of(torch.randn(8, 64)), None, torch.float32)
    before = layer.weight
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    layer.to(torch.float32)
    assert torch.equal(layer.weight, before)
    again = layer.quantised.to(torch.device("cpu"))
    assert torch.equal(again.dense(torch.float32), before)
    assert layer.to("meta").quantised.device.type == "meta"


# A model over it


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_bits_as_the_dequantised_base(precision, dropout):
    four, dense = pair(precision, dropout)
    ours, theirs = gradient(four), gradient(dense)
    for name in theirs:
        assert bool(theirs[name].abs().sum() > 0)
        # With dropout the two layers add the same terms in another order.
        same = torch.allclose if dropout else torch.equal
        assert same(ours[name], theirs[name]), name
    pack = probe_pack([(torch.arange(20) % 90, -1)])
    with torch.no_grad(), four.as_of(None), dense.as_of(None):  # a reference: the adapter off
        assert torch.equal(four.hidden(pack), dense.hidden(pack))
    assert admission_probe(four) == []


def test_one_layer_against_plain_autograd():
    four, _ = pair()
    layer = four.network.model.layers[0].mlp.down_proj
    x = torch.randn(7, 128, requires_grad=True)
    a, b = (one.detach().clone().requires_grad_() for one in (layer.lora_a, layer.lora_b))
    expected = F.linear(x, layer.weight) + layer.scale * F.linear(F.linear(x, a), b)
    expected.square().sum().backward()
    by_autograd = [x.grad, a.grad, b.grad]
    x.grad = None
    found = layer(x)
    found.square().sum().backward()
    assert torch.allclose(found, expected, atol=1e-5)
    for ours, theirs in zip(
        [x.grad, layer.lora_a.grad, layer.lora_b.grad], by_autograd, strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_no_dense_weight_is_kept_for_the_backward_pass():
    four, dense = pair()
    pack = probe_pack([(torch.arange(30) % 90, -1)])
    kept = []
    for model in (four, dense):
        model.train()
        kept.append(Costs(model, pack).of("none").kept_bytes)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_computed_again_with_the_same_bits(dropout):
    four, _ = pair(dropout=dropout)
    expected = gradient(four)
    for choice in ("full", "selective"):
        four.recompute(choice)
        found = gradient(four)
        assert all(torch.equal(found[name], expected[name]) for name in expected), choice


def test_decoding_by_every_path_writes_the_same():
    four, dense = pair()
    prompts = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    keys = {"max_new_tokens": 12, "stop_ids": frozenset()}
    expected = [one.ids for one in generate(dense, prompts, through="network", **keys)]
    assert why_not_lean(four.network) == ""
    for through in ("auto", "lean", "network"):
        assert [one.ids for one in generate(four, prompts, through=through, **keys)] == expected
    merged = generate(four, prompts, merge_adapter=True, **keys)
    assert [one.ids for one in merged] == expected
    decode_in_place(four.network, True)
    assert "no room" in why_not_lean(four.network)
    assert [one.ids for one in generate(four, prompts, **keys)] == expected


def test_taken_off_and_merged_it_is_the_dequantised_base():
    four, dense = pair()
    ours = four._merged(base_weights(four.network), torch.float32)
    theirs = dense._merged(base_weights(dense.network), torch.float32)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    four.drop_adapter()
    assert type(four.network.model.layers[0].mlp.up_proj) is nf4.Nf4Linear
    with pytest.raises(ValueError, match="cannot train"):
        four.train_all()
    four.add_adapter(rank=2)
    with pytest.raises(ValueError, match="four bits"):
        four.fold_adapter()


def test_a_tied_head_stays_as_it_is():
    tied = network(tied=True)
    count = sum(parameter.numel() for parameter in tied.parameters())
    assert nf4.quantise(tied) == 14
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert nf4.parameter_count(tied) == count


# What cannot be had


def test_without_bitsandbytes_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=r"pip install 'lehr\[quant\]'"):
        nf4.quantise(network())
    with pytest.raises(RecipeError, match=r"pip install 'lehr\[quant\]'"):
        load_model("nowhere", four_bits=True)  # before anything is read


def test_layers_of_another_kind_are_refused():
    odd = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(RecipeError, match="no plain linear layers"):
        nf4.quantise(odd)


def test_the_import_fetches_nothing(monkeypatch):
    """bitsandbytes asks an installed `kernels` for compiled code, from a hub, when imported."""
    asked = []
    module = types.ModuleType("kernels")
    module.get_kernel = lambda *_, **__: asked.append(1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", module)
    for name in [one for one in sys.modules if one.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    # The real one registers its operators, once a process: another one asks in its place.
    finder = _Asks(asked)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    library.functional.__wrapped__()
    assert finder.imported and not asked
    assert sys.modules["kernels"] is module
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


class _Asks:
    """Finds a `bitsandbytes` that does what the real one does when it is imported."""

    def __init__(self, asked: list[int]) -> None:
        self.asked, self.imported = asked, False

    def find_spec(self, name, path=None, target=None):
        from importlib.machinery import ModuleSpec

        if name.split(".")[0] != "bitsandbytes":
            return None
        return ModuleSpec(name, self, is_package=name == "bitsandbytes")

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.imported = True
        try:
            from kernels import get_kernel

            get_kernel("somewhere")
        except ImportError:
            pass
