"""What the guard costs: its own seconds in an update, as a share of the update.

    python -m benchmarks.guard_cost --models 9m smollm2 --updates 12

All that the guard does in an update is timed where it happens, so that the noise of a busy
machine falls on both sides: the verdict on full windows, the sampled weights before and after
the step, their norm. The target is below 2 %. Models and data are those of `training_core`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.training_core import MODELS, Row, Stream, settings_of

TARGET = 0.02


def measure(name: str, updates: int) -> dict[str, float]:
    """Medians over the updates after the second: seconds of the guard and of the update."""
    import torch

    from lehr.data.docstrings import docstring_rows
    from lehr.data.packing import merge
    from lehr.models.loading import load_model
    from lehr.objectives.language import Language
    from lehr.training.engine import Engine
    from lehr.training.guard import GuardSettings
    from lehr.training.guarding import RunGuard

    torch.set_num_threads(1)
    texts = [row.value["text"] for row in docstring_rows()[0]]
    everything = MODELS[name].startswith("tiny:")
    model = load_model(
        MODELS[name], corpus=lambda: texts[:2000], precision="fp32", all_weights=everything
    )
    if everything:
        model.train_all()
    else:
        model.add_adapter(rank=16)
    model.train()
    spent, of_guard, of_update = [0.0], [], []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                spent[0] += time.perf_counter() - began

        return run

    for method in ("known", "judge", "before_step", "after_step", "stop_if_decided"):
        setattr(RunGuard, method, timed(getattr(RunGuard, method)))

    def observe(event: Any) -> None:
        row = getattr(event, "row", None)
        if row is not None:
            of_guard.append(spent[0])
            of_update.append(row["seconds"])
            spent[0] = 0.0

    settings = replace(settings_of(Row("guard", "guard"), updates), guard=GuardSettings())
    batches = Stream(model.tokenizer, texts)
    with tempfile.TemporaryDirectory() as folder:
        Engine(
            model, Language(), batches, settings, Path(folder), (0, "benchmark"),
            observers=(observe,), merge=merge,
        ).run()  # fmt: skip
    tensors = len(model.trained())
    guard, update = statistics.median(of_guard[2:]), statistics.median(of_update[2:])
    return {"tensors": tensors, "guard": guard, "update": update, "share": guard / update}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--updates", type=int, default=12)
    arguments = parser.parse_args()
    for name in arguments.models:
        found = measure(name, arguments.updates)
        verdict = "pass" if found["share"] < TARGET else "FAIL"
        print(
            f"{name}: {found['tensors']} trained tensors, guard {1e3 * found['guard']:.2f} ms of "
            f"{1e3 * found['update']:.0f} ms an update: {found['share']:.2%} {verdict}"
        )


if __name__ == "__main__":
    main()
