"""The memory forecast of `lehr plan` beside what updates take, component by component.

    python -m benchmarks.plan_accuracy                  # five recipes, about ten minutes
    python -m benchmarks.plan_accuracy tiny sft

Each recipe trains three updates twice, in processes of its own: once with torch's allocator
recorded (live bytes, exact), once plainly for the peak of resident memory after load and for
seconds. Evaluations do not decode here, so their KV cache is in neither column.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SMOLLM2 = "smollm2-135m-instruct"
UPDATES = 3
COMMON = {"max_updates": UPDATES, "learning_rate": 1e-5}
CHATS = {"chats": {"microworld": "chats", "rows": 64, "holdout": 4}}
PAIRS = {"pairs": {"microworld": "pairs", "rows": 40, "holdout": 4}}
BF16 = {"precision": "bf16", **COMMON}


def _recipe(stage: dict[str, Any], data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"model": SMOLLM2, "data": data, "stages": [stage], **changes}


RECIPES: dict[str, dict[str, Any]] = {
    "tiny": _recipe(
        {"pretrain": {"data": "text", "max_length": 256, "batch_size": 32, **COMMON}},
        {"text": {"microworld": "text", "rows": 200, "holdout": 4}},
        model="tiny:300k",
        adapter={"kind": "none"},
    ),
    "sft": _recipe({"sft": {"data": "chats", "batch_size": 8, **BF16}}, CHATS),
    "dpo": _recipe({"preference": {"data": "pairs", "batch_size": 8, **BF16}}, PAIRS),
    "full": _recipe(
        {"sft": {"data": "chats", "batch_size": 4, "max_length": 512, **BF16}},
        CHATS,
        adapter={"kind": "none"},
    ),
    "long": _recipe(
        {"pretrain": {"data": "text", "batch_size": 1, "max_length": 4096, **BF16}},
        {"text": {"path": "long.jsonl", "holdout": 1}},
    ),
}
WHAT = {
    "tiny": "pretraining of all weights, 300 k, fp32",
    "sft": "LoRA on chats, SmolLM2-135M, bf16",
    "dpo": "LoRA on pairs, SmolLM2-135M, bf16",
    "full": "all weights on chats, SmolLM2-135M, bf16",
    "long": "LoRA on rows of 4,096 tokens, SmolLM2-135M, bf16",
}


def long_text(folder: Path) -> None:
    """One document a row, longer than a pack."""
    from lehr.data.docstrings import docstring_rows

    texts = [str(row.value["text"]) for row in docstring_rows()[0]]
    rows = [" ".join(texts[at : at + 60]) for at in range(0, 600, 60)]
    (folder / "long.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def measured(recipe: Mapping[str, Any], folder: Path, live: bool) -> dict[str, Any]:
    """Train a recipe's first stage; what was forecast of it and what it took.

    live  record the allocator (lasting, activations, head, peak: bytes); else resident memory
          and seconds of an update
    """
    from lehr.diagnosis.live_bytes import live_tensors
    from lehr.pipeline import four_bits, planning
    from lehr.pipeline.events import Event, Events
    from lehr.pipeline.stage_run import train_stage
    from lehr.recipe.loading import load_recipe
    from lehr.training import resources

    of_others = live_tensors() if live else []  # where this is not all that the process does
    planning.DECODED = 0  # nothing decodes below
    four_bits.decoding_bytes = lambda *_: 0
    text = {"output": "out", "template": "auto", **recipe}
    (folder / "recipe.yaml").write_text(json.dumps(text))
    loaded = load_recipe(folder / "recipe.yaml", ["threads=1"])
    prepared = planning.prepare(loaded, folder / "out", Events(None, []), write=False)
    planned = prepared.stages[0]
    place = folder / "out" / planned.folder_name
    place.mkdir(parents=True)
    seconds: list[float] = []

    def heard(event: Event) -> None:
        if event.kind == "update":
            share = event.data["tokens"] / planned.tokens_per_update  # updates differ in length
            seconds.append(event.data["seconds"] / share)

    found: dict[str, Any] = {
        "forecast": dict(planned.memory or {}),
        "why": planned.micro_batch_why,
        "seconds_forecast": planned.seconds / planned.updates,
    }
    arguments = (prepared, planned, place, "key", prepared.bench.base, Events(None, [heard]))
    if live:
        with _recorded(found, of_others):
            train_stage(*arguments)
    else:
        resources.reset_peak_memory()
        train_stage(*arguments)
        found["resident"] = int(resources.peak_memory_gib() * 2**30)
        found["seconds"] = min(seconds)
    return found


@contextmanager
def _recorded(found: dict[str, Any], of_others: Sequence[Any]) -> Iterator[None]:
    """Record every update of the engine; fills `found` at the end."""
    import torch

    from lehr.diagnosis.live_bytes import Timeline, live_tensor_bytes, mark, recording
    from lehr.models.head_functions import FusedHead
    from lehr.models.language_model import LanguageModel
    from lehr.pipeline.workbench import Workbench
    from lehr.training.engine import Engine

    updates: list[Timeline] = []
    uncounted = list(of_others)

    def parent(own: Any) -> Any:
        def train_all(self: Any, *arguments: Any) -> Any:
            kept = own(self, *arguments)
            uncounted.extend(kept.values())  # mapped from a file, not in memory
            return kept

        return train_all

    def attempt(own: Any) -> Any:
        def record(self: Any, *arguments: Any) -> Any:
            with recording(live_tensor_bytes(without=uncounted)) as one:
                out = own(self, *arguments)
            updates.append(one.timeline)
            return out

        return record

    def marked(name: str) -> Callable[[Any], Any]:
        def wrap(own: Any) -> Any:
            def inside(*arguments: Any, **keywords: Any) -> Any:
                if not torch.is_grad_enabled() and name in ("hidden", "head"):
                    return own(*arguments, **keywords)
                with mark(name):
                    return own(*arguments, **keywords)

            return inside

        return wrap

    changes = [
        (Workbench, "train_all", parent),
        (Engine, "_attempt", attempt),
        (Engine, "_backward", marked("passes")),
        (LanguageModel, "hidden", marked("hidden")),
        (LanguageModel, "token_stats", marked("head")),
        (FusedHead, "backward", lambda own: staticmethod(marked("head backward")(own))),
    ]
    before = [(kind, name, kind.__dict__[name]) for kind, name, _ in changes]
    for kind, name, wrap in changes:
        setattr(kind, name, wrap(getattr(kind, name)))
    try:
        yield
    finally:
        for kind, name, own in before:
            setattr(kind, name, own)
    found["lasting"] = updates[-1].before
    found["activations"] = max(max(one.left_by("hidden")) for one in updates)
    heads = ("head", "head backward")
    found["head"] = max(size for one in updates for name in heads for size in one.raised_by(name))
    # The first update makes the optimizer's state, which lasts: only its passes are compared.
    raised = [max(one.raised_by("passes")) for one in updates]
    raised += [one.peak - one.before for one in updates[1:]]
    found["peak"] = found["lasting"] + max(raised)


def one_run(name: str, live: bool) -> dict[str, Any]:
    """A recipe of the table, in this process."""
    from lehr.training.allocator import keep_freed_memory

    keep_freed_memory()
    with tempfile.TemporaryDirectory() as place:
        if name == "long":
            long_text(Path(place))
        return measured(RECIPES[name], Path(place), live)


def comparisons(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """(forecast, measured) bytes of what both name."""
    from lehr.diagnosis.planner import LASTING, resident_bytes

    memory = row["forecast"]
    pairs = {
        "lasting": (sum(memory[one] for one in LASTING), row["lasting"]),
        "activations": (memory["activations"] + memory.get("casts", 0), row["activations"]),
        "head": (memory["head"], row["head"]),
        "live": (memory["peak"] - memory["slack"], row["peak"]),
    }
    if "resident" in row:
        pairs["resident"] = resident_bytes(memory), row["resident"]
    return pairs


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: MiB forecast / measured, and how far off."""
    names = ("lasting", "activations", "head", "live", "resident")
    heads = ("lasting", "activations", "head", "peak of live bytes", "peak resident after load")
    lines = [f"| recipe | {' | '.join(heads)} | seconds an update |", "| --- |" + " --- |" * 6]
    for name, row in rows.items():
        pairs = comparisons(row)
        cells = [
            f"{a / 2**20:,.0f} / {b / 2**20:,.0f} ({a / b - 1:+.1%})"
            for a, b in (pairs[one] for one in names)
        ]
        cells.append(f"{row['seconds_forecast']:.1f} / {row['seconds']:.1f}")
        lines.append(f"| **{name}**: {WHAT[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--child", choices=("live", "resident"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(one_run(options.recipes[0], options.child == "live")))
        return
    rows: dict[str, dict[str, Any]] = {}
    for name in options.recipes:
        rows[name] = {}
        for child in ("live", "resident"):
            command = [sys.executable, "-m", "benchmarks.plan_accuracy", name, "--child", child]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            rows[name] |= json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(rows[name]), file=sys.stderr, flush=True)
    print("MiB forecast / measured (forecast above what was measured: +)\n")
    print(table(rows))


if __name__ == "__main__":
    main()
