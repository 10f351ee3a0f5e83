"""Tiny models made from scratch, with a tokenizer of the run's own text.

`1m` is a Llama architecture; `1m+qk_norm` the same with Qwen3's norms: each head's queries and
keys go through an RMSNorm before they are rotated, which bounds the attention logits (Henry et
al. 2020, arXiv 2010.04245; Wortsman et al. 2023, arXiv 2309.14322, section 3.1.1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch

from lehr.errors import Problem, RecipeError
from lehr.streams import seed_for

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
SMALLEST, LARGEST = 100_000, 10_000_000
CONTEXT_TOKENS = 2048
QK_NORM = "+qk_norm"
_TOLERANCE = 0.10


def parameters_of(size: str) -> int:
    """Parameters that a size names: `1m`, `0.5m`, `200k`, `1m+qk_norm`.

    Raises RecipeError outside 0.1m to 10m.

    >>> parameters_of("0.5m")
    500000
    """
    plain = size.strip().lower().removesuffix(QK_NORM)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([km])", plain)
    count = round(float(match[1]) * {"k": 1e3, "m": 1e6}[match[2]]) if match else 0
    if not SMALLEST <= count <= LARGEST:
        raise RecipeError(
            Problem("model", "tiny:<size> with a size from 0.1m to 10m parameters", f"tiny:{size}")
        )
    return count


def vocabulary_for(parameters: int) -> int:
    """Vocabulary that suits a size: about a quarter of the parameters go to the embedding.

    >>> vocabulary_for(1_000_000)
    2048
    """
    wanted = 2.0 * math.sqrt(parameters)
    return min(8192, max(512, int(2 ** round(math.log2(wanted)))))


def count_parameters(
    hidden: int,
    layers: int,
    inner: int,
    heads: int,
    keys: int,
    vocabulary: int,
    qk_norm: bool = False,
) -> int:
    """All parameters of a Llama with tied embeddings, norms included."""
    head = hidden // heads
    attention = hidden * head * (2 * heads + 2 * keys) + (2 * head if qk_norm else 0)
    return vocabulary * hidden + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden


def tiny_config(parameters: int, vocabulary: int, qk_norm: bool = False) -> Any:
    """A configuration with all parameters, embedding included, within 10 % of `parameters`.

    Among the shapes that fit, the one whose layers are nearest to what small models
    train best with (hidden about 24 times the layers).

    Raises RecipeError where no shape fits (a vocabulary too large for the size).
    """
    best: tuple[float, tuple[int, int, int, int, int]] | None = None
    for hidden in range(32, 513, 16):
        heads = max(2, round(hidden / 32))
        while hidden % heads or (hidden // heads) % 2:
            heads -= 1
        keys = next(k for k in (max(1, heads // 2), heads // 3, 1) if k and heads % k == 0)
        for layers in range(2, 13):
            for inner in range(hidden * 2, hidden * 3 + 1, 16):
                shape_of = (hidden, layers, inner, heads, keys)
                count = count_parameters(*shape_of, vocabulary)
                off = abs(count / parameters - 1)
                if off > _TOLERANCE / 2:
                    continue
                shape = abs(math.log(hidden / (24 * layers)))
                width = abs(math.log(inner / (8 / 3 * hidden)))
                score = shape + width + 2 * off
                if best is None or score < best[0]:
                    best = (score, shape_of)
    if best is None:
        raise RecipeError(
            Problem(
                "model",
                f"a size that has room for a vocabulary of {vocabulary} tokens",
                f"{parameters} parameters",
            )
        )
    hidden, layers, inner, heads, keys = best[1]
    return config_of_shape(hidden, layers, inner, heads, keys, vocabulary, qk_norm)


def config_of_shape(
    hidden: int,
    layers: int,
    inner: int,
    heads: int,
    keys: int,
    vocabulary: int,
    qk_norm: bool = False,
) -> Any:
    """The configuration of one shape: Llama's, or Qwen3's where queries and keys are normed."""
    from transformers import LlamaConfig, Qwen3Config

    values: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 1 / math.sqrt(hidden),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if qk_norm:
        return Qwen3Config(**values, head_dim=hidden // heads)
    return LlamaConfig(**values)


def network_of(config: Any, *seed_names: object) -> Any:
    """The network of a configuration with fresh weights; the same names give the same bits.

    With and without qk_norm the tensors that both have are equal. The global stream is put
    back: making a model must not move anybody else's numbers.
    """
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM

    kind: Any = LlamaForCausalLM if config.model_type == "llama" else Qwen3ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(*seed_names))
        return kind(config).to(torch.float32)


def train_tokenizer(corpus: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens; any text can be encoded.

    Its end and begin of document is `<|endoftext|>`; padding is a token of its own. It
    adds nothing by itself and has no chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_encodable(text) for text in corpus), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def make_tiny(size: str, corpus: Iterable[str], seed: int = 0) -> tuple[Any, Any]:
    """(network, tokenizer) of about `size` parameters, the tokenizer trained on `corpus`.

    The same size, corpus and seed give the same bits. Raises RecipeError for a size
    outside 0.1m to 10m and for an empty corpus.
    """
    qk_norm = size.endswith(QK_NORM)
    size = size.removesuffix(QK_NORM)
    parameters = parameters_of(size)
    texts = [text for text in corpus if text]
    if not texts:
        raise RecipeError(Problem("model", "text in the recipe's data to train a tokenizer on"))
    tokenizer = train_tokenizer(texts, vocabulary_for(parameters))
    config = tiny_config(parameters, len(tokenizer), qk_norm)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    network = network_of(config, seed, "tiny", size)
    network.eval()
    generation = network.generation_config
    generation.bos_token_id = generation.eos_token_id = tokenizer.eos_token_id
    generation.pad_token_id = tokenizer.pad_token_id
    return network, tokenizer
