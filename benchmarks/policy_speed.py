"""One GRPO-shaped update of SmolLM2-135M with LoRA r=16: lehr and TRL on the same prompts.

    python -m benchmarks.policy_speed --peer-python .venv-peer/bin/python --rounds 1

An update: sample every prompt, reward, advantages within each group, forward and backward over
the samples, one step of AdamW. Each sample has all its new tokens on both sides (no stop id), so
that both do the same work; no padding is counted. The first update is left out on both sides. TRL
needs about 23 GiB for 8 prompts x 8 samples x 64 tokens: try `--batch-size 2` where there is less.
Log-probabilities of lehr's samples are compared with those of its own training pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.beside_peer import adapted_model, in_turn, options_of

GIB = 2**30
# Of 3 GiB, the target: what the planner may fill with live bytes. The rest are the libraries.
LIVE_GIB = 2.0


def reward(text: str) -> float:
    """The share of vowels: cheap, and no two samples have the same."""
    return sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text))


@dataclass
class Sampled:
    """Updates whose packs are sampled when they are asked for, as the engine's source of data."""

    model: Any
    prompts: Sequence[list[list[int]]]  # of each update
    samples: int
    new_tokens: int
    known: dict[int, Any] = field(default_factory=dict)  # what the objective reads
    seconds: list[float] = field(default_factory=list)  # of sampling
    decoded: list[float] = field(default_factory=list)  # log-probabilities of the first update
    packs: list[Any] = field(default_factory=list)  # of the last update
    tokens: tuple[int, int] = (0, 0)
    done: int = 0

    @property
    def epoch(self) -> float:
        return self.done / len(self.prompts)

    def state(self) -> int:
        return self.done

    def load(self, state: Any) -> None:
        self.done = int(state)

    def next(self) -> list[Any]:
        import torch

        from lehr.data.groups import group_of
        from lehr.data.packing import single
        from lehr.data.shapes import Origin
        from lehr.generation.groups import sample_groups
        from lehr.objectives.policy import Samples, group_advantages

        started = time.perf_counter()
        asked = self.prompts[self.done]
        written = sample_groups(
            self.model,
            asked,
            self.samples,
            max_new_tokens=self.new_tokens,
            stop_ids=frozenset(),
            seed=self.done,
            batch_size=len(asked) * self.samples,
        )
        decode = self.model.tokenizer.decode
        rewards = [[reward(decode(one.ids)) for one in group] for group in written]
        advantages = group_advantages(torch.tensor(rewards)).values
        groups = [
            group_of(prompt, [one.ids for one in answers], Origin("prompts", "prompts.jsonl", row))
            for row, (prompt, answers) in enumerate(zip(asked, written, strict=True), 1)
        ]
        self.known.clear()
        self.known.update((i, Samples(row.tolist())) for i, row in enumerate(advantages))
        self.packs = [single(*item) for item in enumerate(groups)]
        self.decoded = [x for group in written for one in group for x in one.log_probabilities]
        self.tokens = (
            sum(group.tokens for group in groups),
            sum(group.unshared_tokens for group in groups),
        )
        self.done += 1
        self.seconds.append(time.perf_counter() - started)
        return self.packs


def one_run(options: argparse.Namespace) -> dict[str, Any]:
    """lehr's timed updates: the child process."""

    from lehr.data.packing import merge
    from lehr.objectives.policy import Policy
    from lehr.training.engine import Engine
    from lehr.training.schedules import Schedule
    from lehr.training.settings import EngineSettings

    model, encoder = adapted_model(options)
    rows = [json.loads(line) for line in Path(options.rows).read_text().splitlines()]
    ids = [list(encoder.prompt_ids(row["prompt"])) for row in rows]
    size = options.batch_size
    batches = Sampled(
        model,
        [ids[start : start + size] for start in range(0, len(ids), size)],
        options.samples,
        options.new_tokens,
    )
    pack_tokens = max(map(len, ids)) + options.samples * options.new_tokens
    micro_batch = chosen_micro_batch(model, pack_tokens, options)
    marks: list[tuple[float, float]] = []
    lines: list[dict[str, Any]] = []
    gaps: list[float] = []

    def observe(event: Any) -> None:
        row = getattr(event, "row", None)
        if row is not None:
            marks.append((time.perf_counter(), time.process_time()))
            lines.append(dict(row))

    model.train()
    with tempfile.TemporaryDirectory() as folder:
        Engine(
            model,
            Policy(batches.known),
            batches,
            EngineSettings(
                updates=options.updates,
                learning_rate=1e-5,
                schedule=Schedule("constant", 0, 0, 0.0),
                checkpoint_every=options.updates,
                micro_batch=micro_batch,
            ),
            Path(folder),
            (0, "benchmark"),
            observers=(observe,),
            merge=merge,
        ).run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if options.agreement:
        # Once more, now that no weight moves between sampling and the training pass.
        batches.load(0)
        gaps = gaps_of(model, batches)
    return {
        "wall": [row["seconds"] for row in lines[1:]],
        "cpu": [b[1] - a[1] for a, b in itertools.pairwise(marks)],
        "sampling": batches.seconds[1 : options.updates],
        "losses": [row["loss"] for row in lines],
        "ratio": [row["objective.ratio"] for row in lines],
        "tokens": batches.tokens[0],
        "unshared_tokens": batches.tokens[1],
        "micro_batch": micro_batch,
        "gaps": gaps,
        "peak_gib": peak,
    }


def chosen_micro_batch(model: Any, pack_tokens: int, options: argparse.Namespace) -> int:
    """Groups at once, as the planner forecasts them under LIVE_GIB."""
    from lehr.diagnosis.planner import forecast
    from lehr.training.batch import choose_micro_batch

    parameters = sum(p.numel() for p in model.network.parameters())
    trained = sum(p.numel() for p in model.trained().values())
    estimate = partial(
        forecast,
        model.config,
        parameters - trained,
        trained,
        options.precision,
        pack_tokens,
        vocabulary=model.vocabulary_size,
    )
    return choose_micro_batch(
        options.batch_size, lambda packs: estimate(micro_batch=packs)["peak"], int(LIVE_GIB * GIB)
    ).packs


def gaps_of(model: Any, batches: Sampled) -> list[float]:
    """Of each new token of an update: its log-probability while decoding less the training's."""
    import torch

    values: list[float] = []
    model.eval()
    for one in batches.next():
        with torch.no_grad():
            stats = model.token_stats(model.hidden(one), one.predict_from, one.targets)
        values += stats.log_probability.tolist()
    return [a - b for a, b in zip(batches.decoded, values, strict=True)]


def rows_file(folder: Path, rows: int) -> Path:
    """Questions of one to three sentences, as messages."""
    from lehr.data.sources import read_source

    here = Path(__file__).parent.parent / "examples" / "data" / "style.jsonl"
    asked = [str(one.messages[0]["content"]) for one in read_source("style", [here]).examples]
    path = folder / "prompts.jsonl"
    with path.open("w") as file:
        for number in range(rows):
            parts = [asked[(5 * number + k) % len(asked)] for k in range(1 + number % 3)]
            message = {"role": "user", "content": " ".join(parts)}
            file.write(json.dumps({"prompt": [message]}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--peer-micro-batch", type=int, default=0, help="samples; 0: all at once")
    parser.add_argument("--agreement", action="store_true", help="compare log-probabilities")
    options = options_of(parser, 8, 1, "bf16", updates=2)
    runs = in_turn(
        "policy",
        options,
        one_run,
        rows_file,
        peer_script="peer_trl_policy.py",
        both=["--samples", str(options.samples), "--new-tokens", str(options.new_tokens)],
        own=["--agreement"] if options.agreement else [],
        peer_own=["--micro-batch", str(options.peer_micro_batch)],
    )
    if runs is not None:
        report(*runs, options)


def report(
    ours: list[dict[str, Any]], peers: list[dict[str, Any]], options: argparse.Namespace
) -> None:
    """The table, as benchmarks/results.md holds it."""
    first = ours[0]
    new = options.batch_size * options.samples * options.new_tokens
    print(
        f"{options.precision}, {options.threads} threads, {options.batch_size} prompts x ", end=""
    )
    print(f"{options.samples} samples x {options.new_tokens} new tokens an update;")
    print(
        f"lehr trains on {first['tokens']} tokens where one row an answer takes "
        f"{first['unshared_tokens']}, {first['micro_batch']} groups at once"
    )
    print("| | s an update (wall) | CPU s | of it sampling | new tokens/s | peak GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    medians = {}
    for name, runs in (("lehr", ours), ("TRL", peers)):
        if not runs:
            continue
        wall, cpu, sampling = (
            statistics.median(s for run in runs for s in run[column])
            for column in ("wall", "cpu", "sampling")
        )
        peak = statistics.median(run["peak_gib"] for run in runs)
        medians[name] = wall, peak
        print(
            f"| {name} | {wall:.1f} | {cpu:.1f} | {sampling:.1f} | {new / wall:.0f} | {peak:.2f} |"
        )
    print("ratios of the policy to what sampled:", ", ".join(f"{r:.6f}" for r in first["ratio"]))
    if first["gaps"]:
        sizes = [abs(gap) for gap in first["gaps"]]
        print(f"log-probabilities, decoding less training, {len(sizes)} tokens: ", end="")
        mean = sum(first["gaps"]) / len(sizes)
        print(f"mean size {sum(sizes) / len(sizes):.2e}, largest {max(sizes):.2e}, sum {mean:+.1e}")
    if "TRL" in medians:
        (wall, peak), (their_wall, their_peak) = medians["lehr"], medians["TRL"]
        times, share = their_wall / wall, peak / their_peak
        print(f"TRL takes {times:.2f} times as long, lehr {share:.2f} of its memory")


if __name__ == "__main__":
    main()
