"""`lehr run` of an SFT recipe as a person types it, killed half-way, gone on with, and whole.

What a part of the engine cannot show: that the model is put on the card by the recipe's `device`,
that checkpoints, evaluations and the export come back from it, and that a resume has the bits of
a run that nothing happened to.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check_rows import TOY, Row, Size

COLOURS = ("red", "blue", "green", "white", "black", "grey")
THINGS = ("door", "boat", "lamp", "coat", "ring", "wall", "bird", "cake", "road", "hill")
CHATS = 240
TIMINGS = ("seconds",)


Process = subprocess.Popen[bytes]


def launch(words: Sequence[str]) -> Process:
    """`lehr` with these words, in a process of its own."""
    command = [sys.executable, "-m", "lehr", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def part_run(where: Any) -> list[Row]:
    """Killed after a checkpoint and gone on with, beside the same recipe without a kill."""
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        recipe = write_recipe(folder, where.size, where.device)
        begun = time.perf_counter()
        cut, whole = folder / "cut", folder / "whole"
        killed_after = kill_half_way(launch(words(recipe, cut)), cut, where.until)
        finish(launch(words(recipe, cut)), where.until)
        seconds = time.perf_counter() - begun
        finish(launch(words(recipe, whole)), where.until)
        return [judged(cut, whole, killed_after, seconds, where.device)]


def words(recipe: Path, out: Path) -> list[str]:
    return ["run", str(recipe), "--out", str(out)]


def kill_half_way(process: Process, out: Path, until: float) -> int:
    """Wait for a checkpoint after half of the updates, then kill; lines of metrics until then.

    Raises RuntimeError where the run ends by itself, TimeoutError where no checkpoint comes.
    """
    stage = out / "01-sft"
    try:
        while time.perf_counter() < until:
            if process.poll() is not None:
                raise RuntimeError(f"lehr run ended before it was killed: {why(out)}")
            done = len(lines(stage / "metrics.jsonl"))
            if done and done > updates_of(out) // 2 and any(stage.glob("checkpoints/update-*")):
                return done
            time.sleep(0.02)
        raise TimeoutError("no checkpoint within the budget")
    finally:
        process.kill()
        process.wait()


def finish(process: Process, until: float) -> None:
    """Let the run come to its end. Raises RuntimeError where it does not."""
    try:
        status = process.wait(timeout=max(1.0, until - time.perf_counter()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise TimeoutError("lehr run did not end within the budget") from None
    if status != 0:
        raise RuntimeError(f"lehr run ended with status {status}")


def judged(cut: Path, whole: Path, killed_after: int, seconds: float, device: str) -> Row:
    """What the files of both runs say."""
    one, other = (columns(lines(out / "01-sft" / "metrics.jsonl")) for out in (cut, whole))
    events = [json.loads(line) for line in (cut / "events.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["kind"] == "resumed"]
    doubts = [
        event["text"] for event in events if event["kind"] in ("resume_inexact", "order_unknown")
    ]
    plan = json.loads((cut / "plan.json").read_text())
    ledger = json.loads((cut / "ledger.json").read_text())
    row = Row("lehr run, SFT, LoRA", "lehr", losses=[line["loss"] for line in one])
    timed = lines(whole / "01-sft" / "metrics.jsonl")[1:]
    row.rate = sum(line["tokens"] for line in timed) / sum(line["seconds"] for line in timed)
    row.peak_gib = ledger.get("peak_accelerator_gib", ledger["peak_memory_gib"])
    on = plan["machine"]["device"]
    row.note = (
        f"on {on}, {plan['precision']['value']}; killed after update {killed_after}, gone on with: "
        f"{len(resumed)} resume, {seconds:.0f} s; loss {row.losses[0]:.3f} -> {row.losses[-1]:.3f}"
    )
    gap = first_difference(one, other)
    wrong = [] if on.startswith(device) else [f"not on {device}"]
    wrong += [] if len(resumed) == 1 else ["it began again instead of going on"]
    wrong += [f"differs from the run without a kill: {gap}"] if gap else []
    wrong += doubts
    wrong += [] if (cut / "model").is_dir() else ["nothing was promoted"]
    if wrong:
        row.wrong = True
        row.note += "; " + "; ".join(wrong)
    else:
        row.note += "; every column equal to the run without a kill"
    return row


def first_difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str:
    """Where two lists of lines first differ; nothing where they are equal.

    >>> first_difference([{"update": 1, "loss": 2.0}], [{"update": 1, "loss": 2.5}])
    'loss of line 1: 2.0 and 2.5'
    """
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} lines"
    for number, (a, b) in enumerate(zip(one, other, strict=True), start=1):
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                return f"{name} of line {number}: {a.get(name)} and {b.get(name)}"
    return ""


def columns(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be in the middle of being written."""
    if not path.exists():
        return []
    return [json.loads(one) for one in path.read_text().split("\n")[:-1]]


def updates_of(out: Path) -> int:
    return int(json.loads((out / "plan.json").read_text())["stages"][0]["updates"])


def why(out: Path) -> str:
    path = out / "ledger.json"
    return str(json.loads(path.read_text()).get("sentence")) if path.exists() else "no ledger"


def write_recipe(folder: Path, size: Size, device: str) -> Path:
    """A base of random weights, chats, and a recipe that trains an adapter on them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lehr.models.language_model import LanguageModel
    from lehr.models.loading import set_template
    from lehr.models.tiny import train_tokenizer

    toy = size is TOY
    chats = [chat(number) for number in range(40 if toy else CHATS)]
    text = "\n".join(json.dumps(row) for row in chats)
    (folder / "chats.jsonl").write_text(text + "\n")
    tokenizer = train_tokenizer([text], 400)
    width, inner, layers, heads = (32, 64, 2, 2) if toy else (1024, 4096, 12, 16)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    network = LlamaForCausalLM(config).eval()
    set_template(network, tokenizer, "chatml")
    LanguageModel(network, tokenizer, "base").save_full(folder / "base")
    updates = 8 if toy else 40
    stage = {
        "data": "chats", "max_length": 64 if toy else 256, "batch_size": 4 if toy else 32,
        "max_updates": updates, "learning_rate": 1e-3, "checkpoint_every": 2 if toy else 5,
        "evaluate_every": updates // 2,
    }  # fmt: skip
    recipe = {
        "model": "./base", "seed": 3, "device": device, "date": "2030-01-01",
        "adapter": {"kind": "lora", "rank": 4, "dropout": 0.1},
        "data": {"chats": {"path": "chats.jsonl", "holdout": 8}},
        "stages": [{"sft": stage}], "gates": "none", "export": ["adapter"],
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe, indent=1))  # JSON is YAML
    return path


def chat(number: int) -> dict[str, Any]:
    """A question and an answer that can be learned."""
    what, which = THINGS[number % len(THINGS)], COLOURS[number % len(COLOURS)]
    turns = (("user", f"Which colour has {what} {number}?"), ("assistant", f"It is {which}."))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}
