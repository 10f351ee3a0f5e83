"""Kill a run with -9 at random moments, resume it until it ends, compare every bit.

    python -m benchmarks.kill_resume --kills 100
    python -m benchmarks.kill_resume --kills 20 --guard   # a row spoils the weights of each stage

A small two-stage recipe (SFT with an adapter, then DPO) over a tiny pretrained base runs
once undisturbed and once under kills. Final weights and every line of every metrics.jsonl
(timings aside) must be equal. Exit status 1 where anything differs. With `--guard` each stage goes
back once and more (`kill_resume_guard`), with restarts, clipping that follows the run and watched
attention logits; records of the quarantine must be equal too, and further runs are killed at each
step of the return itself.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.kill_resume_guard import GUARD, POINTS

RECIPE = """
model: {base}
seed: 3
adapter: {{kind: lora, rank: 8, dropout: {dropout}}}
data:
  chats: {{microworld: chats, rows: 300, holdout: 30}}
  pairs: {{microworld: pairs, rows: 200, holdout: 30}}
stages:
  - sft: {{data: chats, max_length: 256, batch_size: 8, epochs: 2, learning_rate: 1e-3,{guard}
          checkpoint_every: 2, evaluate_every: 20}}
{preference}
gates: none
export: []
"""
PREFERENCE = """
  - preference: {{data: pairs, max_length: 256, batch_size: 8, epochs: 2,{guard}
                 learning_rate: 1e-4, checkpoint_every: 2, evaluate_every: 20}}
"""
BASE = """
model: tiny:100k
template: chatml
data: {world: {microworld: text, rows: 300, holdout: 30}, chats: {microworld: chats, rows: 50}}
stages:
  - pretrain: {data: world, max_length: 256, batch_size: 16}
gates: none
export: []
"""


PLAIN = ("lehr.cli.main", "run", "{recipe}", "--out", "{out}")
GUARDED = ("benchmarks.kill_resume_guard", "{recipe}", "{out}")


def lehr(
    recipe: Path, out: Path, command: Sequence[str] = PLAIN, *more: str
) -> subprocess.Popen[bytes]:
    """A run in its own process group, silent."""
    return subprocess.Popen(
        [sys.executable, "-m", *(one.format(recipe=recipe, out=out) for one in command), *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def run_to_end(recipe: Path, out: Path, command: Sequence[str] = PLAIN) -> float:
    """Run undisturbed; the seconds that it took."""
    began = time.monotonic()
    if lehr(recipe, out, command).wait() != 0:
        raise SystemExit(f"the undisturbed run of {recipe} failed")
    return time.monotonic() - began


def run_under_kills(
    recipe: Path,
    out: Path,
    kills: int,
    longest: float,
    seed: int,
    until: float,
    command: Sequence[str] = PLAIN,
) -> int:
    """Kill and start again until `kills` kills were made, then to the end; kills that hit.

    longest: seconds of an undisturbed run; until: when to make no more kills.
    """
    stream = random.Random(seed)
    made = 0
    while made < kills and time.monotonic() < until:
        began = time.monotonic()
        process = lehr(recipe, out, command)
        try:
            process.wait(timeout=stream.uniform(1.0, longest))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            made += 1
            continue
        # It ended before the kill: begin again from an older point.
        if process.returncode != 0:
            raise SystemExit(f"a resumed run ended with status {process.returncode}")
        longest = max(2.0, 0.9 * (time.monotonic() - began))
        for folder in sorted(out.glob("0*-*")):
            (folder / "state.json").unlink(missing_ok=True)
            checkpoints = sorted((folder / "checkpoints").glob("update-*"))
            for path in checkpoints[1:]:
                shutil.rmtree(path)
            if command is GUARDED:  # what went back has a record, and would not do so again
                shutil.rmtree(folder)
    run_to_end(recipe, out, command)
    return made


def run_killed_going_back(recipe: Path, folder: Path, command: Sequence[str]) -> dict[str, Path]:
    """A run for each step of the return, killed there and then run to its end; their folders."""
    found = {}
    for point in POINTS:
        out = folder / point.replace(" ", "-")
        if lehr(recipe, out, command, point).wait() != -signal.SIGKILL:
            raise SystemExit(f"the run did not come to be killed {point}")
        run_to_end(recipe, out, command)
        found[point] = out
    return found


def results(out: Path) -> dict[str, Any]:
    """All weights and metrics lines of a finished run, timings aside."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("0*-*/adapter/adapter_model.safetensors")):
        for name, tensor in load_file(path).items():
            found[f"{path.parent.parent.name} {name}"] = tensor.tolist()
    for path in sorted(out.glob("0*-*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row.pop("seconds")
        found[f"{path.parent.name} metrics"] = rows
    for path in sorted(out.glob("0*-*/quarantine.jsonl")):
        found[f"{path.parent.name} quarantine"] = path.read_text()
    return found


def compare(expected: dict[str, Any], out: Path, what: str) -> None:
    """Say that a run has the bits of the undisturbed one, or end with what differs."""
    found = results(out)
    different = [name for name in expected if expected[name] != found.get(name)]
    different += [name for name in found if name not in expected]
    print(f"{what}, {len(expected)} tensors and files compared", flush=True)
    if different:
        raise SystemExit(f"different: {', '.join(different[:5])}")
    print("bit for bit the same", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=240, help="make no kill after these")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--guard", action="store_true")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-resume-"))
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base.yaml"
    base.write_text(BASE)
    run_to_end(base, folder / "base")
    recipe = folder / "recipe.yaml"
    command, guard = (GUARDED, GUARD) if options.guard else (PLAIN, "")
    preference = PREFERENCE.format(guard=guard)
    recipe.write_text(
        RECIPE.format(
            base=folder / "base" / "model", dropout=0.0, preference=preference, guard=guard
        )
    )
    longest = run_to_end(recipe, folder / "whole", command)
    expected = results(folder / "whole")
    if options.guard:
        back = [name for name in expected if name.endswith("quarantine")]
        if len(back) < 2:
            raise SystemExit(f"not every stage went back: {back}")
        print(f"back: {sum(expected[name].count(chr(10)) for name in back)} batch(es) left out")
    until = time.monotonic() + 60 * options.minutes
    killed = folder / "killed"
    made = run_under_kills(recipe, killed, options.kills, longest, options.seed, until, command)
    compare(expected, killed, f"{made} kills")
    if options.guard:
        for point, out in run_killed_going_back(recipe, folder, command).items():
            compare(expected, out, f"killed {point}")
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
