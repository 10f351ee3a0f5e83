"""The admission probe: admits what is exact, refuses the rest by name with a remedy."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import FAMILIES, model_of, network_of

from lehr.models import head, language_model
from lehr.models.language_model import LanguageModel
from lehr.models.probe import admission_probe


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_families_are_admitted(family):
    assert admission_probe(model_of(family)) == []


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_bf16_is_admitted(family):
    assert admission_probe(model_of(family, precision="bf16")) == []


def test_all_weights_under_autocast_are_admitted():
    model = model_of("Qwen3", precision="bf16")
    model.train_all()
    assert admission_probe(model) == []


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_length_are_refused(kind):
    rotary = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rotary |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rotary["original_max_position_embeddings"] = 64
    refusals = admission_probe(model_of("Llama", rope_parameters=rotary))
    assert [refusal.path for refusal in refusals] == ["packing"]
    assert kind in refusals[0].name
    assert "packing: false" in refusals[0].remedy


def test_recurrent_layers_are_refused():
    config = transformers.Qwen3NextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    network = transformers.Qwen3NextForCausalLM(config).eval()
    refusals = admission_probe(LanguageModel(network, None, "next"))
    assert "recurrent" in refusals[0].name


def test_attention_sinks_are_refused_by_name():
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    network = transformers.GptOssForCausalLM(config).eval()
    refusals = admission_probe(LanguageModel(network, None, "oss"))
    assert refusals[0].path == "model"
    assert "s_aux=" in refusals[0].reason


def test_an_attention_that_cannot_be_exchanged_is_refused():
    """An own attention leaves the plan unused."""
    model = model_of("Llama")
    for layer in model.network.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    refusals = admission_probe(model)
    assert refusals[0].path == "model"
    assert "attention interface" in refusals[0].reason


def test_a_wrong_head_is_seen(monkeypatch):
    """The fault: the soft cap is left out."""

    def bare(network):
        return head.Head(network.get_output_embeddings().weight)

    monkeypatch.setattr(language_model, "head_of", bare)
    assert admission_probe(model_of("Gemma2"))[0].path == "head"
    assert admission_probe(model_of("Cohere"))[0].path == "head"


def test_a_leak_is_seen_in_packing_and_in_branches(monkeypatch):
    """The fault: attention causal over the whole pack, positions restarted."""
    from lehr.data.shapes import Segments

    honest = language_model.plan_segments

    def one_segment(segments, tokens):
        whole = Segments(torch.tensor([0]), torch.tensor([tokens]), torch.tensor([-1]))
        return honest(whole, tokens)

    monkeypatch.setattr(language_model, "plan_segments", one_segment)
    for precision in ("fp32", "bf16"):
        paths = [r.path for r in admission_probe(model_of("Llama", precision=precision))]
        assert "packing" in paths
        assert "prefix sharing" in paths


def test_a_branch_cut_off_from_its_prompt_is_seen(monkeypatch):
    """The fault: restarted positions isolate a branch from its prompt."""
    from lehr.data.shapes import Segments

    honest = language_model.plan_segments

    def no_prefix(segments, tokens):
        alone = torch.full_like(segments.prefix, -1)
        return honest(Segments(segments.start, segments.length, alone), tokens)

    monkeypatch.setattr(language_model, "plan_segments", no_prefix)
    assert [r.path for r in admission_probe(model_of("Llama"))] == ["prefix sharing"]


def test_the_mode_is_put_back():
    model = LanguageModel(network_of("Llama"), None, "llama")
    model.train()
    admission_probe(model)
    assert model.training
