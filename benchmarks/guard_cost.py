"""What watching costs: its own seconds in an update, as a share of the update.

    python -m benchmarks.guard_cost --models 9m smollm2 --precision bf16 --updates 12

All that a part does in an update is timed where it happens, so that the noise of a busy machine
falls on both sides. The parts, of which guard and attention are the guard's:

guard       verdicts on full windows, the sampled weights before and after the step, their norm
attention   two queries of each segment and layer, and their largest logit
ema         the average of the weights
statistics  gradient flow and noise scale, every tenth update, and the line of metrics.jsonl

The targets: the guard below 2 %, and guard, EMA and statistics together at most 2 %. Models and
data are those of `training_core`; shares are sums over the updates after the second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.training_core import MODELS, Row, Stream, settings_of

TARGET = 0.02
EVERY = 10  # updates between two measurements of gradient flow and noise scale
WARM = 2  # updates that are not counted
PARTS = ("guard", "attention", "ema", "statistics")


def timed_methods() -> dict[str, list[tuple[type, str]]]:
    """Where each part's work happens."""
    from lehr.models.attention_watch import AttentionWatch
    from lehr.training.averaging import Average
    from lehr.training.gradient_flow import GradientFlow
    from lehr.training.guarding import RunGuard
    from lehr.training.metrics import MetricsFile
    from lehr.training.noise_meter import NoiseMeter

    of_guard = ("known", "judge", "before_step", "after_step", "stop_if_decided")
    return {
        "guard": [(RunGuard, name) for name in of_guard],
        "attention": [(AttentionWatch, "look"), (AttentionWatch, "take")],
        "ema": [(Average, "follow")],
        "statistics": [
            *((GradientFlow, "begin"), (GradientFlow, "end")),
            *((NoiseMeter, "columns"), (NoiseMeter, "_after_backward")),
            (MetricsFile, "append"),
        ],
    }


def measure(name: str, precision: str, updates: int, every: int) -> dict[str, Any]:
    """Seconds of each part and of the updates, per update."""
    import torch

    from lehr.data.docstrings import docstring_rows
    from lehr.data.packing import merge
    from lehr.models.loading import load_model
    from lehr.objectives.language import Language
    from lehr.training.averaging import AverageSettings
    from lehr.training.engine import Engine
    from lehr.training.guard import GuardSettings

    torch.set_num_threads(1)
    texts = [str(row.value["text"]) for row in docstring_rows()[0]]
    everything = MODELS[name].startswith("tiny:")
    model = load_model(
        MODELS[name], corpus=lambda: texts[:2000], precision=precision, all_weights=everything
    )
    if everything:
        model.train_all()
    else:
        model.add_adapter(rank=16)
    model.train()
    spent = dict.fromkeys(PARTS, 0.0)
    of_parts: list[dict[str, float]] = []
    of_update: list[float] = []

    def timed(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                spent[part] += time.perf_counter() - began

        return run

    for part, methods in timed_methods().items():
        for owner, method in methods:
            setattr(owner, method, timed(part, getattr(owner, method)))

    def observe(event: Any) -> None:
        row = getattr(event, "row", None)
        if row is not None:
            of_parts.append(dict(spent))
            of_update.append(row["seconds"])
            spent.update(dict.fromkeys(PARTS, 0.0))

    settings = replace(
        settings_of(Row("guard", "guard", precision), updates),
        guard=GuardSettings(attention_queries=2),
        ema=AverageSettings(0.99),
        gradient_flow_every=every,
        noise_scale_every=every,
    )
    with tempfile.TemporaryDirectory() as folder:
        Engine(
            model, Language(), Stream(model.tokenizer, texts), settings, Path(folder),
            (0, "benchmark"), observers=(observe,), merge=merge,
        ).run()  # fmt: skip
    counted = len(of_update) - WARM
    found = {part: sum(one[part] for one in of_parts[WARM:]) / counted for part in PARTS}
    return found | {"tensors": len(model.trained()), "update": sum(of_update[WARM:]) / counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--updates", type=int, default=WARM + EVERY)
    parser.add_argument("--every", type=int, default=EVERY, help="updates between statistics")
    arguments = parser.parse_args()
    for name in arguments.models:
        found = measure(name, arguments.precision, arguments.updates, arguments.every)
        update = found["update"]
        bare = update - sum(found[part] for part in PARTS)  # what a run without them takes
        parts = ", ".join(
            f"{part} {1e3 * found[part]:.2f} ms {found[part] / bare:.2%}" for part in PARTS
        )
        guard = found["guard"] / bare
        all_three = guard + (found["ema"] + found["statistics"]) / bare
        print(f"{name} {arguments.precision}: {found['tensors']} trained tensors, an update "
              f"{1e3 * bare:.0f} ms; {parts}")  # fmt: skip
        for what, share in (("guard", guard), ("guard, EMA and statistics", all_three)):
            print(f"  {what}: {share:.2%} {'pass' if share <= TARGET else 'FAIL'}", flush=True)


if __name__ == "__main__":
    main()
