"""False alarms of the guard: healthy runs, in which it should do nothing.

    python -m benchmarks.guard_healthy                       # 20 seeds of 2,000 updates
    python -m benchmarks.guard_healthy --start 20            # the next 20 seeds
    python -m benchmarks.guard_healthy --seeds 3 --updates 500

A small network predicts the next character of Python's docstrings from the sixteen before it
(AdamW, cosine with warmup, clip 1, a few documents of uneven length an update, so that loss
and gradient are noisy). Of the seeds a third each have one source, two sources of unlike
loss in random shares, and a learning rate three times as high. The pass rule was set before:
no rewind, no stop, at most 4 skipped updates in 40,000.

It also tells, from the signals of these runs, how many updates other limits would have called
unusual. `--keep FOLDER` writes each seed's result there, and finds it there the next time: the
runs may be made in pieces, and other rules judged without them. `--no-guard` shows seconds and
the final losses of the same runs without a guard: what was not skipped must be the same to the
last bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lehr.data.docstrings import docstring_rows
from lehr.data.shapes import Origin, Pack, Segments
from lehr.errors import Diverged
from lehr.objectives.base import Loss
from lehr.objectives.language import source_losses
from lehr.streams import generator_for
from lehr.training import events
from lehr.training.engine import Engine
from lehr.training.guard import Guard, GuardSettings, signals_of
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

CONTEXT, WIDTH, ROWS_AN_UPDATE = 16, 48, 4
SHORTEST_ROW, LONGEST_ROW = 24, 160  # characters
LIMITS = (4.0, 5.0, 6.0, 8.0, 10.0)
ALPHABET = {letter: n for n, letter in enumerate(map(chr, range(32, 127)), 1)}
ALLOWED_SKIPS = 4


class Characters(nn.Module):
    """The next character from the `CONTEXT` before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(len(ALPHABET) + 1, 12)
            self.inner = nn.Linear(12 * CONTEXT, WIDTH)
            self.head = nn.Linear(WIDTH, len(ALPHABET) + 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(ids).flatten(1))))


class Next:
    """Cross-entropy as a sum, by source, with the mean log Z."""

    def weight(self, pack: Pack) -> float:
        return float(pack.targets.numel())

    def loss(self, model: nn.Module, pack: Pack) -> Loss:
        padded = torch.cat([torch.zeros(CONTEXT - 1, dtype=torch.int64), pack.ids])
        logits = model(padded.unfold(0, CONTEXT, 1)[pack.predict_from])
        log_z = torch.logsumexp(logits, -1)
        losses = log_z - logits.gather(1, pack.targets[:, None])[:, 0]
        count = float(pack.targets.numel())
        metrics = source_losses(pack, losses.detach()) | {"log_z": (log_z.detach().sum(), count)}
        return Loss(losses.sum(), metrics)


def packs_of(texts: list[tuple[str, str]]) -> list[Pack]:
    """One pack a document; (source, text)."""
    packs = []
    for item, (source, text) in enumerate(texts):
        ids = torch.tensor([ALPHABET.get(letter, 0) for letter in text])
        pairs = len(ids) - 1
        packs.append(
            Pack(
                ids=ids,
                positions=torch.arange(len(ids)),
                segments=Segments(torch.tensor([0]), torch.tensor([len(ids)]), torch.tensor([-1])),
                predict_from=torch.arange(pairs),
                targets=ids[1:],
                sequence=torch.zeros(pairs, dtype=torch.int64),
                weights=torch.ones(pairs),
                sequence_example=torch.tensor([0]),
                items=(item,),
                origins=(Origin(source, "docstrings", item + 1),),
            )
        )
    return packs


class Drawn:
    """`ROWS_AN_UPDATE` documents an update, drawn with replacement by (seed, update)."""

    def __init__(self, packs: list[Pack], seed: int) -> None:
        self.packs, self.seed, self.update = packs, seed, 0

    @property
    def epoch(self) -> float:
        return self.update * ROWS_AN_UPDATE / len(self.packs)

    def next(self) -> list[Pack]:
        stream = generator_for("guard_healthy", self.seed, self.update)
        self.update += 1
        chosen = torch.randint(len(self.packs), (ROWS_AN_UPDATE,), generator=stream).tolist()
        return [self.packs[index] for index in chosen]

    def state(self) -> int:
        return self.update

    def load(self, state: int) -> None:
        self.update = state


def data_of(kind: str, texts: list[str]) -> list[Pack]:
    if kind == "mixed":  # the second source is a tenth of the rows, and far less predictable
        shuffled = torch.randperm(len(texts), generator=generator_for("mixed")).tolist()
        rows = []
        for number, text in enumerate(texts):
            if number % 10:
                rows.append(("docs", text))
            else:
                order = torch.randperm(len(text), generator=generator_for(shuffled[number]))
                rows.append(("scrambled", "".join(text[i] for i in order.tolist())))
        return packs_of(rows)
    return packs_of([("docs", text) for text in texts])


def run(seed: int, kind: str, packs: list[Pack], updates: int, guard: GuardSettings | None) -> Any:
    """One seed: what the guard did, the signals of every applied update, seconds, final hash."""
    seen: list[Any] = []
    model = Characters(seed)
    settings = EngineSettings(
        updates=updates,
        learning_rate=9e-3 if kind == "fast" else 3e-3,
        schedule=Schedule("cosine", warmup=0.03),
        checkpoint_every=max(1, updates // 2),
        micro_batch=1,
        guard=guard,
        stage=f"seed-{seed}",
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        engine = Engine(model, Next(), Drawn(packs, seed), settings, folder, (seed,), [seen.append])
        began, stopped = time.perf_counter(), False
        try:
            engine.run()
        except Diverged:
            stopped = True
        seconds = time.perf_counter() - began
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    return {
        "seed": seed,
        "kind": kind,
        "skipped": sum(isinstance(one, events.UpdateUnusual) for one in seen),
        "rewinds": sum(isinstance(one, events.WentBack) for one in seen),
        "stopped": stopped,
        "suspects": sum(isinstance(one, events.StepUnusual) for one in seen),
        "why": [one.why for one in seen if isinstance(one, events.UpdateUnusual)],
        "seconds": seconds,
        "loss": sum(row["loss"] for row in rows[-200:]) / len(rows[-200:]),
        "weights": float(weights.double().sum()),
        "rows": rows,
    }


def kept(folder: Path | None, seed: int, make: Callable[[], Any]) -> Any:
    """A seed's result, from the folder or made anew."""
    path = None if folder is None else folder / f"seed-{seed}.json"
    if path is not None and path.exists():
        return json.loads(path.read_text())
    found = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(found))
        aside.replace(path)
    return found


def unusual_at(limit: float, rows: list[dict[str, Any]]) -> int:
    """Updates of a finished run that another limit would have called unusual."""
    guard = Guard(GuardSettings(limit=limit))
    count = 0
    for attempt, row in enumerate(rows, 1):
        metrics = {name.removeprefix("objective."): value for name, value in row.items()}
        metrics = {k: v for k, v in metrics.items() if isinstance(v, float)}
        signals = signals_of(row["loss"], row["grad_norm"], metrics)
        if guard.judge(signals) is not None:
            count += 1
        else:
            guard.accept(attempt, signals)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--no-guard", action="store_true")
    parser.add_argument("--keep", type=Path, default=None, help="folder of the seeds' results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = [row.value["text"] for row in docstring_rows()[0]]
    lengths = torch.randint(
        SHORTEST_ROW, LONGEST_ROW, (len(texts),), generator=generator_for("lengths")
    ).tolist()
    texts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    guard = None if arguments.no_guard else GuardSettings()
    data: dict[str, list[Pack]] = {}
    total = {"skipped": 0, "rewinds": 0, "stopped": 0, "suspects": 0}
    elsewhere = dict.fromkeys(LIMITS, 0)
    for seed in range(arguments.start, arguments.start + arguments.seeds):
        kind = ("plain", "mixed", "fast")[seed % 3]
        packs = data.setdefault(kind, data_of(kind, texts))
        make = partial(run, seed, kind, packs, arguments.updates, guard)
        found = kept(arguments.keep, seed, make)
        rows = found.pop("rows")
        total = {name: count + int(found[name]) for name, count in total.items()}
        for limit in LIMITS:
            elsewhere[limit] += unusual_at(limit, rows)
        print(json.dumps(found), flush=True)
    print("all:", json.dumps(total), "updates:", arguments.seeds * arguments.updates)
    print("unusual at other limits:", elsewhere)
    if guard is not None:
        silent = not total["rewinds"] and not total["stopped"]
        print("pass" if silent and total["skipped"] <= ALLOWED_SKIPS else "FAIL")


if __name__ == "__main__":
    main()
