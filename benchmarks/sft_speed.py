"""SFT of SmolLM2-135M with LoRA r=16: lehr, TRL and the machine's own limit in one run.

    python -m benchmarks.sft_speed --peer-python .venv-peer/bin/python --rounds 3

Both train on the same rows in the same order for the same number of updates, in turn, in
processes of their own; medians over rounds of the tokens (no padding) of the updates after the
first over their seconds. The losses of the first update must agree, so that speed is not bought
with another computation; exit status 1 where they do not. The limit is (4 P + 4 V d s) operations
a token at the measured matrix-product rate (P weights in the layers, s the supervised share).
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
    tokens_a_second,
)


def one_run(options: argparse.Namespace) -> dict[str, Any]:
    """lehr's timed updates: the child process."""
    import torch

    from lehr.data.loader import UpdateBatches
    from lehr.data.packing import merge
    from lehr.data.sources import read_source
    from lehr.diagnosis.machine import measure_gemm
    from lehr.objectives.language import Language
    from lehr.training.engine import Engine
    from lehr.training.schedules import Schedule
    from lehr.training.settings import EngineSettings

    model, encoder = adapted_model(options)
    examples = read_source("rows", [Path(options.rows)]).examples
    encoded = [one for example in examples for one in encoder.encode(example).encoded]
    batches = UpdateBatches({"rows": encoded}, {"rows": 1.0}, options.batch_size, 0, 1024)
    given = [
        {"input_ids": one.ids.tolist(), "completion_mask": one.supervised.int().tolist()}
        for one in in_order(batches, encoded, options.updates)
    ]
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
            Language(),
            batches,
            EngineSettings(
                updates=options.updates,
                learning_rate=2e-4,
                schedule=Schedule("linear", 0, 0, 0.0),
                checkpoint_every=options.updates,
            ),
            Path(folder),
            (0, "benchmark"),
            observers=(observe,),
            merge=merge,
        ).run()
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    weights = sum(p.numel() for name, p in model.network.named_parameters() if "lora" not in name)
    head = model.vocabulary_size * int(model.config.hidden_size)
    share = sum(row["supervised_tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    return {
        "wall": [row["seconds"] for row in rows[1:]],
        "cpu": [b[1] - a[1] for a, b in itertools.pairwise(marks)],
        "tokens": [row["tokens"] for row in rows[1:]],
        "given": given,
        "first": rows[0]["loss"],
        "losses": [row["loss"] for row in rows],
        "supervised_share": share,
        "operations_a_token": 4 * (weights - head) + 4 * head * share,
        "gemm_gflops": measure_gemm(dtype, seconds=1.0),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def rows_file(folder: Path, rows: int) -> Path:
    """Rows of about 125 tokens of which about a third are supervised."""
    from lehr.data.sources import read_source

    here = Path(__file__).parent.parent / "examples" / "data" / "style.jsonl"
    examples = read_source("style", [here]).examples
    path = folder / "rows.jsonl"
    lines = []
    for number in range(rows):
        one = examples[number % len(examples)]
        before = [examples[(number * 7 + k * 31 + 3) % len(examples)] for k in range(12)]
        asked = [str(other.messages[0]["content"]) for other in before[: 1 + number % 12]]
        question = " ".join([*asked, str(one.messages[0]["content"])])
        turns = [{"role": "user", "content": question}, dict(one.messages[1])]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


def main() -> None:
    options = options_of(argparse.ArgumentParser(description=__doc__), 16, 3, "fp32")
    runs = in_turn("sft", options, one_run, rows_file)
    if runs is not None:
        report(*runs, options)


def report(
    ours: list[dict[str, Any]], peers: list[dict[str, Any]], options: argparse.Namespace
) -> None:
    """The table, as benchmarks/results.md holds it."""
    limit = ours[0]["gemm_gflops"] * 1e9 / ours[0]["operations_a_token"]
    tokens = statistics.median(t for run in ours for t in run["tokens"])
    print(f"{options.precision}, {options.threads} threads, about {tokens:.0f} tokens an update, ")
    print(f"{ours[0]['supervised_share']:.0%} supervised; limit {limit:.0f} tokens/s")
    print("| | tokens/s (wall) | tokens / CPU s | peak GiB | first losses |")
    print("| --- | --- | --- | --- | --- |")
    rates = {}
    for name, runs in (("lehr", ours), ("TRL", peers)):
        if not runs:
            continue
        wall, cpu = (
            statistics.median(tokens_a_second(run, clock) for run in runs)
            for clock in ("wall", "cpu")
        )
        peak = statistics.median(run["peak_gib"] for run in runs)
        losses = ", ".join(f"{loss:.3f}" for loss in runs[0]["losses"][:2])
        rates[name] = wall
        print(f"| {name} | {wall:.0f} | {cpu:.0f} | {peak:.2f} | {losses} |")
    print(f"of the limit {rates['lehr'] / limit:.0%}")
    if "TRL" in rates:
        print(f"ratio {rates['lehr'] / rates['TRL']:.2f}")
    if peers:
        report_losses(equal_losses(ours, peers, options))


if __name__ == "__main__":
    main()
