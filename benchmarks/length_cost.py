"""What a token costs as rows get longer: tokens/s of SFT steps on rows of 512 to 8,192 tokens.

    python -m benchmarks.length_cost                      # a Llama block of width 4,096
    python -m benchmarks.length_cost --window 1024        # the same with a sliding window
    python -m benchmarks.length_cost --model smollm2-135m-instruct --tokens 8192

Each step, forward and backward with LoRA r=16 in bf16, has the same number of tokens, cut into rows
of one length, a third of them supervised. Attention's products grow with the length of a row, by
7 t q operations a token and layer (q: query width): beside them the table has what the rest
alone would give, so that anything else that grows with the length shows itself.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

LENGTHS = (512, 2048, 8192)


def wide_block(width: int, layers: int, window: int | None) -> Any:
    """A Llama (or Mistral) of a few layers as wide as those of an 8 B model, random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

    from lehr.models.language_model import LanguageModel

    kind = LlamaConfig if window is None else MistralConfig
    more = {} if window is None else {"sliding_window": window}
    config = kind(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=max(1, width // 512),
        max_position_embeddings=max(LENGTHS),
        **more,
    )
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return LanguageModel(network, None, f"block-{width}", precision="bf16")


def packs_of(length: int, tokens: int, vocabulary: int) -> Any:
    """`tokens` tokens in rows of `length`, the last third of each supervised."""
    import torch

    from lehr.data.packing import merge, single
    from lehr.data.shapes import Encoded, Origin

    generator = torch.Generator().manual_seed(length)
    rows = []
    for number in range(tokens // length):
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        taught = torch.arange(length) >= 2 * length // 3
        rows.append(single(number, Encoded(ids, taught, Origin("rows", "rows", number + 1))))
    return merge(rows)


def seconds_of(model: Any, pack: Any) -> tuple[float, float]:
    """(wall seconds of one step, of it inside attention)."""
    from lehr.models.attention_cpu import CpuSegments
    from lehr.objectives.language import Language

    inside = 0.0

    def timed(run: Callable[..., Any]) -> Any:
        def inner(*inputs: Any) -> Any:
            nonlocal inside
            started = time.perf_counter()
            found = run(*inputs)
            inside += time.perf_counter() - started
            return found

        return staticmethod(inner)

    objective = Language(accuracy=False)
    both = CpuSegments.forward, CpuSegments.backward
    started = time.perf_counter()
    try:
        CpuSegments.forward, CpuSegments.backward = timed(both[0]), timed(both[1])
        (objective.loss(model, pack).total / objective.weight(pack)).backward()
    finally:
        CpuSegments.forward, CpuSegments.backward = (staticmethod(one) for one in both)
    return time.perf_counter() - started, inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="a model instead of a random block")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=max(LENGTHS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    import torch

    from lehr.diagnosis.planner import Shape
    from lehr.models.loading import load_model
    from lehr.training.allocator import keep_freed_memory

    torch.set_num_threads(options.threads)
    keep_freed_memory()
    if options.model is None:
        model = wide_block(options.width, options.layers, options.window)
    else:
        model = load_model(options.model, precision="bf16")
    model.add_adapter(rank=16)
    model.train()
    shape = Shape.of(model.config)
    print(f"{model.name}, {shape.layers} layers of width {shape.width}, bf16, LoRA r=16,")
    print(f"{options.tokens} tokens a step, {options.threads} threads, window {options.window}")
    print("| tokens a row | tokens/s | share of the first | attention | rest alone | peak GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    first = first_rest = None
    seconds_of(model, packs_of(512, 512, model.vocabulary_size))
    for length in options.lengths:
        wall, inside = seconds_of(model, packs_of(length, options.tokens, model.vocabulary_size))
        rate, rest = options.tokens / wall, options.tokens / max(wall - inside, 1e-9)
        first, first_rest = first or rate, first_rest or rest
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        cells = f"{rate:.0f} | {rate / first:.0%} | {inside:.1f} of {wall:.1f} s"
        print(f"| {length} | {cells} | {rest / first_rest:.0%} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
