"""Starvation put into real trainings: is it named, and is the predicted gain the measured one?

    python -m benchmarks.starvation                        # the table of docs/speed.md
    python -m benchmarks.starvation --cases data host --json out.json

Each case trains a small transformer with lehr's engine and puts one thing in its way, at three
strengths: a loader that sleeps, thousands of tiny operations in one module, a log line that
reads every tensor or waits for the disk, a slow exchange between two gloo ranks, element-wise
passes over large tensors; a healthy one waits for nothing. The probe must name it and predict
the seconds that an update gains; then the thing is really removed and the update timed again.
That is a round; a row is the median of several, because the same update takes 1.5 times as long
in another minute here. Gains are seconds: |predicted - measured| / measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TARGET = 0.15
SECONDS = 0.8  # of fair time for each run of the probe
TURNS = 4  # with the thing in the way and without it, half as long each


@dataclass(frozen=True)
class Case:
    """One thing in the way. strength: milliseconds, operations, passes or bytes; see `starved`."""

    kind: str
    strength: float
    says: str


CASES = (
    Case("data", 5, "the loader sleeps 5 ms"),
    Case("data", 20, "the loader sleeps 20 ms"),
    Case("data", 200, "the loader sleeps 200 ms every fifth update"),
    Case("host", 6000, "6,000 tiny operations"),
    Case("host", 10000, "10,000 tiny operations"),
    Case("host", 16000, "16,000 tiny operations"),
    Case("log", 20, "a log line reads every tensor 20 times"),
    Case("log", 40, "a log line reads every tensor 40 times"),
    Case("log", 80, "a log line reads every tensor 80 times"),
    Case("log", 1060, "a log line waits for the disk, 60 files"),
    Case("memory", 8, "8 passes over 16 MiB"),
    Case("memory", 16, "16 passes over 16 MiB"),
    Case("memory", 32, "32 passes over 16 MiB"),
    Case("communication", 0.5, "two ranks, a tensor takes 0.5 ms"),
    Case("communication", 1, "two ranks, a tensor takes 1 ms"),
    Case("communication", 2, "two ranks, a tensor takes 2 ms"),
    Case("compute", 256, "nothing in the way, width 256"),
    Case("compute", 384, "nothing in the way, width 384"),
    Case("compute", 512, "nothing in the way, width 512"),
)


class Plain(nn.Module):
    """What stands where a starving module stood: nothing."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class TinyOperations(nn.Module):
    """Thousands of operations on eight numbers, which change the output by next to nothing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        small = hidden.flatten()[:8]
        for _ in range(self.count):
            small = small + 1e-9
        return hidden + 1e-9 * small.sum()


class Passes(nn.Module):
    """Element-wise passes over the hidden states, widened so that caches do not hold them."""

    def __init__(self, count: int, wide: int) -> None:
        super().__init__()
        self.count, self.wide = count, wide

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        large = hidden.unsqueeze(-1).expand(*hidden.shape, self.wide)
        for _ in range(self.count):
            large = large + 1.0
        return hidden + 1e-9 * large.mean(-1)


class Sleepy:
    """Batches that come late."""

    def __init__(self, inner: Any, milliseconds: float) -> None:
        self._inner, self._milliseconds, self._count = inner, milliseconds, 0

    @property
    def epoch(self) -> float:
        return float(self._inner.epoch)

    def next(self) -> list[Any]:
        self._count += 1
        if self._milliseconds < 100 or self._count % 5 == 0:
            time.sleep(self._milliseconds / 1e3)
        return list(self._inner.next())

    def state(self) -> Any:
        return self._inner.state()

    def load(self, state: Any) -> None:
        self._inner.load(state)


def syncing_log(model: nn.Module, times: int, files: int, folder: Path) -> Callable[[Any], None]:
    """A log line that waits for each tensor's norm, so often, and for the disk."""

    def observe(event: Any) -> None:
        if getattr(event, "row", None) is None:
            return
        for _ in range(times):
            line = {name: float(value.norm().item()) for name, value in model.named_parameters()}
        for number in range(files):
            with (folder / f"{number}.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")
                stream.flush()
                os.fsync(stream.fileno())

    return observe


class Drawn:
    """Some packs of each update, made beforehand: nothing is in the way but what is put there."""

    epoch = 0.0

    def __init__(self, inner: Any, packs: int, updates: int = 64) -> None:
        self._updates = [list(inner.next())[:packs] for _ in range(updates)]
        self._next = 0

    def next(self) -> list[Any]:
        self._next += 1
        return self._updates[self._next % len(self._updates)]

    def state(self) -> Any:
        return self._next

    def load(self, state: Any) -> None:
        self._next = state


@cache
def _text() -> tuple[list[str], Any]:
    """Docstrings, and a tokenizer made from them."""
    from lehr.data.docstrings import docstring_rows
    from lehr.models.tiny import train_tokenizer

    texts = [str(one.value["text"])[:2000] for one in docstring_rows()[0][:400]]
    return texts, train_tokenizer(texts, 600)


def workload(case: Case) -> Any:
    """A transformer of two layers on docstrings; a slot after its first MLP is free."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.training_core import Row, Stream, settings_of
    from lehr.data.packing import merge
    from lehr.diagnosis.speed_probe import Workload
    from lehr.models.halved import half_width
    from lehr.models.language_model import LanguageModel
    from lehr.objectives.language import Language

    texts, tokenizer = _text()
    healthy = case.kind == "compute"
    width, packs = (int(case.strength), 2) if healthy else (128, 1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=2, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LanguageModel(LlamaForCausalLM(config), tokenizer, "starved")
    model.train_all()
    model.train()
    first = model.network.model.layers[0]
    first.mlp = nn.Sequential(first.mlp, Plain())
    settings = replace(
        settings_of(Row("speed", "speed"), 100), checkpoint_every=10**6, micro_batch=packs
    )
    batches = Drawn(Stream(tokenizer, texts), packs)
    objective = Language(accuracy=False, per_source=False)
    halved = partial(half_width, model) if healthy else None
    return Workload(
        model, objective, batches, settings, (0, "starvation"), merge=merge, halved=halved
    )


def starved(work: Any, case: Case, folder: Path) -> Any:
    """The workload with the thing in its way."""
    slot = work.model.network.model.layers[0].mlp
    if case.kind == "host":
        slot[1] = TinyOperations(int(case.strength))
    elif case.kind == "memory":
        slot[1] = Passes(int(case.strength), 128)
    elif case.kind == "data":
        return replace(work, batches=Sleepy(work.batches, case.strength))
    elif case.kind == "log":
        disk = case.strength > 1000
        times, files = (1, int(case.strength) - 1000) if disk else (int(case.strength), 1)
        return replace(work, observers=(syncing_log(work.model, times, files, folder),))
    return work


@contextmanager
def slow_exchange(milliseconds: float) -> Iterator[None]:
    """Every tensor takes so long to add up, as over a slow network."""
    call = dist.all_reduce

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(milliseconds / 1e3)
        return call(*arguments, **options)

    dist.all_reduce = slow
    try:
        yield
    finally:
        dist.all_reduce = call


def measure(case: Case, seconds: float = SECONDS) -> dict[str, Any]:
    """Probe the starved workload, then take the thing out; in this process (one of two ranks)."""
    from lehr.diagnosis.speed_probe import Probe, measure_speed
    from lehr.training.allocator import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does: else large tensors cost page faults now and then
    with tempfile.TemporaryDirectory() as folder:
        plain = workload(case)
        work = starved(plain, case, Path(folder))
        probe, without = Probe(work, seconds / 2), Probe(plain, seconds / 2)
        with slow_exchange(case.strength) if case.kind == "communication" else nullcontext():
            found = measure_speed(work, seconds=seconds)
            probe.first()
            with_it = [probe.run().total for _ in range(TURNS)] if dist.is_initialized() else []
        without.updates = probe.updates
        if dist.is_initialized():
            dist.destroy_process_group()
            without_it = [without.run().total for _ in range(TURNS)]
        else:
            with_it, without_it = in_turns(probe, without)
    before, after = statistics.median(with_it), statistics.median(without_it)
    saved = 0.0 if case.kind == "compute" else before - after
    predicted = found.total - found.total / found.gain
    return {
        "case": case.says, "kind": case.kind, "named": found.bottleneck, "shares": found.shares,
        "seconds": found.total, "with": before, "without": after, "saved": saved,
        "predicted": predicted, "error": abs(predicted - saved) / saved if saved else 0.0,
        "counterfactual": found.as_json()["counterfactual"], "mfu": found.mfu,
        "busy": found.busy, "fix": found.fix,
    }  # fmt: skip


def in_turns(probe: Any, without: Any) -> tuple[list[float], list[float]]:
    """Seconds of an update with the thing in the way and without it, one after the other."""
    slot = probe.work.model.network.model.layers[0].mlp
    module = slot[1]
    with_it, without_it = [], []
    for _ in range(TURNS):
        slot[1] = module
        with_it.append(probe.run().total)
        slot[1] = Plain()
        without_it.append(without.run().total)
    return with_it, without_it


def _rank(rank: int, case: Case, store: str, target: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        found = measure(case)
        if rank == 0:
            Path(target).write_text(json.dumps(found))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_case(case: Case, rounds: int = 1) -> dict[str, Any]:
    """The median of some rounds; the name is the one that most rounds gave."""
    found = [run_round(case) for _ in range(rounds)]
    names = [one["named"] for one in found]
    row = found[0] | {"named": statistics.mode(names), "names": names}
    for key in ("seconds", "with", "without", "saved", "predicted", "mfu", "busy"):
        row[key] = statistics.median(one[key] for one in found)
    row["shares"] = _medians([one["shares"] for one in found])
    numbers = ("predicted_seconds", "measured_seconds")
    trials = [one["counterfactual"] for one in found if one["named"] == row["named"]]
    row["counterfactual"] = {"change": trials[0]["change"]} | _medians(
        [{name: one[name] for name in numbers} for one in trials]
    )
    row["errors"] = [one["error"] for one in found]
    row["error"] = abs(row["predicted"] - row["saved"]) / row["saved"] if row["saved"] else 0.0
    return row


def _medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def run_round(case: Case) -> dict[str, Any]:
    """One round; an exchange between ranks in two processes of its own."""
    if case.kind != "communication":
        return measure(case)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        arguments = (case, str(Path(folder) / "store"), str(target))
        torch.multiprocessing.spawn(_rank, arguments, nprocs=2)
        return dict(json.loads(target.read_text()))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, with a line below on how many are named and how many gains are right."""
    lines = [
        "| in the way | named | its share | ms an update | counterfactual: predicted, measured | "
        "removed: gain predicted, measured | off by (rounds) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        trial = row["counterfactual"]
        tried = (
            f"{trial['change']}: {1e3 * trial['predicted_seconds']:.1f}, "
            f"{1e3 * trial['measured_seconds']:.1f} ms"
        )
        gain = "-"
        if row["saved"]:
            gain = f"{1e3 * row['predicted']:.1f}, {1e3 * row['saved']:.1f} ms"
        off = "-"
        if row["saved"]:
            off = f"{row['error']:.0%} ({min(row['errors']):.0%} to {max(row['errors']):.0%})"
        often = f"{row['names'].count(row['named'])} of {len(row['names'])}"
        lines.append(
            f"| {row['case']} | {row['named']}, {often} | {row['shares'][row['named']]:.0%} | "
            f"{1e3 * row['seconds']:.1f} | {tried} | {gain} | {off} |"
        )
    named = sum(row["named"] == row["kind"] for row in rows)
    gains = [row["error"] for row in rows if row["saved"]]
    right = sum(error <= TARGET for error in gains)
    lines.append("")
    lines.append(
        f"Named: {named} of {len(rows)}. Gain within {TARGET:.0%} of the measured one: {right} of "
        f"{len(gains)} (largest difference {max(gains, default=0.0):.0%})."
    )
    return "\n".join(lines)


def main() -> None:
    kinds = list(dict.fromkeys(case.kind for case in CASES))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--json", type=Path, help="keep results here, beside those of other cases")
    parser.add_argument("--rounds", type=int, default=5, help="a row is their median")
    parser.add_argument("--only", type=int, help="of each kind this one, from 0")
    arguments = parser.parse_args()
    kept: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.is_file():
        kept = json.loads(arguments.json.read_text())
    for kind in arguments.cases:
        cases = [case for case in CASES if case.kind == kind]
        for case in cases if arguments.only is None else [cases[arguments.only]]:
            kept[case.says] = run_case(case, arguments.rounds)
            print(".", end="", file=sys.stderr, flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(kept))
    print(table([kept[case.says] for case in CASES if case.says in kept]))


if __name__ == "__main__":
    main()
