"""Which preventives widen the range of usable learning rates: Wortsman et al. in miniature.

    python -m benchmarks.stability                        # every arm, rate and seed, then the table
    python -m benchmarks.stability --record runs.jsonl    # goes on where it was stopped

A transformer of 4 layers and width 64 predicts the next character of Python's docstrings (AdamW
0.9 / 0.95, warmup, cosine to 0), once for each arm, learning rate and seed. All arms of a seed
begin with the same weights and see the same text. Small models at high rates show what large
ones show at usual rates: attention logits that grow and outputs that diverge (arXiv 2309.14322).

loss         held-out, nats a character, after the last update; mean over seeds
diverged     runs that end non-finite, stopped, or above the loss of character frequencies alone
sensitivity  mean over rates of min(loss, ln V) - the best loss of any arm (that paper's measure)
logit        largest sampled attention logit after the last update, at the rate 1e-1
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lehr.data.docstrings import docstring_rows
from lehr.errors import Diverged
from lehr.models.language_model import LanguageModel
from lehr.models.probe import probe_pack
from lehr.models.tiny import config_of_shape, network_of
from lehr.objectives.language import Language
from lehr.streams import generator_for
from lehr.training.clipping import AdaptiveClipSettings
from lehr.training.engine import Engine
from lehr.training.restarts import RestartSettings
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

HIDDEN, LAYERS, INNER, HEADS = 64, 4, 176, 2
ALPHABET = {letter: n for n, letter in enumerate(map(chr, range(32, 127)), 1)}
VOCABULARY = len(ALPHABET) + 1
ROW, ROWS = 64, 4  # characters of a row, rows of an update
RATES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
HELD_OUT = 64  # rows
LOOKED_AT = 1e-1  # the rate whose attention logits are shown


PER_TENSOR = AdaptiveClipSettings("tensor", warmup=20)


@dataclass(frozen=True)
class Arm:
    name: str
    qk_norm: bool = False
    z_loss: float = 0.0
    engine: Mapping[str, Any] = field(default_factory=dict)


ARMS = (
    Arm("nothing", engine={"clip": None}),
    Arm("clip 1"),
    Arm("clip 1, z-loss 1e-4", z_loss=1e-4),
    Arm("clip 1, QK-norm", qk_norm=True),
    Arm("clip 1, z-loss, QK-norm", qk_norm=True, z_loss=1e-4),
    Arm("per tensor (AdaGC)", engine={"clip": None, "adaptive_clip": PER_TENSOR}),
    Arm("z-score (ZClip)", engine={"clip": None, "adaptive_clip": AdaptiveClipSettings("z_score")}),
    Arm("clip 1, restart", engine={"restart": RestartSettings(every=40, warmup=10)}),
)  # fmt: skip


class Text:
    """Rows of running text, `count` an update, drawn by (seed, update)."""

    epoch = 0.0

    def __init__(self, rows: torch.Tensor, seed: int, count: int = ROWS) -> None:
        self.rows, self.seed, self.count, self.update = rows, seed, count, 0

    def next(self) -> list[Any]:
        stream = generator_for("stability", self.seed, self.update)
        self.update += 1
        chosen = torch.randint(len(self.rows), (self.count,), generator=stream)
        return [probe_pack([(row, -1) for row in self.rows[chosen]])]

    def state(self) -> int:
        return self.update

    def load(self, state: int) -> None:
        self.update = state


def characters() -> tuple[torch.Tensor, Any, float]:
    """Training rows, a pack of held-out rows, the held-out loss of character frequencies."""
    text = "\n".join(str(row.value["text"]) for row in docstring_rows()[0])
    ids = torch.tensor([ALPHABET.get(letter, 0) for letter in text])
    rows = ids[: len(ids) // ROW * ROW].view(-1, ROW)
    order = torch.randperm(len(rows), generator=generator_for("stability rows"))
    held, rows = rows[order[:HELD_OUT]], rows[order[HELD_OUT:]]
    counts = torch.bincount(rows.flatten(), minlength=VOCABULARY).double() + 1
    unigram = -(counts / counts.sum()).log()[held[:, 1:]].mean().item()
    return rows, probe_pack([(row, -1) for row in held]), unigram


def run(arm: Arm, rate: float, seed: int, updates: int, rows: torch.Tensor, held: Any) -> Any:
    """One training; its held-out loss (None where it is not finite) and largest logit."""
    config = config_of_shape(HIDDEN, LAYERS, INNER, HEADS, HEADS, VOCABULARY, arm.qk_norm)
    model = LanguageModel(network_of(config, "stability", seed), None, arm.name)
    model.train_all()
    settings = EngineSettings(
        updates=updates,
        learning_rate=rate,
        schedule=Schedule("cosine", warmup=0.1, final=0.0),
        checkpoint_every=updates,
        **arm.engine,
    )
    began, stopped = time.process_time(), False
    with tempfile.TemporaryDirectory() as folder:
        batches, objective = Text(rows, seed), Language(arm.z_loss, False, False)
        engine = Engine(model, objective, batches, settings, Path(folder), (seed, "stability"))
        try:
            engine.run()
        except Diverged:
            stopped = True
    model.watch_attention(4)
    stats = model.token_stats(model.hidden(held), held.predict_from, held.targets)
    loss = -float(stats.log_probability.detach().double().mean())
    logit = model.largest_attention_logit()
    assert logit is not None
    return {
        "arm": arm.name,
        "rate": rate,
        "seed": seed,
        "updates": updates,
        "loss": loss if math.isfinite(loss) and not stopped else None,
        "logit": logit if math.isfinite(logit) else None,
        "log_z": float(stats.log_z.detach().abs().mean()),
        "stopped": stopped,
        "seconds": time.process_time() - began,
    }


def table(found: list[dict[str, Any]], unigram: float) -> str:
    """The measures of every arm, as a Markdown table."""
    start = math.log(VOCABULARY)
    best = min(one["loss"] for one in found if one["loss"] is not None)
    head = [f"{rate:g}" for rate in RATES]
    lines = [
        "| arm | " + " | ".join(head) + " | diverged | sensitivity | logit |",
        "| --- |" + " ---: |" * (len(head) + 3),
    ]
    for arm in ARMS:
        own = [one for one in found if one["arm"] == arm.name]
        if not own:
            continue
        cells, excess = [], []
        for rate in RATES:
            losses = [one["loss"] for one in own if one["rate"] == rate]
            kept = [start if loss is None else min(loss, start) for loss in losses]
            excess += [loss - best for loss in kept]
            cells.append(f"{statistics.mean(kept):.2f}" if kept else "")
        bad = sum(one["loss"] is None or one["loss"] > unigram for one in own)
        logits = [one["logit"] for one in own if one["rate"] == LOOKED_AT]
        finite = [one for one in logits if one is not None]
        logit = f"{statistics.median(finite):.1f}" if finite else "not finite"
        numbers = f"{bad} of {len(own)} | {statistics.mean(excess):.3f} | {logit}"
        lines.append(f"| {arm.name} | " + " | ".join(cells) + f" | {numbers} |")
    return "\n".join(lines)


def todo(arguments: argparse.Namespace) -> Iterator[tuple[Arm, float, int]]:
    for seed in range(arguments.seeds):
        for rate in RATES:
            for arm in ARMS:
                if not arguments.arms or arm.name in arguments.arms:
                    yield arm, rate, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--record", type=Path, help="JSON lines of finished runs, gone on from")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="only these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, held, unigram = characters()
    found: list[dict[str, Any]] = []
    if arguments.record and arguments.record.exists():
        lines = arguments.record.read_text().splitlines()
        found = [one for one in map(json.loads, lines) if one["updates"] == arguments.updates]
    done = {(one["arm"], one["rate"], one["seed"]) for one in found}
    for arm, rate, seed in todo(arguments):
        if (arm.name, rate, seed) in done:
            continue
        found.append(run(arm, rate, seed, arguments.updates, rows, held))
        if arguments.record:
            with arguments.record.open("a") as stream:
                stream.write(json.dumps(found[-1]) + "\n")
    print(table(found, unigram))
    seconds = sum(one["seconds"] for one in found)
    print(f"ln V {math.log(VOCABULARY):.2f}, character frequencies {unigram:.2f}; ", end="")
    print(f"{len(found)} runs of {arguments.updates} updates, {seconds:.0f} s of one core")


if __name__ == "__main__":
    main()
