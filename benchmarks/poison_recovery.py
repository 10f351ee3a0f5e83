"""One bad batch at update 300: what is left of it under no policy, under clipping, with the guard.

    python -m benchmarks.poison_recovery

A character model of 1 M parameters (AdamW). Two poisons, each put into attempt 300 alone:
`loud`   one character repeated, its loss times 100: the guard sees it before the step
`quiet`  usual text and a usual loss, but once it is read the signs of the last norm's gains
         are turned, as by a failing memory: only what follows tells

after     largest loss of the 20 updates that follow, in nats a character
back      updates until the mean loss of ten is below that of the ten before the poison
equal     whether the last weights have the bits of a run without that batch from the start
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.stability import ROW, VOCABULARY, Text, characters
from lehr.data.shapes import Pack
from lehr.models.language_model import LanguageModel
from lehr.models.probe import probe_pack
from lehr.models.tiny import config_of_shape, network_of
from lehr.objectives.base import Loss
from lehr.objectives.language import Language
from lehr.training.engine import Engine
from lehr.training.guard import GuardSettings
from lehr.training.quarantine import Quarantined
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

HIDDEN, LAYERS, INNER, HEADS = 128, 5, 352, 4
POISONED, UPDATES, ROWS = 300, 340, 2
POISONS = ("loud", "quiet")
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"clip": None},
    "clip": {"clip": 1.0},
    "rewind": {"clip": 1.0, "guard": GuardSettings("rewind")},
}


class Poisoned(Text):
    """The text, with one loud batch in it where that is asked."""

    loud = False

    def next(self) -> list[Any]:
        packs = super().next()
        if self.loud and self.update == POISONED:
            return [probe_pack([(torch.full((ROW,), 1), -1)] * ROWS)]
        return packs


class Objective(Language):
    """The loss of the language, but for the poison. Its batch is known by its first tokens."""

    poison = ""
    bad: torch.Tensor | None = None

    def loss(self, model: Any, pack: Pack) -> Loss:
        found = super().loss(model, pack)
        if self.bad is None or not torch.equal(pack.ids, self.bad):
            return found
        if self.poison == "loud":
            return Loss(found.total * 100, found.metrics)
        model.network.model.norm.weight.data.neg_()
        return found


def run(poison: str, rows: torch.Tensor, updates: int, given: bool, policy: str) -> Any:
    """One training; given: the batch is left out from the start."""
    config = config_of_shape(HIDDEN, LAYERS, INNER, HEADS, HEADS, VOCABULARY)
    model = LanguageModel(network_of(config, "poison"), None, "poison")
    model.train_all()
    batches = Poisoned(rows, 0, ROWS)
    batches.loud = poison == "loud"
    batches.load(POISONED - 1)
    objective = Objective(0.0, False, False)
    object.__setattr__(objective, "poison", poison)
    object.__setattr__(objective, "bad", batches.next()[0].ids)
    batches.load(0)
    settings = EngineSettings(
        updates=updates,
        learning_rate=2e-3,
        schedule=Schedule("cosine", warmup=0.05),
        checkpoint_every=updates // 8,
        quarantine=(Quarantined(POISONED, 0, "poisoned", ()),) if given else (),
        **POLICIES[policy],
    )
    with tempfile.TemporaryDirectory() as folder:
        Engine(model, objective, batches, settings, Path(folder), (0, "poison")).run()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
        undone = (Path(folder) / "undone.jsonl").exists()
    digest = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        digest.update(value.detach().numpy().tobytes())
    return {"lines": lines, "hash": digest.hexdigest(), "went back": undone}


def mean(losses: list[float]) -> float:
    return statistics.mean(losses) if losses else float("nan")


def row_of(poison: str, policy: str, found: Any, clean: Any) -> str:
    """A line of the table."""
    before = mean([r["loss"] for r in found["lines"] if POISONED - 10 <= r["attempt"] < POISONED])
    later = [r["loss"] for r in found["lines"] if r["attempt"] > POISONED and not r["skipped"]]
    back = next((n for n in range(len(later) - 9) if mean(later[n : n + 10]) < before), None)
    did = "went back" if found["went back"] else ""
    did = did or ("skipped it" if any(r["skipped"] for r in found["lines"]) else "nothing")
    equal = "yes" if found["hash"] == clean["hash"] else "no"
    last = mean([r["loss"] for r in found["lines"][-20:]])
    numbers = f"{max(later[:20]):.2f} | {'never' if back is None else back} | {last:.3f}"
    return f"| {poison} | {policy} | {did} | {numbers} | {equal} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--poisons", nargs="+", choices=POISONS, default=POISONS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, _, _ = characters()
    print("| poison | policy | the run | after | back | last 20 | equal |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- |", flush=True)
    for policy in arguments.policies:
        clean = run("", rows, arguments.updates, True, policy)
        for poison in arguments.poisons:
            found = run(poison, rows, arguments.updates, False, policy)
            print(row_of(poison, policy, found, clean), flush=True)


if __name__ == "__main__":
    main()
