"""What each choice of the training core costs: seconds an update, peak memory, loss.

    python -m benchmarks.training_core                            # every row on both models
    python -m benchmarks.training_core --groups precision --models 9m --updates 6

Models: a 9 M model made from scratch, of which all weights train, and SmolLM2-135M-Instruct
with LoRA r = 16. Each row is a process of its own, so that no row inherits another's memory.
All rows of a model see the same tokens of Python's docstrings, 4 packs of 256 an update.

seconds  median of the updates after the second; cpu: processor time of it, summed over threads,
         which other programs on the machine disturb less
peak     largest resident memory while training, above that of the loaded model (of the GPU:
         largest allocation); malloc keeps some, so differences below 30 MiB say nothing
loss     of the last update

A new row is one more entry of ROWS.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

PACK_TOKENS, PACKS = 256, 4
MODELS = {"9m": "tiny:9m", "smollm2": "smollm2-135m-instruct"}


@dataclass(frozen=True)
class Row:
    """One measurement.

    group      rows that are compared; the first of a group is what the others are held to
    precision  of the model and the engine
    recompute  see LanguageModel.recompute
    engine     further settings of the engine, as JSON-like values for `settings_of`
    """

    group: str
    name: str
    precision: str = "fp32"
    recompute: str = "none"
    engine: Mapping[str, Any] = field(default_factory=dict)


ROWS = (
    Row("precision", "fp32"),
    Row("precision", "bf16", "bf16"),
    Row("precision", "fp16", "fp16", engine={"loss_scale": {}}),
    Row("precision", "fp8 current", "fp8", engine={"fp8": {}}),
    Row("precision", "fp8 delayed", "fp8", engine={"fp8": {"scaling": "delayed"}}),
    Row("precision", "fp8 block", "fp8", engine={"fp8": {"scaling": "block"}}),
    Row("precision", "pure_bf16", "pure_bf16"),
    Row("precision", "pure_bf16 stochastic", "pure_bf16", engine={"stochastic_rounding": True}),
    Row("optimizer", "adamw"),
    Row("optimizer", "sgd", engine={"optimizer": {"kind": "sgd"}}),
    Row("optimizer", "momentum", engine={"optimizer": {"kind": "sgd", "momentum": 0.9}}),
    Row("optimizer", "muon", engine={"optimizer": {"kind": "muon"}}),
    Row("optimizer", "adamw + ema", engine={"ema": {"decay": 0.99}}),
    Row("recompute", "none"),
    Row("recompute", "full", recompute="full"),
)


def settings_of(row: Row, updates: int) -> Any:
    """The engine's settings of a row."""
    from lehr.training.averaging import AverageSettings
    from lehr.training.float8_recipe import Float8Settings
    from lehr.training.loss_scale import LossScaleSettings
    from lehr.training.optimizers import OptimizerSettings
    from lehr.training.schedules import Schedule
    from lehr.training.settings import EngineSettings

    classes = {
        "loss_scale": LossScaleSettings,
        "fp8": Float8Settings,
        "optimizer": OptimizerSettings,
        "ema": AverageSettings,
    }
    given = {
        key: classes[key](**value) if key in classes else value for key, value in row.engine.items()
    }
    return EngineSettings(
        updates=updates,
        learning_rate=3e-4,
        schedule=Schedule("constant", warmup=0),
        precision=row.precision,
        checkpoint_every=updates,
        **given,
    )


def measure(model_name: str, row: Row, updates: int, threads: int, device: str) -> dict[str, Any]:
    """One row in this process."""
    import torch

    from lehr.data.docstrings import docstring_rows
    from lehr.data.packing import merge
    from lehr.models.loading import load_model
    from lehr.objectives.language import Language
    from lehr.training.engine import Engine

    torch.set_num_threads(threads)
    texts = [str(one.value["text"]) for one in docstring_rows()[0]]
    everything = model_name == "9m"
    model = load_model(
        MODELS[model_name],
        corpus=lambda: texts[:2000],
        precision=row.precision,
        all_weights=everything,
    )
    if everything:
        model.train_all()
    else:
        model.add_adapter(rank=16)
    model.to(device)
    model.recompute(row.recompute)
    model.train()
    batches = Stream(model.tokenizer, texts)
    seconds: list[float] = []
    losses: list[float] = []
    marks: list[float] = []
    loaded = reset_peak(device)

    def observe(event: Any) -> None:
        line = getattr(event, "row", None)
        if line is not None:
            marks.append(time.process_time())
            seconds.append(line["seconds"])
            losses.append(line["loss"])

    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            model,
            Language(accuracy=False, per_source=False),
            batches,
            settings_of(row, updates),
            Path(folder),
            (0, "benchmark"),
            observers=(observe,),
            merge=merge,
        )
        engine.run()
    return {
        "model": model_name,
        "group": row.group,
        "row": row.name,
        "seconds": statistics.median(seconds[2:] or seconds),
        "cpu": statistics.median([b - a for a, b in pairwise(marks)] or [math.nan]),
        "peak_mib": (peak(device) - loaded) / 2**20,
        "loss": losses[-1],
    }


class Stream:
    """Packs of PACK_TOKENS tokens of running text, every token but the first a target."""

    epoch = 0.0

    def __init__(self, tokenizer: Any, texts: list[str], packs: int = PACKS) -> None:
        import torch

        self._packs = packs
        ids: list[int] = []
        for text in texts[:1500]:
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        count = len(ids) // PACK_TOKENS
        self._rows = torch.tensor(ids[: count * PACK_TOKENS]).view(count, PACK_TOKENS)
        self._next = 0

    def hold_out(self, packs: int) -> list[Any]:
        """Take packs away, spread over the text: no update sees them."""
        from lehr.models.probe import probe_pack

        every = len(self._rows) // packs
        taken = self._rows[::every][:packs]
        keep = [n for n in range(len(self._rows)) if n % every or n >= every * packs]
        self._rows = self._rows[keep]
        return [probe_pack([(ids, -1)]) for ids in taken]

    def next(self) -> list[Any]:
        from lehr.models.probe import probe_pack

        taken = [self._rows[(self._next + n) % len(self._rows)] for n in range(self._packs)]
        self._next += self._packs
        return [probe_pack([(ids, -1)]) for ids in taken]

    def state(self) -> Any:
        return self._next

    def load(self, state: Any) -> None:
        self._next = state


def reset_peak(device: str) -> int:
    """Bytes in use now; the high-water mark begins here."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak(device)
    return _status("VmRSS")


def peak(device: str) -> int:
    """The high-water mark in bytes."""
    import torch

    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    found = _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def in_a_process(model: str, row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.training_core", "--child", row.group, row.name]
    command += ["--models", model, "--updates", str(options.updates)]
    command += ["--threads", str(options.threads), "--device", options.device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"model": model, "group": row.group, "row": row.name, "failed": last}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(results: list[dict[str, Any]]) -> str:
    """One line a row, each beside the first of its group and model."""
    titles = f"{'s/update':>9} {'x':>6} {'cpu s':>7} {'peak MiB':>9} {'loss':>7}"
    lines = [f"{'model':8} {'row':34} {titles}"]
    first: dict[tuple[str, str], float] = {}
    for one in results:
        name = f"{one['group']}: {one['row']}"
        if "failed" in one:
            lines.append(f"{one['model']:8} {name:34} {one['failed']}")
            continue
        base = first.setdefault((one["model"], one["group"]), one["seconds"])
        lines.append(
            f"{one['model']:8} {name:34} {one['seconds']:9.3f} {one['seconds'] / base:6.2f} "
            f"{one['cpu']:7.3f} {one['peak_mib']:9.0f} {one['loss']:7.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table; `--json FILE` keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    groups = list(dict.fromkeys(row.group for row in ROWS))
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("GROUP", "ROW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        row = next(r for r in ROWS if [r.group, r.name] == options.child)
        print(json.dumps(measure(options.models[0], row, options.updates, options.threads,
                                 options.device)))  # fmt: skip
        return
    chosen = [row for row in ROWS if row.group in options.groups]
    results = []
    for model in options.models:
        for row in chosen:
            results.append(in_a_process(model, row, options))
            print(table(results[-1:]).splitlines()[-1], file=sys.stderr)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
