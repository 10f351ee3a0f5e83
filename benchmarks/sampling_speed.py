"""Decoding SmolLM2-135M: lehr beside transformers' generate, in turn, in one process.

    python -m benchmarks.sampling_speed --rows 16
    python -m benchmarks.sampling_speed --rows 1 --adapter
    python -m benchmarks.sampling_speed --agreement

Same prompts, same settings, no stop ids, so that every row writes all its tokens; medians
over rounds after one round that does not count. Greedy texts are compared, and where they
part, the margin of the two tokens in one full pass is printed. --agreement compares the
log-probabilities of samples with the training pass: unmerged, merged, and in 8 bits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Texts = list[list[int]]
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}


def prompt_ids(model: Any, rows: int) -> Texts:
    """Questions under the model's own chat template, of one to three sentences."""
    from lehr.data.encoding import Encoder
    from lehr.data.sources import read_source
    from lehr.data.templates import Template

    encoder = Encoder(model.tokenizer, Template.from_tokenizer(model.tokenizer), date="2000-01-01")
    here = Path(__file__).parent.parent / "examples" / "data" / "style.jsonl"
    asked = [str(one.messages[0]["content"]) for one in read_source("style", [here]).examples]
    texts = []
    for number in range(rows):
        parts = [asked[(5 * number + k) % len(asked)] for k in range(1 + number % 3)]
        texts.append([{"role": "user", "content": " ".join(parts)}])
    return [list(encoder.prompt_ids(messages)) for messages in texts]


def ours(model: Any, prompts: Texts, options: argparse.Namespace, greedy: bool) -> Texts:
    from lehr.generation.decode import generate

    written = generate(
        model,
        prompts,
        max_new_tokens=options.new_tokens,
        stop_ids=frozenset(),
        batch_size=len(prompts),
        merge_adapter=options.merge,
        int8=options.int8,
        **({} if greedy else SAMPLING),
    )
    return [one.ids for one in written]


def theirs(
    model: Any, prompts: Texts, options: argparse.Namespace, greedy: bool, static: bool
) -> Texts:
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    how: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, **SAMPLING}
    if static:
        how["cache_implementation"] = "static"
    with torch.no_grad(), model.attention():
        written = model.network.generate(
            ids,
            attention_mask=mask,
            pad_token_id=0,
            max_new_tokens=options.new_tokens,
            **how,
        )
    found: Texts = written[:, longest:].tolist()
    return found


def timed(run: Callable[[], Texts]) -> tuple[float, float, Texts]:
    """(wall seconds, CPU seconds, texts)."""
    wall, cpu = time.perf_counter(), time.process_time()
    texts = run()
    return time.perf_counter() - wall, time.process_time() - cpu, texts


def compare(model: Any, options: argparse.Namespace, greedy: bool) -> None:
    """The rows of the table for greedy decoding or sampling."""
    prompts = prompt_ids(model, options.rows)
    sides: dict[str, Callable[[], Texts]] = {
        "lehr": lambda: ours(model, prompts, options, greedy),
        "generate": lambda: theirs(model, prompts, options, greedy, static=False),
    }
    if greedy and not options.no_static:
        sides["generate, static"] = lambda: theirs(model, prompts, options, greedy, static=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    texts: dict[str, Texts] = {}
    for number in range(options.rounds + 1):
        for name, run in sides.items():
            wall, cpu, texts[name] = timed(run)
            if number:
                times[name].append((wall, cpu))
    tokens = options.rows * options.new_tokens
    lengths = [len(one) for one in prompts]
    print(
        f"\n{'greedy' if greedy else 'sampled'}, {options.rows} prompts of {min(lengths)} to "
        f"{max(lengths)} tokens, {options.new_tokens} new tokens each, {options.precision}, "
        f"{options.threads} threads, adapter: {options.adapter}, {options.rounds} rounds"
    )
    print("| | new tokens/s (wall) | new tokens / CPU s | rounds, s |\n| --- | --- | --- | --- |")
    rates = {}
    for name, rounds in times.items():
        wall = statistics.median(one[0] for one in rounds)
        cpu = statistics.median(one[1] for one in rounds)
        rates[name] = tokens / wall
        each = " ".join(f"{one[0]:.2f}" for one in rounds)
        print(f"| {name} | {tokens / wall:.0f} | {tokens / cpu:.0f} | {each} |")
    for name in list(rates)[1:]:
        print(f"lehr / {name}: {rates['lehr'] / rates[name]:.2f}")
    if greedy:
        report_texts(model, prompts, texts["lehr"], texts["generate"])


def report_texts(model: Any, prompts: Texts, own: Texts, other: Texts) -> None:
    """How many greedy texts are equal, and how near the choice was where one is not."""
    import torch

    same = sum(one == two for one, two in zip(own, other, strict=True))
    print(f"greedy texts equal: {same} of {len(own)}")
    margins = []
    for prompt, one, two in zip(prompts, own, other, strict=True):
        if one == two:
            continue
        at = next(
            index for index, pair in enumerate(zip(one, two, strict=True)) if len({*pair}) > 1
        )
        with torch.no_grad(), model.attention():
            logits = model.network(torch.tensor([prompt + one[:at]])).logits[0, -1].float()
        margins.append((abs(float(logits[one[at]] - logits[two[at]])), at))
    if margins:
        shown = ", ".join(f"{margin:.3f} at token {at}" for margin, at in margins)
        print(f"margin of the two tokens where they part (logits of one full pass): {shown}")


def agreement(model: Any, options: argparse.Namespace) -> None:
    """Log-probabilities of samples at temperature 1 against the training pass."""
    from lehr.generation.decode import generate

    prompts = prompt_ids(model, options.rows)
    ways: dict[str, dict[str, Any]] = {
        "network": {"through": "network"},
        "unmerged" if options.adapter else "lean": {"through": "lean"},
        "int8, merged" if options.adapter else "int8": {"int8": True},
    }
    if options.adapter:
        ways["merged"] = {"merge_adapter": True}
    print(f"{options.precision}, adapter: {options.adapter}; nats against the training pass")
    print("| | mean | largest | mean over all of the difference |\n| --- | --- | --- | --- |")
    for name, how in ways.items():
        written = generate(
            model,
            prompts,
            max_new_tokens=options.new_tokens,
            stop_ids=frozenset(),
            temperature=1.0,
            **how,
        )
        gaps = gaps_to_training(model, prompts, written)
        mean = sum(map(abs, gaps)) / len(gaps)
        print(f"| {name} | {mean:.2e} | {max(map(abs, gaps)):.2e} | {sum(gaps) / len(gaps):+.1e} |")


def gaps_to_training(model: Any, prompts: Texts, written: Any) -> list[float]:
    """Of each new token: its log-probability while decoding less that of the training pass."""
    import torch

    from lehr.data.packing import single
    from lehr.data.shapes import Encoded, Origin

    gaps: list[float] = []
    for prompt, one in zip(prompts, written, strict=True):
        ids = torch.tensor([*prompt, *one.ids])
        supervised = torch.arange(len(ids)) >= len(prompt)
        pack = single(0, Encoded(ids, supervised, Origin("benchmark", "sample", 0)))
        with torch.no_grad():
            hidden = model.hidden(pack)
            values = model.token_stats(hidden, pack.predict_from, pack.targets).log_probability
        gaps += [a - b for a, b in zip(one.log_probabilities, values.tolist(), strict=True)]
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--adapter", action="store_true", help="LoRA r=16 with random numbers")
    parser.add_argument("--merge", action="store_true", help="lehr decodes with it merged")
    parser.add_argument("--int8", action="store_true", help="lehr decodes with 8-bit weights")
    parser.add_argument("--no-static", action="store_true")
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--only", choices=["greedy", "sampled"], default=None)
    options = parser.parse_args()
    import torch

    from lehr.models.loading import load_model

    torch.set_num_threads(options.threads)
    model = load_model(options.model, precision=options.precision)
    if options.adapter:
        torch.manual_seed(0)
        model.add_adapter(rank=16)
        for name, parameter in model.trained().items():
            if "lora_B" in name:
                parameter.data.normal_(std=0.005)
    model.eval()
    model.network.generation_config.eos_token_id = None  # generate: every row to its end
    if options.agreement:
        agreement(model, options)
        return
    for greedy in (True, False):
        if options.only is None or greedy == (options.only == "greedy"):
            compare(model, options, greedy)


if __name__ == "__main__":
    main()
