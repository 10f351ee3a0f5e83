"""DPO of SmolLM2-135M with LoRA r=16: lehr and TRL on the same pairs in one run.

    python -m benchmarks.dpo_speed --peer-python .venv-peer/bin/python --precision bf16 --rounds 2

Both train on the same pairs for the same number of updates in turn, in processes of their own.
The reference pass counts: lehr makes it once before the first update, TRL inside each update. The
first update is left out on both sides, and its share of lehr's reference pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.beside_peer import (
    adapted_model,
    equal_losses,
    in_order,
    in_turn,
    options_of,
    report_losses,
)


def one_run(options: argparse.Namespace) -> dict[str, Any]:
    """lehr's timed updates: the child process."""
    from lehr.data.loader import UpdateBatches
    from lehr.data.packing import merge
    from lehr.data.sources import read_source
    from lehr.objectives.preference import Dpo
    from lehr.stages.preference import log_probabilities
    from lehr.training.engine import Engine
    from lehr.training.schedules import Schedule
    from lehr.training.settings import EngineSettings

    model, encoder = adapted_model(options)
    examples = read_source("rows", [Path(options.rows)]).examples
    encoded = [one for example in examples for one in encoder.encode(example).encoded]
    batches = UpdateBatches({"rows": encoded}, {"rows": 1.0}, options.batch_size, 0, 1024)
    given = []
    first_asked = in_order(batches, encoded, 1)
    for one in in_order(batches, encoded, options.updates):
        sides = zip(("chosen_ids", "rejected_ids"), one.branches, strict=True)
        answers = {name: branch.ids.tolist() for name, branch in sides}
        given.append({"prompt_ids": one.ids.tolist(), **answers})
    started = time.perf_counter(), time.process_time()
    reference = log_probabilities(model, batches.items(), model.state(), 1024)
    passed = time.perf_counter() - started[0], time.process_time() - started[1]
    marks: list[tuple[float, float]] = []
    rows: list[dict[str, Any]] = []

    def observe(event: Any) -> None:
        row = getattr(event, "row", None)
        if row is not None:
            marks.append((time.perf_counter(), time.process_time()))
            rows.append(dict(row))

    model.train()
    with tempfile.TemporaryDirectory() as folder:
        Engine(
            model,
            Dpo(reference=reference, beta=0.1),
            batches,
            EngineSettings(
                updates=options.updates,
                learning_rate=1e-4,
                schedule=Schedule("linear", 0, 0, 0.0),
                checkpoint_every=options.updates,
            ),
            Path(folder),
            (0, "benchmark"),
            observers=(observe,),
            merge=merge,
        ).run()
    naive = sum(one.unshared_tokens for one in encoded)
    shared = sum(one.tokens for one in encoded)
    numbers = [item for item, _ in batches.items()]
    place = {id(one): number for number, one in zip(numbers, encoded, strict=True)}
    asked = first_asked
    chosen = sum(reference[place[id(one)]][0] for one in asked)
    first = chosen / sum(len(one.branches[0].ids) for one in asked)
    share = passed[0] / options.updates, passed[1] / options.updates
    return {
        "wall": [row["seconds"] + share[0] for row in rows[1:]],
        "cpu": [b[1] - a[1] + share[1] for a, b in itertools.pairwise(marks)],
        "losses": [row["loss"] for row in rows],
        "given": given,
        "first": first,
        "tokens": shared,
        "naive_tokens": naive,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def rows_file(folder: Path, rows: int) -> Path:
    """Pairs whose questions are of many lengths."""
    from lehr.data.sources import read_source

    here = Path(__file__).parent.parent / "examples" / "data" / "style_pairs.jsonl"
    lines = [json.loads(line) for line in here.read_text().splitlines()]
    assert read_source("pairs", [here]).examples
    path = folder / "pairs.jsonl"
    with path.open("w") as file:
        for number in range(rows):
            one = lines[number % len(lines)]
            more = [lines[(number * 7 + k * 31 + 3) % len(lines)] for k in range(number % 12)]
            question = " ".join([*(other["prompt"] for other in more), one["prompt"]])
            file.write(json.dumps({**one, "prompt": question}) + "\n")
    return path


def main() -> None:
    options = options_of(argparse.ArgumentParser(description=__doc__), 8, 2, "bf16")
    runs = in_turn("dpo", options, one_run, rows_file)
    if runs is not None:
        report(*runs, options)


def report(
    ours: list[dict[str, Any]], peers: list[dict[str, Any]], options: argparse.Namespace
) -> None:
    """The table, as benchmarks/results.md holds it."""
    first = ours[0]
    print(f"{options.precision}, {options.threads} threads, {options.batch_size} pairs an update,")
    print(
        f"{first['tokens']} tokens computed where one row an answer takes {first['naive_tokens']}"
    )
    print("| | pairs/s (wall) | pairs / CPU s | peak GiB | first losses |")
    print("| --- | --- | --- | --- | --- |")
    rates = {}
    for name, runs in (("lehr", ours), ("TRL", peers)):
        if not runs:
            continue
        wall, cpu = (
            statistics.median(
                options.batch_size * len(run[clock]) / sum(run[clock]) for run in runs
            )
            for clock in ("wall", "cpu")
        )
        peak = statistics.median(run["peak_gib"] for run in runs)
        losses = ", ".join(f"{loss:.3f}" for loss in runs[0]["losses"][:2])
        rates[name] = wall
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {peak:.2f} | {losses} |")
    if "TRL" in rates:
        print(f"ratio {rates['lehr'] / rates['TRL']:.2f}")
    if peers:
        report_losses(equal_losses(ours, peers, options))


if __name__ == "__main__":
    main()
