"""What the benchmarks beside TRL share: lehr and the peer in turn, in processes of their own."""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]


def options_of(
    argument_parser: argparse.ArgumentParser,
    batch_size: int,
    rounds: int,
    precision: str,
    updates: int = 4,
) -> argparse.Namespace:
    """The options that all of them take; the last four are the defaults."""
    add = argument_parser.add_argument
    add("--model", default="smollm2-135m-instruct")
    add("--peer-python", default=None, help="python of the peer's environment")
    add("--rounds", type=int, default=rounds)
    add("--updates", type=int, default=updates)
    add("--batch-size", type=int, default=batch_size)
    add("--precision", default=precision, choices=["fp32", "bf16"])
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--rows", default=None)
    add(
        "--peer-sampling",
        default="sequential",
        choices=["sequential", "group_by_length"],
        help="sequential: the peer's updates have lehr's rows, and losses are compared; "
        "group_by_length: rows of like length together, less padding, other rows an update",
    )
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return argument_parser.parse_args()


def adapted_model(options: argparse.Namespace, rank: int = 16) -> tuple[Any, Any]:
    """The model with LoRA on all linear layers, and its encoder; threads as options say."""
    import torch

    from lehr.data.encoding import Encoder
    from lehr.data.templates import Template
    from lehr.models.loading import load_model
    from lehr.training.allocator import keep_freed_memory

    torch.set_num_threads(options.threads)
    keep_freed_memory()
    model = load_model(options.model, precision=options.precision)
    model.add_adapter(rank=rank)
    template = Template.from_tokenizer(model.tokenizer)
    return model, Encoder(model.tokenizer, template, date="2000-01-01")


def in_turn(
    kind: str,
    options: argparse.Namespace,
    one_run: Callable[[argparse.Namespace], Run],
    rows_file: Callable[[Path, int], Path],
    peer_script: str = "peer_trl.py",
    both: Sequence[str] = (),
    own: Sequence[str] = (),
    peer_own: Sequence[str] = (),
) -> tuple[list[Run], list[Run]] | None:
    """The rounds of lehr and of the peer; None in the child, which prints its own run.

    kind  sft | dpo | policy: benchmarks.<kind>_speed is run again with --child, the peer's script
          with --kind
    both, own, peer_own  further words for both children, for lehr's, for the peer's
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
        same += both
        module = ["-m", f"benchmarks.{kind}_speed", "--child"]
        peer = [str(Path(__file__).parent / peer_script), "--kind", kind]
        peer += ["--sampling", options.peer_sampling, *peer_own]
        for _ in range(options.rounds):
            ours.append(_child([sys.executable, *module, "--model", options.model, *same, *own]))
            if options.peer_python:
                command = [options.peer_python, *peer, "--model", str(where), *same]
                if "given" in ours[-1]:  # what lehr trained on, tokenized and in its order
                    tokens = Path(folder) / "tokens.json"
                    tokens.write_text(json.dumps(ours[-1]["given"]))
                    command += ["--rows", str(tokens)]
                peers.append(_child(command))
    return ours, peers


def in_order(batches: Any, encoded: Sequence[Any], updates: int) -> list[Any]:
    """Examples of a single source in the order in which a new UpdateBatches takes them."""
    loader = copy.deepcopy(batches.loader)
    return [encoded[index] for _ in range(updates) for _, index in loader.next()]


def tokens_a_second(run: Run, clock: str) -> float:
    """Tokens that are no padding, over the updates after the first; clock: wall | cpu."""
    return float(sum(run["tokens"]) / sum(run[clock]))


def equal_losses(
    ours: list[Run], peers: list[Run], options: argparse.Namespace
) -> tuple[float, float] | None:
    """(largest difference in the first update, what is allowed); None: not comparable.

    Of SFT the loss, of DPO (where any first loss is ln 2) the log-probability of a chosen token.
    Later updates are of weights that differ by rounding, and Adam makes steps of rounding's signs.
    """
    if not peers or options.peer_sampling != "sequential":
        return None
    pairs = zip(ours, peers, strict=True)
    gap = max(abs(own["first"] - peer["first"]) for own, peer in pairs)
    return gap, {"bf16": 1e-2, "fp32": 1e-4}[options.precision]


def report_losses(compared: tuple[float, float] | None) -> None:
    """The line on equality; exits with status 1 where the losses are of other computations."""
    if compared is None:
        print("losses not compared: the updates have other rows")
        return
    gap, allowed = compared
    print(f"the first update's losses differ by {gap:.1e} (allowed {allowed:.0e})")
    if gap > allowed:
        raise SystemExit(1)


def _child(command: list[str]) -> Run:
    """The JSON line that a child prints last."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    found: Run = json.loads(done.stdout.strip().splitlines()[-1])
    return found
