"""What the benchmarks beside TRL share: lehr and the peer in turn, in processes of their own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Run = dict[str, Any]


def options_of(
    argument_parser: argparse.ArgumentParser, batch_size: int, rounds: int, precision: str
) -> argparse.Namespace:
    """The options that all of them take; the last three are the defaults."""
    add = argument_parser.add_argument
    add("--model", default="smollm2-135m-instruct")
    add("--peer-python", default=None, help="python of the peer's environment")
    add("--rounds", type=int, default=rounds)
    add("--updates", type=int, default=4)
    add("--batch-size", type=int, default=batch_size)
    add("--precision", default=precision, choices=["fp32", "bf16"])
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--rows", default=None)
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return argument_parser.parse_args()


def in_turn(
    kind: str,
    options: argparse.Namespace,
    one_run: Callable[[argparse.Namespace], Run],
    rows_file: Callable[[Path, int], Path],
) -> tuple[list[Run], list[Run]] | None:
    """The rounds of lehr and of the peer; None in the child, which prints its own run.

    kind  sft | dpo: benchmarks.<kind>_speed is run again with --child, peer_trl with --kind
    """
    if options.child:
        print(json.dumps(one_run(options)))
        return None
    from lehr.models.loading import resolve_spec

    where = resolve_spec(options.model).path
    ours: list[Run] = []
    peers: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        rows = options.rows or rows_file(Path(folder), options.batch_size * options.updates)
        named: Mapping[str, Any] = {
            "updates": options.updates,
            "batch-size": options.batch_size,
            "threads": options.threads,
            "rows": rows,
            "precision": options.precision,
        }
        same = [word for name, value in named.items() for word in (f"--{name}", str(value))]
        module = ["-m", f"benchmarks.{kind}_speed", "--child"]
        peer = [str(Path(__file__).parent / "peer_trl.py"), "--kind", kind]
        for _ in range(options.rounds):
            ours.append(_child([sys.executable, *module, "--model", options.model, *same]))
            if options.peer_python:
                peers.append(_child([options.peer_python, *peer, "--model", str(where), *same]))
    return ours, peers


def _child(command: list[str]) -> Run:
    """The JSON line that a child prints last."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    found: Run = json.loads(done.stdout.strip().splitlines()[-1])
    return found
