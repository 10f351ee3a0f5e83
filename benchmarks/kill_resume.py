"""Kill a run with -9 at random moments, resume it until it ends, compare every bit.

    python -m benchmarks.kill_resume --kills 100

A small two-stage recipe (SFT with an adapter, then DPO) over a tiny pretrained base runs
once undisturbed and once under kills. Final weights and every line of every metrics.jsonl
(timings aside) must be equal. Exit status 1 where anything differs.
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
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

RECIPE = """
model: {base}
seed: 3
adapter: {{kind: lora, rank: 8, dropout: {dropout}}}
data:
  chats: {{microworld: chats, rows: 300, holdout: 30}}
  pairs: {{microworld: pairs, rows: 200, holdout: 30}}
stages:
  - sft: {{data: chats, max_length: 256, batch_size: 8, epochs: 2, learning_rate: 1e-3,
          checkpoint_every: 2, evaluate_every: 20}}
{preference}
gates: none
export: []
"""
PREFERENCE = """
  - preference: {data: pairs, max_length: 256, batch_size: 8, epochs: 2, learning_rate: 1e-4,
                 checkpoint_every: 2, evaluate_every: 20}
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


def lehr(recipe: Path, out: Path) -> subprocess.Popen[bytes]:
    """A run in its own process group, silent."""
    return subprocess.Popen(
        [sys.executable, "-m", "lehr.cli.main", "run", str(recipe), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def run_to_end(recipe: Path, out: Path) -> float:
    """Run undisturbed; the seconds that it took."""
    began = time.monotonic()
    if lehr(recipe, out).wait() != 0:
        raise SystemExit(f"the undisturbed run of {recipe} failed")
    return time.monotonic() - began


def run_under_kills(
    recipe: Path, out: Path, kills: int, longest: float, seed: int, until: float
) -> int:
    """Kill and start again until `kills` kills were made, then to the end; kills that hit.

    longest: seconds of an undisturbed run; until: when to make no more kills.
    """
    stream = random.Random(seed)
    made = 0
    while made < kills and time.monotonic() < until:
        began = time.monotonic()
        process = lehr(recipe, out)
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
    run_to_end(recipe, out)
    return made


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
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=240, help="make no kill after these")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-resume-"))
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base.yaml"
    base.write_text(BASE)
    run_to_end(base, folder / "base")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(base=folder / "base" / "model", dropout=0.0, preference=PREFERENCE)
    )
    longest = run_to_end(recipe, folder / "whole")
    expected = results(folder / "whole")
    until = time.monotonic() + 60 * options.minutes
    killed = folder / "killed"
    made = run_under_kills(recipe, killed, options.kills, longest, options.seed, until)
    found = results(folder / "killed")
    different = [name for name in expected if expected[name] != found.get(name)]
    print(f"{made} kills, {len(expected)} tensors and metrics files compared")
    if different or found.keys() != expected.keys():
        raise SystemExit(f"different: {', '.join(different[:5])}")
    print("bit for bit the same")
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
