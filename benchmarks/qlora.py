"""QLoRA beside LoRA on one model: bytes, time of an update, held-out loss, decoding.

    python -m benchmarks.qlora --updates 30 --rounds 5

Both models are in one process and take turns, so that the machine's noise meets both; times are
processor seconds, ratios medians over rounds. Both train on the same rows in the same order from
the same adapter. The held-out loss is that of rows that no update saw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.sft_speed import rows_file
from lehr.data.encoding import Encoder
from lehr.data.loader import UpdateBatches
from lehr.data.packing import merge, pack
from lehr.data.shapes import Encoded, Pack
from lehr.data.sources import read_source
from lehr.data.templates import Template
from lehr.generation.admission import decode_in_place
from lehr.generation.decode import generate
from lehr.models.language_model import LanguageModel
from lehr.models.loading import load_model
from lehr.models.nf4 import stored_bytes
from lehr.objectives.language import Language
from lehr.report.explain import record_measurement
from lehr.training.engine import Engine
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

KINDS = ("lora", "qlora")
PARTS = ("speed", "decoding", "loss")
HELD_OUT = 16


def packs_of(rows: Sequence[Encoded]) -> list[Pack]:
    return pack(list(enumerate(rows)), 1024)


def held_out_loss(model: LanguageModel, packs: Sequence[Pack]) -> float:
    """Mean negative log-probability of the supervised tokens, nats."""
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for one in packs:
            stats = model.token_stats(model.hidden(one), one.predict_from, one.targets)
            total -= float(stats.log_probability.double().sum())
            count += int(one.targets.numel())
    return total / count


def step_seconds(model: LanguageModel, packs: Sequence[Pack]) -> float:
    """Processor seconds of forward and backward of one update's packs."""
    model.train()
    started = time.process_time()
    for one in packs:
        stats = model.token_stats(model.hidden(one), one.predict_from, one.targets)
        (-stats.log_probability.mean()).backward()
    seconds = time.process_time() - started
    for parameter in model.trained().values():
        parameter.grad = None
    return seconds


def train(model: LanguageModel, rows: Sequence[Encoded], options: argparse.Namespace) -> None:
    """Updates at a constant rate over `rows` in one order."""
    batches = UpdateBatches({"rows": list(rows)}, {"rows": 1.0}, options.batch_size, 0, 1024)
    settings = EngineSettings(
        updates=options.updates,
        learning_rate=options.learning_rate,
        schedule=Schedule("linear", 0, 0, 0.0),
        checkpoint_every=options.updates,
    )
    model.train()
    with tempfile.TemporaryDirectory() as folder:
        Engine(
            model, Language(), batches, settings, Path(folder), (0, "benchmark"), merge=merge
        ).run()


def decode_rate(model: LanguageModel, prompts: Sequence[Sequence[int]], in_place: bool) -> float:
    """New tokens a processor second; a first call admits the path and is not counted."""
    decode_in_place(model.network, in_place)
    model.eval()
    keys: dict[str, Any] = {"stop_ids": frozenset(), "max_new_tokens": 32}
    generate(model, prompts, **{**keys, "max_new_tokens": 1})
    started = time.process_time()
    written = generate(model, prompts, **keys)
    seconds = time.process_time() - started
    decode_in_place(model.network, False)
    return sum(len(one.ids) for one in written) / seconds


def base_bytes(model: LanguageModel) -> int:
    """Of the frozen base: codes, scales, and what stays in compute precision."""
    size = model.compute_dtype.itemsize
    found = stored_bytes(model.network, size)
    return found or size * sum(one.numel() for one in model.network.parameters())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report."""
    torch.set_num_threads(options.threads)
    models = {}
    base: dict[str, int] = {}
    for kind in KINDS:
        found = load_model(options.model, precision=options.precision, four_bits=kind == "qlora")
        base[kind] = base_bytes(found)
        found.add_adapter(rank=16)
        models[kind] = found
    tokenizer = models["lora"].tokenizer
    encoder = Encoder(tokenizer, Template.from_tokenizer(tokenizer), date="2000-01-01")
    with tempfile.TemporaryDirectory() as folder:
        path = rows_file(Path(folder), options.batch_size * options.updates + HELD_OUT)
        examples = read_source("rows", [path]).examples
    rows = [one for example in examples for one in encoder.encode(example).encoded]
    # Answers come again: none of those that are held out is trained on.
    answers = {str(one.messages[-1]["content"]) for one in examples[:HELD_OUT]}
    trained = [
        row
        for row, one in zip(rows, examples, strict=True)
        if str(one.messages[-1]["content"]) not in answers
    ]
    heldout, update = packs_of(rows[:HELD_OUT]), packs_of(trained[: options.batch_size])
    tokens = sum(one.tokens for one in update)
    result: dict[str, Any] = {"bytes": base, "tokens": tokens, "rows": len(trained)}
    told(result)
    if "speed" in options.parts:
        rounds = [
            {kind: step_seconds(models[kind], update) for kind in KINDS}
            for _ in range(options.rounds + 1)
        ][1:]
        seconds = {kind: statistics.median(one[kind] for one in rounds) for kind in KINDS}
        ratio = statistics.median(one["qlora"] / one["lora"] for one in rounds)
        result |= told({"seconds": seconds, "ratio": ratio})
    if "decoding" in options.parts:
        prompts = [row.ids[: int(row.supervised.int().argmax())].tolist() for row in rows[:16]]
        decoded = {
            "lora": decode_rate(models["lora"], prompts, False),
            "qlora, dense copy": decode_rate(models["qlora"], prompts, False),
            "qlora, in place": decode_rate(models["qlora"], prompts, True),
        }
        result |= told({"decoded": decoded})
    if "loss" in options.parts:
        result |= told({"before": {kind: held_out_loss(models[kind], heldout) for kind in KINDS}})
        for kind in KINDS:
            train(models[kind], trained, options)
        result |= told({"after": {kind: held_out_loss(models[kind], heldout) for kind in KINDS}})
    return result


def told(found: dict[str, Any]) -> dict[str, Any]:
    """`found`, printed as soon as it is known."""
    print(json.dumps(found), flush=True)
    return found


def words(result: dict[str, Any], options: argparse.Namespace) -> str:
    """One line for `lehr explain qlora`, of the parts that were measured."""
    mebi = {kind: result["bytes"][kind] / 2**20 for kind in KINDS}
    said = [
        f"{options.model}, {options.precision}: base {mebi['lora']:.0f} -> {mebi['qlora']:.0f} MiB"
    ]
    if "seconds" in result:
        rates = {kind: result["tokens"] / result["seconds"][kind] for kind in KINDS}
        said.append(
            f"training {rates['lora']:.0f} -> {rates['qlora']:.0f} tokens a CPU second "
            f"({result['ratio']:.2f} times the time)"
        )
    if "after" in result:
        before, after = result["before"], result["after"]
        said.append(
            f"held-out loss {before['lora']:.3f} -> {before['qlora']:.3f} nats before training, "
            f"{after['lora']:.3f} -> {after['qlora']:.3f} after {options.updates} updates"
        )
    if "decoded" in result:
        rates = result["decoded"]
        said.append(
            f"decoding {rates['lora']:.0f} -> {rates['qlora, dense copy']:.0f} new tokens a CPU "
            f"second from a dense copy, {rates['qlora, in place']:.0f} in place"
        )
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    line = words(measure(options), options)
    print(line)
    if set(options.parts) == set(PARTS):
        record_measurement("qlora", line)


if __name__ == "__main__":
    main()
