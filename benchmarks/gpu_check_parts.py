"""The parts of gpu_check: what each one trains, measures and compares with the plain network."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.beside_peer import in_order
from benchmarks.gpu_check_rows import (
    TOY,
    Row,
    Size,
    make_network,
    pair_rows,
    plain_loss,
    plain_sum,
    sft_rows,
    some_ids,
)
from benchmarks.gpu_check_run import part_run
from benchmarks.policy_speed import Sampled, gaps_of
from lehr.data.loader import UpdateBatches
from lehr.data.packing import merge, pack
from lehr.data.shapes import Encoded
from lehr.diagnosis.machine import measure_gemm
from lehr.models.attention import attention_by_autograd
from lehr.models.attention_padded import padded_attention
from lehr.models.language_model import LanguageModel
from lehr.models.precision import loaded_dtype
from lehr.models.segments import plan_segments
from lehr.objectives.language import Language
from lehr.objectives.policy import Policy
from lehr.objectives.preference import Dpo
from lehr.stages.preference import log_probabilities
from lehr.streams import generator_for
from lehr.training.engine import Engine
from lehr.training.float8_recipe import Float8Settings
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

GIB = 2**30
EQUAL = {"fp32": 1e-4, "bf16": 1e-2}  # nats a token between two computations of one loss
SAMPLED_EQUAL = 3e-2  # mean over sampled tokens in bf16: decoding is another kernel


class Enough(Exception):
    """All updates that were asked for are done, or the part's seconds are spent."""


@dataclass(frozen=True)
class Where:
    """A part's surroundings: the device, the size, until when (perf_counter), TRL's python."""

    device: str
    size: Size
    until: float
    peer_python: str = sys.executable


def operations_a_token(body: int, head: int, supervised_share: float, all_weights: bool) -> float:
    """Products' operations of a token, forward and backward; attention and adapters left out.

    Two forward and two for the gradient of what came in, of each parameter; two more for the
    gradient of a weight that trains.

    >>> operations_a_token(10, 4, 0.5, all_weights=False)
    48.0
    """
    return (6 if all_weights else 4) * (body + head * supervised_share)


def make_model(where: Where, precision: str, all_weights: bool = False) -> LanguageModel:
    """With an adapter of rank 16, or all weights in training."""
    network = make_network(where.size, where.device, loaded_dtype(precision, all_weights))
    letters = SimpleNamespace(decode=lambda ids: "".join(chr(97 + one % 26) for one in ids))
    model = LanguageModel(network, letters, where.size.name, precision=precision)
    if all_weights:
        model.train_all()
    else:
        model.add_adapter(rank=16)
    return model


def train(
    where: Where, model: LanguageModel, objective: Any, batches: Any, updates: int, **settings: Any
) -> list[dict[str, Any]]:
    """Rows of metrics of `updates` updates, or of as many as there is time for."""
    rows: list[dict[str, Any]] = []

    def observe(event: Any) -> None:
        row = getattr(event, "row", None)
        if row is not None:
            rows.append(dict(row))
            # Before the checkpoint of the last update: several GB that nobody reads.
            if len(rows) == updates or time.perf_counter() > where.until:
                raise Enough

    model.train()
    given = {"learning_rate": 1e-4, "schedule": Schedule("constant", 0, 0, 0.0), **settings}
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            model, objective, batches,
            EngineSettings(updates=updates, checkpoint_every=updates, **given),
            Path(folder), (0, "gpu check"), observers=(observe,), merge=merge,
        )  # fmt: skip
        try:
            engine.run()
        except Enough:
            return rows
    raise RuntimeError("the engine ended before the last update was seen")


def begin_memory(where: Where) -> None:
    if where.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(where: Where) -> float:
    """Allocated on the card; on a CPU the largest resident size of this process."""
    if where.device == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def trained_row(
    where: Where, part: str, rows: list[dict[str, Any]], updates: int, all_weights: bool = False
) -> Row:
    """Rates of the updates after the first."""
    timed = rows[1:]
    row = Row(part, "lehr", peak_gib=peak_gib(where), losses=[one["loss"] for one in rows])
    if len(rows) < updates:
        row.note = f"stopped by its budget after {len(rows)} of {updates} updates"
    if timed:
        tokens, seconds = (sum(one[name] for one in timed) for name in ("tokens", "seconds"))
        share = sum(one["supervised_tokens"] for one in timed) / tokens
        size = where.size
        cost = operations_a_token(size.body, size.head, share, all_weights)
        row.rate = tokens / seconds
        row.mfu = row.rate * cost / (1e9 * gemm_rate(where))
    return row


def gemm_rate(where: Where) -> float:
    """10^9 operations a second of bf16 products at the model's sizes, measured here and now."""
    rate = measure_gemm(torch.bfloat16, 0.3, where.device, where.size.gemm)
    if rate <= 0:
        raise RuntimeError("bf16 products cannot be computed here")
    return rate


def compare(row: Row, what: str, own: float, plain: float, allowed: float) -> None:
    """Note both numbers; a gap beyond what is allowed makes the row wrong."""
    gap = abs(own - plain)
    row.wrong |= not gap <= allowed  # NaN is wrong too
    text = f"{what} {own:.4f}, plain {plain:.4f}, gap {gap:.0e} of {allowed:.0e}"
    row.note = f"{row.note}; {text}" if row.note else text


def part_gemm(where: Where) -> list[Row]:
    """What everything else is measured against."""
    rates = {name: measure_gemm(kind, 0.5, where.device, where.size.gemm) for name, kind in
             (("fp32", torch.float32), ("bf16", torch.bfloat16))}  # fmt: skip
    text = ", ".join(f"{name} {rate / 1e3:.3g} TFLOP/s" for name, rate in rates.items())
    sizes = " x ".join(map(str, where.size.gemm))
    return [Row("products", "torch", note=f"{text} at {sizes}", wrong=min(rates.values()) <= 0)]


def part_sft(where: Where) -> list[Row]:
    """Timed in bf16; the loss against the plain network's in bf16 and in fp32."""
    size = where.size
    encoded = sft_rows(size, size.rows * size.updates)
    batches = UpdateBatches({"rows": encoded}, {"rows": 1.0}, size.rows, 0, size.pack)
    asked = in_order(batches, encoded, 1)
    plain = plain_loss(make_network(size, where.device, torch.bfloat16), asked)
    begin_memory(where)
    model = make_model(where, "bf16")
    row = trained_row(
        where, "SFT, LoRA, bf16", train(where, model, Language(), batches, size.updates),
        size.updates,
    )  # fmt: skip
    row.first = row.losses[0]
    compare(row, "loss", row.first, plain, EQUAL["bf16"])
    del model
    compare(row, "fp32 loss", *fp32_losses(where, asked), EQUAL["fp32"])
    return [row]


def fp32_losses(where: Where, rows: Sequence[Encoded]) -> tuple[float, float]:
    """(lehr's, the plain network's) loss of these rows."""
    plain = plain_loss(make_network(where.size, where.device, torch.float32), rows)
    model = make_model(where, "fp32").eval()
    objective = Language()
    total = weight = 0.0
    with torch.no_grad():
        for one in pack(list(enumerate(rows)), where.size.pack):
            total += float(objective.loss(model, one).total)
            weight += objective.weight(one)
    return total / weight, plain


def part_dpo(where: Where) -> list[Row]:
    """Pairs with a shared prompt; what is compared is a chosen token's log-probability."""
    size = where.size
    pairs = size.rows // 2
    encoded = pair_rows(size, pairs * size.updates)
    batches = UpdateBatches({"rows": encoded}, {"rows": 1.0}, pairs, 0, size.pack)
    asked = in_order(batches, encoded, 1)
    place = {id(one): number for number, one in enumerate(encoded)}
    network = make_network(size, where.device, torch.bfloat16)
    plain = -sum(
        plain_sum(
            network,
            torch.cat([one.ids, one.branches[0].ids]),
            torch.arange(one.ids.numel() + one.branches[0].ids.numel()) >= one.ids.numel(),
        )
        for one in asked
    )
    del network
    begin_memory(where)
    model = make_model(where, "bf16")
    started = time.perf_counter()
    reference = log_probabilities(model, batches.items(), model.state(), size.pack)
    passed = time.perf_counter() - started
    rows = train(where, model, Dpo(reference=reference, beta=0.1), batches, size.updates)
    row = trained_row(where, "DPO, LoRA, bf16", rows, size.updates)
    tokens = sum(one.branches[0].ids.numel() for one in asked)
    row.first = sum(reference[place[id(one)]][0] for one in asked) / tokens
    compare(row, "log p of a chosen token", row.first, plain / tokens, EQUAL["bf16"])
    timed = [one["seconds"] + passed / size.updates for one in rows[1:]]
    if timed:
        rate = pairs / statistics.median(timed)
        row.note = f"{rate:.2f} pairs/s, reference pass included; {row.note}"
    return [row]


def part_grpo(where: Where) -> list[Row]:
    """Sampling, rewards, advantages, one update; the second of two is timed."""
    size = where.size
    updates = 2
    generator = generator_for(0, "gpu check", "grpo")
    prompts = [
        [some_ids(size, size.length // 8, generator).tolist() for _ in range(size.prompts)]
        for _ in range(updates)
    ]
    begin_memory(where)
    model = make_model(where, "bf16")
    batches = Sampled(model, prompts, size.samples, size.new_tokens)
    rows = train(where, model, Policy(batches.known), batches, updates, micro_batch=1)
    new = size.prompts * size.samples * size.new_tokens
    last = len(rows) - 1
    row = Row("GRPO update, LoRA, bf16", "lehr", peak_gib=peak_gib(where))
    row.losses = [one["loss"] for one in rows]
    seconds, sampling = rows[last]["seconds"], batches.seconds[last]
    row.rate = new / seconds
    row.note = f"new tokens/s; {seconds:.2f} s, {sampling:.2f} of them sampling"
    batches.load(0)
    gaps = [abs(gap) for gap in gaps_of(model, batches)]
    mean = sum(gaps) / len(gaps)
    row.wrong = not mean <= SAMPLED_EQUAL
    row.note += f"; log p, decoding less training: mean {mean:.0e} of {SAMPLED_EQUAL:.0e}"
    return [row]


def part_attention(where: Where) -> list[Row]:
    """One layer forward and backward over a pack, in every way that there is."""
    size = where.size
    one = pack(list(enumerate(sft_rows(size, size.rows))), size.pack)[0]
    plan = plan_segments(one.segments, one.tokens)
    width = size.hidden // size.heads
    dtype = torch.bfloat16 if where.device == "cuda" else torch.float32
    query, key, value = (
        torch.randn(heads, one.tokens, width, device=where.device, dtype=dtype, requires_grad=True)
        for heads in (size.heads, size.keys, size.keys)
    )
    scale = width**-0.5

    def by_segment() -> torch.Tensor:
        return attention_by_autograd(query, key, value, plan, scale)

    def in_batches() -> torch.Tensor:
        return padded_attention(query, key, value, plan, scale)

    ends = [0, *(span.start + span.length for span in plan.spans)]
    borders = torch.tensor(ends, dtype=torch.int32, device=where.device)
    longest = max(span.length for span in plan.spans)

    def variable() -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        rows = [each.transpose(0, 1) for each in (query, key, value)]
        found: torch.Tensor = varlen_attn(
            *rows, borders, borders, longest, longest, scale=scale, window_size=(-1, 0),
            enable_gqa=True,
        )  # fmt: skip
        return found

    def whole() -> torch.Tensor:
        repeats = size.heads // size.keys
        keys, values = (each.repeat_interleave(repeats, 0)[None] for each in (key, value))
        return F.scaled_dot_product_attention(query[None], keys, values, is_causal=True)

    rows = []
    ways = {
        "padded batches, as it trains": in_batches,
        "per segment": by_segment,
        "one row, no isolation": whole,
    }
    if where.device == "cuda":  # what torch has for this, to be compared before it is used
        ways["varlen_attn"] = variable
    for name, run in ways.items():
        begin_memory(where)
        row = Row("attention", name)
        rows.append(row)
        try:
            row.rate = one.tokens / seconds_of(where, run)
        except (ImportError, RuntimeError, ValueError) as error:
            if name != "varlen_attn":  # nothing here trains by it
                raise
            row.note = f"cannot be had: {(str(error).strip() or 'no message').splitlines()[0]}"
            continue
        row.peak_gib = peak_gib(where)
        row.note = f"{len(plan.spans)} segments, {one.tokens} tokens, one layer"
    return rows


def seconds_of(where: Where, run: Callable[[], torch.Tensor], rounds: int = 5) -> float:
    """Of a forward and a backward pass: the median, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run().sum().backward()
        if where.device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def part_long(where: Where, precision: str) -> list[Row]:
    """All weights on four batches again and again, so that there is something to learn."""
    size = where.size
    encoded = sft_rows(size, 4 * size.rows)
    batches = UpdateBatches({"rows": encoded}, {"rows": 1.0}, size.rows, 0, size.pack)
    begin_memory(where)
    model = make_model(where, precision, all_weights=True)
    settings: dict[str, Any] = {"precision": precision}
    if precision == "fp8":
        settings["fp8"] = Float8Settings()
        if size is TOY:  # every block would be among the first and last, every layer small
            small = {"keep_first_blocks": 0, "keep_last_blocks": 0, "smallest_features": 1}
            settings["fp8"] = replace(settings["fp8"], **small)
    rows = train(where, model, Language(), batches, size.long_updates, **settings)
    row = trained_row(where, "all weights", rows, size.long_updates, all_weights=True)
    row.system = f"lehr, {precision}"
    text = f"loss {row.losses[0]:.4f} -> {row.losses[-1]:.4f} in {len(rows)} updates"
    row.note = f"{row.note}; {text}" if row.note else text
    return [row]


def part_peer(where: Where, kind: str) -> list[Row]:
    """TRL on the same rows of the same weights, in a process of its own."""
    from lehr.models.tiny import train_tokenizer

    size = where.size
    pairs = size.rows // 2
    count = size.rows if kind == "sft" else pairs
    make = sft_rows if kind == "sft" else pair_rows
    encoded = make(size, count * size.updates)
    batches = UpdateBatches({"rows": encoded}, {"rows": 1.0}, count, 0, size.pack)
    rows = [peer_row(one) for one in in_order(batches, encoded, size.updates)]
    with tempfile.TemporaryDirectory() as folder:
        network = make_network(size, where.device, torch.bfloat16)
        network.save_pretrained(folder)
        del network
        if where.device == "cuda":
            torch.cuda.empty_cache()
        train_tokenizer(["some words for a tokenizer"], 300).save_pretrained(folder)
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(rows))
        command = [
            where.peer_python, str(Path(__file__).parent / "peer_trl.py"), "--kind", kind,
            "--model", folder, "--rows", str(path), "--updates", str(size.updates),
            "--batch-size", str(count), "--precision", "bf16", "--device", where.device,
        ]  # fmt: skip
        found = json.loads(last_line(command, max(1.0, where.until - time.perf_counter())))
    row = Row(f"{kind.upper()}, LoRA, bf16", "TRL", peak_gib=found["peak_gib"])
    row.rate = sum(found["tokens"]) / sum(found["wall"])
    row.first, row.losses = found["first"], found["losses"]
    row.note = "its prompts are computed twice and counted twice" if kind == "dpo" else ""
    return [row]


def last_line(command: Sequence[str], seconds: float) -> str:
    """The last line that a command prints.

    Raises RuntimeError with the last line of its errors, and TimeoutError after `seconds`.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not done within its budget of {seconds:g} s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or f"status {done.returncode}").splitlines()[-1])
    return done.stdout.strip().splitlines()[-1]


def peer_row(one: Encoded) -> dict[str, list[int]]:
    """A row as peer_trl.py takes it."""
    if one.branches:
        sides = zip(("chosen_ids", "rejected_ids"), one.branches, strict=True)
        answers = {name: branch.ids.tolist() for name, branch in sides}
        return {"prompt_ids": one.ids.tolist(), **answers}
    return {"input_ids": one.ids.tolist(), "completion_mask": one.supervised.int().tolist()}


PARTS: dict[str, Callable[[Where], list[Row]]] = {
    "gemm": part_gemm,
    "sft": part_sft,
    "dpo": part_dpo,
    "grpo": part_grpo,
    "trl-sft": lambda where: part_peer(where, "sft"),
    "trl-dpo": lambda where: part_peer(where, "dpo"),
    "attention": part_attention,
    "bf16": lambda where: part_long(where, "bf16"),
    "fp8": lambda where: part_long(where, "fp8"),
    "run": part_run,
}
