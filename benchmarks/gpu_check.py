"""What lehr does on this machine's card, in at most 8 minutes: one Markdown table.

    python -m benchmarks.gpu_check              # a 1 B Llama of random weights, on a card
    python -m benchmarks.gpu_check --toy        # the same parts at toy size, on a CPU

SFT, DPO and a GRPO-shaped update, TRL's where it is installed, attention paths, bf16 and FP8, and
a `lehr run` that is killed and gone on with.
Each part has a process and a budget of seconds of its own; one that fails, or whose losses are
not the plain network's, says so in its row, and the script ends with status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.gpu_check_parts import EQUAL, PARTS, Where, last_line
from benchmarks.gpu_check_rows import FULL, TOY, Row, as_json, from_json

# Seconds, with the start of the process: together at most 8 minutes.
BUDGETS = {
    "gemm": 15, "sft": 50, "dpo": 50, "grpo": 65, "trl-sft": 45, "trl-dpo": 45,
    "attention": 25, "bf16": 45, "fp8": 45, "run": 95,
}  # fmt: skip
# A part that is timing updates stops by itself before it is stopped.
OWN_SHARE = 0.8


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a network of some 30,000 parameters")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--peer-python", default=None, help="python of an environment with TRL")
    parser.add_argument("--in-process", action="store_true", help="no process for each part")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.toy:
        print("No CUDA device here. `--toy` runs the same parts on the CPU, which proves nothing")
        print("about a GPU.")
        return 2
    if options.child:
        print(as_json(run_part(options.child, options, device)))
        return 0
    print(heading(device, options.toy), flush=True)
    rows: list[Row] = []
    started = time.perf_counter()
    for part in options.parts:
        if part.startswith("trl") and not options.peer_python and not installed("trl"):
            rows.append(Row(part, "TRL", note="skipped: TRL is not installed here"))
        elif options.in_process:
            rows += guarded(part, lambda part=part: run_part(part, options, device))
        else:
            rows += guarded(part, lambda part=part: in_own_process(part, options, BUDGETS[part]))
    between(rows)
    print("\n".join(table(rows)))
    print(f"\n{time.perf_counter() - started:.0f} s; budgets " + budgets(options.parts))
    return int(any(row.wrong for row in rows))


def run_part(part: str, options: argparse.Namespace, device: str) -> list[Row]:
    import torch

    from lehr.device import prepare

    prepare(torch.device(device, 0) if device == "cuda" else torch.device(device))
    until = time.perf_counter() + OWN_SHARE * BUDGETS[part]
    size = TOY if options.toy else FULL
    where = Where(device, size, until, options.peer_python or sys.executable)
    return PARTS[part](where)


def in_own_process(part: str, options: argparse.Namespace, seconds: float) -> list[Row]:
    """The part's rows. Raises where it fails, or does not end within its seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--child", part]
    command += ["--toy"] if options.toy else []
    command += ["--peer-python", options.peer_python] if options.peer_python else []
    return from_json(last_line(command, seconds))


def guarded(part: str, run: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part, or one that says what went wrong."""
    try:
        return run()
    except Exception as error:  # whatever it was: the other parts still run
        first = (str(error).strip() or "no message").splitlines()[0]
        return [Row(part, "", note=f"FAILED: {type(error).__name__}: {first}", wrong=True)]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def between(rows: Sequence[Row]) -> None:
    """What two rows say together: TRL's first update against lehr's, FP8's loss against bf16's."""
    for part in {row.part for row in rows}:
        same = {row.system: row for row in rows if row.part == part}
        ours, peer = same.get("lehr"), same.get("TRL")
        if ours and peer and ours.first is not None and peer.first is not None:
            gap = abs(ours.first - peer.first)
            peer.wrong |= not gap <= EQUAL["bf16"]
            text = f"first update differs from lehr's by {gap:.0e} of {EQUAL['bf16']:.0e}"
            peer.note = f"{peer.note}; {text}" if peer.note else text
        wide, narrow = same.get("lehr, bf16"), same.get("lehr, fp8")
        if wide and narrow and wide.losses and narrow.losses:
            last = min(len(wide.losses), len(narrow.losses)) - 1
            gap = narrow.losses[last] - wide.losses[last]
            narrow.note += f"; {gap:+.4f} of bf16's loss after update {last + 1}"
            if wide.rate and narrow.rate:
                narrow.note += f", {narrow.rate / wide.rate:.2f} of its speed"


def heading(device: str, toy: bool) -> str:
    import torch

    from lehr.diagnosis.machine import describe_machine

    machine = describe_machine()
    name = machine.accelerator or machine.cpu
    text = f"**{name}**, torch {torch.__version__}\n"
    if device == "cpu":
        text += "\nToy size on a CPU: this shows that the script runs, and proves nothing about a\n"
        text += "GPU. Peak memory is the process's resident size.\n"
    elif toy:
        text += "\nToy size: this shows that the script runs on the card, and no speed.\n"
    return text


def table(rows: Sequence[Row]) -> list[str]:
    """The rows in Markdown; what failed or differs is marked."""
    lines = [
        "| part | system | tokens/s | MFU | peak GiB | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        numbers = [
            "" if row.rate is None else f"{row.rate:,.0f}",
            "" if row.mfu is None else f"{row.mfu:.0%}",
            "" if row.peak_gib is None else f"{row.peak_gib:.2f}",
        ]
        unequal = row.wrong and not row.note.startswith("FAILED")
        note = f"NOT EQUAL: {row.note}" if unequal else row.note
        cells = [row.part, row.system, *numbers, note.replace("|", "/")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def budgets(parts: Sequence[str]) -> str:
    return ", ".join(f"{part} {BUDGETS[part]} s" for part in parts)


if __name__ == "__main__":
    raise SystemExit(main())
