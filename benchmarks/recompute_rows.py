"""Recomputation: step time and kept bytes of every choice beside `none`, in interleaved rounds.

    python -m benchmarks.recompute_rows --rounds 5
    python -m benchmarks.recompute_rows --model smollm2-135m-instruct --rounds 3

A round steps through every choice once, so that the machine's noise meets all of them; the
ratio is the median over rounds of a choice's time to that of `none` in the same round. Bytes
are those of storages that live between the two passes. Rows are plain dictionaries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from lehr.data.shapes import Pack
from lehr.models.language_model import LanguageModel
from lehr.models.loading import load_model
from lehr.models.probe import probe_pack
from lehr.models.recompute_costs import Costs
from lehr.models.tiny import tiny_config

TARGETS = {  # (largest ratio of time, largest share of bytes)
    ("full", "all weights"): (1.40, 0.40),
    ("full", "adapter"): (1.50, 0.40),
    ("selective", "all weights"): (1.15, 0.60),
    ("selective", "adapter"): (1.15, 0.60),
}
BUDGET = 0.3


def model_of(name: str, what: str, precision: str = "fp32") -> LanguageModel:
    """A model that trains all weights or an adapter of rank 16; tiny:9m has random weights."""
    if name.startswith("tiny:"):
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        size = int(float(name.removeprefix("tiny:").removesuffix("m")) * 1e6)
        model = LanguageModel(LlamaForCausalLM(tiny_config(size, 8192)), None, name)
    else:
        model = load_model(name, precision=precision)
    if what == "all weights":
        model.train_all()
    else:
        model.add_adapter(rank=16)
    model.train()
    return model


def pack_of(tokens: int, vocabulary: int) -> Pack:
    """One segment of random tokens, every one of which is predicted."""
    generator = torch.Generator().manual_seed(0)
    return probe_pack([(torch.randint(3, vocabulary, (tokens,), generator=generator), -1)])


def step(model: LanguageModel, pack: Pack) -> float:
    """Processor seconds of a forward and a backward pass."""
    started = time.process_time()
    stats = model.token_stats(model.hidden(pack), pack.predict_from, pack.targets)
    (-stats.log_probability.mean()).backward()
    seconds = time.process_time() - started
    for parameter in model.trained().values():
        parameter.grad = None
    return seconds


def rows(
    name: str, what: str, tokens: int = 512, rounds: int = 5, precision: str = "fp32"
) -> list[dict[str, Any]]:
    """A row for none, selective, a budget and full."""
    model = model_of(name, what, precision)
    pack = pack_of(tokens, model.vocabulary_size)
    costs = Costs(model, pack)
    keeps, within = costs.keeps_within(BUDGET)
    measured = {kind: costs.of(kind) for kind in ("none", "selective", "full")}
    measured[f"budget {BUDGET}"] = within
    choices = {kind: costs.recomputation.keeps_of(kind) for kind in ("none", "selective", "full")}
    choices[f"budget {BUDGET}"] = keeps
    seconds: dict[str, list[float]] = {choice: [] for choice in choices}
    for number in range(rounds + 1):
        for choice, kept in choices.items():
            costs.recomputation.choose(kept)
            spent = step(model, pack)
            if number:  # the first round warms up
                seconds[choice].append(spent)
    costs.stop()
    plain = measured["none"]
    return [
        {
            "model": name,
            "trains": what,
            "precision": precision,
            "tokens": tokens,
            "recompute": choice,
            "seconds": statistics.median(spent),
            "ratio": statistics.median(
                mine / none for mine, none in zip(spent, seconds["none"], strict=True)
            ),
            "kept_bytes": measured[choice].kept_bytes,
            "share_kept": measured[choice].kept_bytes / plain.kept_bytes,
            "repeated_operations": measured[choice].operations
            + measured[choice].attention_operations,
            "within_target": _within(choice, what, seconds, measured),
        }
        for choice, spent in seconds.items()
    ]


def _within(choice: str, what: str, seconds: dict[str, list[float]], measured: Any) -> bool | None:
    share = measured[choice].kept_bytes / measured["none"].kept_bytes
    if choice.startswith("budget"):
        return bool(share <= BUDGET * 1.05)
    if (choice, what) not in TARGETS:
        return None
    ratio = statistics.median(
        mine / none for mine, none in zip(seconds[choice], seconds["none"], strict=True)
    )
    most, largest = TARGETS[choice, what]
    return bool(ratio <= most and share <= largest)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows as a table, and as JSON lines with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny:9m")
    parser.add_argument("--trains", choices=["all weights", "adapter"], nargs="*")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    default = ["all weights", "adapter"] if options.model.startswith("tiny:") else ["adapter"]
    found = [
        row
        for what in options.trains or default
        for row in rows(options.model, what, options.tokens, options.rounds, options.precision)
    ]
    for row in found:
        if options.json:
            print(json.dumps(row))
            continue
        verdict = {True: "within target", False: "OUTSIDE TARGET", None: ""}[row["within_target"]]
        print(
            f"{row['model']:24} {row['trains']:12} {row['tokens']:5} tokens "
            f"{row['recompute']:11} {row['seconds']:7.3f} s {row['ratio']:5.2f} x "
            f"{row['kept_bytes'] / 2**20:8.1f} MiB {row['share_kept']:6.1%}  {verdict}"
        )
    if any(row["within_target"] is False for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
