"""LoRA and vocabulary rows: mathematics, names, peft's loader, folding, swapping."""

from __future__ import annotations

import json

import pytest
import torch
from families import FAMILIES, model_of, network_of, tree_pack
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import oracle
from lehr.errors import RecipeError
from lehr.models.adapters import choose_targets
from lehr.models.language_model import LanguageModel
from lehr.models.loading import load_model, set_template
from lehr.models.tiny import train_tokenizer

TEXT = ["one two three four five six seven eight nine ten", "the cat sat on the mat"] * 4


def _stir(model: LanguageModel, seed: int = 1, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.trained().values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def _folder(tmp_path, family: str = "Llama", **changes):
    """A saved base with its own tokenizer, and the same as a LanguageModel."""
    tokenizer = train_tokenizer(TEXT, 300)
    network = network_of(family, vocab_size=len(tokenizer), **changes)
    model = LanguageModel(network, tokenizer, "base", source=str(tmp_path / "base"))
    model.save_full(tmp_path / "base")
    return model


def _logits(network, ids) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_starts_as_the_base_and_has_exact_gradients(family):
    model = model_of(family)
    pack = tree_pack()
    with torch.no_grad():
        before = model.hidden(pack)
    model.add_adapter(rank=4)
    with torch.no_grad():
        assert (model.hidden(pack) - before).abs().max() < 1e-5
    _stir(model)
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    found = oracle.gradients(stats.log_probability.sum(), model.trained())
    # The oracle: W + s B A in full, by autograd.
    plain = network_of(family)
    leaves, calls = {}, {}
    for name, parameter in model.trained().items():
        leaves[name] = parameter.detach().clone().requires_grad_()
    weights = dict(plain.named_parameters())
    for layer in model.adapter.targets:
        key = f"base_model.model.{layer}"
        product = 2.0 * leaves[f"{key}.lora_B.weight"] @ leaves[f"{key}.lora_A.weight"]
        weight = weights[f"{layer}.weight"].detach()
        calls[f"{layer}.weight"] = weight + (product.T if family == "GPT2" else product)

    wanted = oracle.pack_log_probabilities(_Callable(plain, calls), pack)
    assert (stats.log_probability - wanted).abs().max() < 2e-5
    expected = oracle.gradients(wanted.sum(), leaves)
    scale = max(float(g.norm()) for g in expected.values())
    for name in leaves:
        apart = float((found[name] - expected[name]).norm())
        assert apart < 1e-5 * max(float(expected[name].norm()), 1e-3 * scale), name


class _Callable:
    """A network under other weights."""

    def __init__(self, network, weights):
        self.network, self.weights, self.config = network, weights, network.config
        self._supports_sdpa = network._supports_sdpa

    def __call__(self, **keywords):
        return torch.func.functional_call(self.network, self.weights, kwargs=keywords)


def test_gradient_goes_on_to_a_weight_that_trains_too():
    model = model_of("Llama")
    model.add_adapter(rank=2)
    _stir(model)
    layer = model.network.model.layers[0].mlp.up_proj
    layer.weight.requires_grad_(True)
    x = torch.randn(3, 32).requires_grad_()
    found = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.lora_a))
    merged = layer.weight + layer.scale * layer.lora_b @ layer.lora_a
    expected = torch.autograd.grad((x @ merged.T).square().sum(), (x, layer.weight, layer.lora_a))
    for one, two in zip(found, expected, strict=True):
        assert oracle.relative_gap(one, two) < 1e-5


def test_dropout_acts_in_training_only_and_comes_from_the_global_stream():
    model = model_of("Llama")
    model.add_adapter(rank=2, dropout=0.5)
    _stir(model)
    pack = tree_pack()

    def run():
        torch.manual_seed(5)
        with torch.no_grad():
            return model.hidden(pack)

    model.train()
    first, again = run(), run()
    model.eval()
    assert torch.equal(first, again)
    assert not torch.allclose(first, run())
    assert torch.equal(run(), run())


def test_streams_are_named_by_layer():
    one, two = model_of("Llama"), model_of("Llama")
    one.add_adapter(rank=4, targets=["q_proj", "v_proj"])
    two.add_adapter(rank=4)
    both = one.state()
    assert all(torch.equal(both[name], two.state()[name]) for name in both)
    matrix = both["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert matrix.abs().max() <= 32**-0.5
    assert matrix.abs().max() > 0.9 * 32**-0.5


def test_targets_that_match_nothing_name_close_ones():
    model = model_of("Llama")
    with pytest.raises(RecipeError, match="q_proj"):
        model.add_adapter(targets=["q_porj", "v_proj"])
    with pytest.raises(RecipeError) as caught:
        model.add_adapter(targets=["nope", "lm_head"])
    assert len(caught.value.problems) == 2
    with pytest.raises(RecipeError):
        model.add_adapter(targets=[])
    with pytest.raises(RecipeError, match="rank"):
        model.add_adapter(rank=0)
    names = choose_targets(model.network, "all-linear")
    assert len(names) == 14
    assert "lm_head" not in names


def test_as_of_restores_bit_for_bit():
    model = model_of("Llama")
    pack = tree_pack()
    with torch.no_grad():
        base = model.hidden(pack)
        model.add_adapter(rank=4)
        start = model.state()
        _stir(model)
        pointers = {name: p.data_ptr() for name, p in model.trained().items()}
        kept, tuned = model.state(), model.hidden(pack)
        with model.as_of(None):
            assert torch.equal(model.hidden(pack), base)
            with model.as_of(kept):
                pass
        with model.as_of(start):
            assert (model.hidden(pack) - base).abs().max() < 1e-5
        with pytest.raises(KeyError), model.as_of(start):
            raise KeyError("inside")
        assert torch.equal(model.hidden(pack), tuned)
    assert pointers == {name: p.data_ptr() for name, p in model.trained().items()}
    assert all(torch.equal(kept[name], value) for name, value in model.state().items())


def test_as_of_another_model_is_refused():
    model = model_of("Llama")
    model.add_adapter(rank=4)
    state = model.state()
    state.pop(next(iter(state)))
    with pytest.raises(ValueError, match="1 tensors missing"), model.as_of(state):
        pass
    with pytest.raises(ValueError, match="shape"):
        model.load_state({name: value[:1] for name, value in model.state().items()})
    model = model_of("Llama")
    model.train_all()
    with pytest.raises(ValueError, match="no bare base"), model.as_of(None):
        pass


def test_all_weights_swap_too():
    model = model_of("Llama")
    model.train_all()
    pack = tree_pack()
    with torch.no_grad():
        before, state = model.hidden(pack), model.state()
        _stir(model)
        after = model.hidden(pack)
        with model.as_of(state):
            assert torch.equal(model.hidden(pack), before)
        assert torch.equal(model.hidden(pack), after)


def test_divergence_between_heads_of_two_states():
    model = model_of("Llama")
    model.train_all()
    pack = tree_pack()
    with torch.no_grad():
        state, first, head = model.state(), model.hidden(pack), None
        _stir(model, size=0.05)
        with model.as_of(state):
            head = model.head().detached()
        second = model.hidden(pack)
        found = model.divergence(first, second, pack.predict_from, head_p=head)
        with model.as_of(state):
            logits = model.head().logits(first[pack.predict_from])
        wanted = oracle.divergence(logits, model.head().logits(second[pack.predict_from]))
    assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "GPT2", "Phi3"])
def test_plain_peft_loads_it(tmp_path, family):
    model = _folder(tmp_path, family)
    model.add_adapter(rank=4, alpha=6)
    _stir(model)
    model.save_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(5, 25)[None]
    with model.attention():
        assert (_logits(theirs, ids) - _logits(model.network, ids)).abs().max() < 1e-5
    keys = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert keys == set(model.trained())
    again = load_model(str(tmp_path / "base"))
    again.load_adapter(tmp_path / "adapter")
    assert again.adapter == model.adapter
    assert all(torch.equal(again.state()[name], value) for name, value in model.state().items())


def test_a_share_of_the_layers_survives_the_round_trip(tmp_path):
    model = _folder(tmp_path)
    model.add_adapter(rank=4, targets=["layers.0.self_attn.q_proj", "v_proj"])
    _stir(model)
    model.save_adapter(tmp_path / "adapter")
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    ids = torch.arange(5, 25)[None]
    with model.attention():
        assert (_logits(theirs, ids) - _logits(model.network, ids)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Olmo2"])
def test_merged_folder_is_the_tuned_model(tmp_path, family, dtype):
    model = _folder(tmp_path, family)
    model.add_adapter(rank=4)
    _stir(model)
    live = {name: p.clone() for name, p in model.network.named_parameters()}
    model.save_merged(tmp_path / "merged", dtype)
    assert all(torch.equal(live[name], p) for name, p in model.network.named_parameters())
    assert not list((tmp_path / "merged").glob("*.bin"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain.dtype == dtype
    ids = torch.arange(5, 25)[None]
    with model.attention():
        gap = (_logits(plain, ids).float() - _logits(model.network, ids)).abs().max()
    assert gap < (1e-4 if dtype == torch.float32 else 0.5)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert loaded("the cat")["input_ids"] == model.tokenizer("the cat")["input_ids"]


def test_fold_is_the_same_model_without_an_adapter():
    model = model_of("GPT2")
    pack = tree_pack()
    model.add_adapter(rank=4)
    _stir(model)
    with torch.no_grad():
        before = model.hidden(pack)
        model.fold_adapter()
        assert model.adapter is None
        assert (model.hidden(pack) - before).abs().max() < 1e-4
    assert model.trained() == {}
    model.add_adapter(rank=2)
    assert model.trained()


def test_frozen_bf16_base_with_fp32_adapter():
    model = model_of("Llama", precision="bf16")
    model.add_adapter(rank=4)
    pack = tree_pack()
    assert {p.dtype for p in model.trained().values()} == {torch.float32}
    assert model.network.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    wanted = oracle.pack_log_probabilities(model.network, pack)
    assert (stats.log_probability - wanted).abs().mean() < 0.05
    gradients = oracle.gradients(stats.log_probability.sum(), model.trained())
    assert all(g.dtype == torch.float32 for g in gradients.values())


def test_all_weights_in_bf16_keep_fp32_masters():
    model = model_of("Llama", precision="bf16")
    exact = model_of("Llama")
    model.train_all()
    exact.train_all()
    with torch.no_grad():
        for one, two in zip(exact.trained().values(), model.trained().values(), strict=True):
            one.copy_(two)
    pack = tree_pack()
    results = []
    for each in (model, exact):
        stats = each.token_stats(each.hidden(pack), pack.predict_from, pack.targets)
        results.append((stats, oracle.gradients(stats.log_probability.sum(), each.trained())))
    (stats, found), (wanted, expected) = results
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert (stats.log_probability - wanted.log_probability).abs().mean() < 0.05
    name = "model.embed_tokens.weight"
    assert oracle.relative_gap(found[name], expected[name]) < 0.05


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma3Text"])
def test_new_vocabulary_rows_train_and_travel(tmp_path, family):
    """Tied (Llama, Gemma) and untied (Qwen2) output layers."""
    tied = family != "Qwen2"
    model = _folder(tmp_path, family, tie_word_embeddings=tied)
    old = model.network.get_input_embeddings().weight.detach().clone()
    rows = set_template(model.network, model.tokenizer, "chatml")
    model.new_rows = tuple(rows)
    assert rows == [len(old), len(old) + 1]
    model.add_adapter(rank=4)
    _stir(model)
    assert torch.equal(model.network.get_input_embeddings().weight[: len(old)], old)
    model.save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    names = {"embed_tokens": rows} if tied else {"embed_tokens": rows, "lm_head": rows}
    assert config["trainable_token_indices"] == names
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, *rows, 7, rows[0], 8]])
    with model.attention():
        assert (_logits(theirs, ids) - _logits(model.network, ids)).abs().max() < 1e-5
    model.save_merged(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with model.attention():
        assert (_logits(plain, ids) - _logits(model.network, ids)).abs().max() < 1e-4
    merged = plain.get_input_embeddings().weight
    assert torch.equal(merged[: len(old)], old)
    again = load_model(str(tmp_path / "adapter"))
    assert any("added to its base" in notice for notice in again.notices)
    with model.attention(), again.attention():
        assert (_logits(again.network, ids) - _logits(model.network, ids)).abs().max() < 1e-4


def test_rows_have_the_oracles_gradient():
    model = model_of("Llama")
    model.add_adapter(rank=2, rows=[5, 96])
    pack = tree_pack()
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    found = oracle.gradients(stats.log_probability.sum(), model.trained())
    full = model_of("Llama")
    full.train_all()
    wanted = oracle.pack_log_probabilities(full.network, pack)
    expected = oracle.gradients(wanted.sum(), full.trained())["model.embed_tokens.weight"]
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    assert oracle.relative_gap(found[name], expected[[5, 96]]) < 1e-5


def test_rows_fit_an_embedding_that_is_wider_than_the_tokenizer(tmp_path):
    """No resize where spare rows exist: then plain PeftModel loads it too."""
    tokenizer = train_tokenizer(TEXT, 280)
    network = network_of("Llama", vocab_size=len(tokenizer) + 40)
    model = LanguageModel(network, tokenizer, "base", source=str(tmp_path / "base"))
    model.save_full(tmp_path / "base")
    rows = set_template(network, tokenizer, "chatml")
    model.new_rows = tuple(rows)
    assert model.vocabulary_size == len(tokenizer) + 38
    mean = network.get_input_embeddings().weight[: rows[0]].mean(0)
    assert torch.allclose(network.get_input_embeddings().weight[rows[0]], mean, atol=1e-6)
    model.add_adapter(rank=2)
    _stir(model)
    model.save_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.tensor([[5, *rows, 7]])
    with model.attention():
        assert (_logits(theirs, ids) - _logits(model.network, ids)).abs().max() < 1e-5


def test_recompute_changes_no_number():
    model = model_of("Llama")
    model.add_adapter(rank=2)
    _stir(model)
    model.train()
    pack = tree_pack()
    results = []
    for kind in ("none", "full"):
        model.recompute(kind)
        stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
        results.append(oracle.gradients(stats.log_probability.sum(), model.trained()))
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())
