"""Every benchmark beside a peer, one after the other, and what their targets say.

    python3 -m venv .venv-peer && .venv-peer/bin/pip install torch==2.13.0
    .venv-peer/bin/pip install -r benchmarks/peer-requirements.txt
    python -m benchmarks.versus_peers --peer-python .venv-peer/bin/python [--only sft dpo]

Each prints its own table; peer and lehr take turns in it, in processes of their own. Where losses
can be compared they must agree. Nothing else should run on the machine: it takes half an hour.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import NamedTuple


class Case(NamedTuple):
    """One benchmark, with the pattern of its ratio and the least that is aimed at."""

    module: str
    words: tuple[str, ...]
    what: str
    ratio: str
    target: float


_RATIO = r"^ratio ([\d.]+)"
_GENERATE = r"^lehr / generate: ([\d.]+)"
CASES = {
    "sft": Case("sft_speed", ("--precision", "bf16"), "SFT, tokens/s", _RATIO, 3.5),
    "sft-grouped": Case(
        "sft_speed",
        ("--precision", "bf16", "--peer-sampling", "group_by_length"),
        "SFT, the peer's rows grouped by length, tokens/s",
        _RATIO,
        3.5,
    ),
    "dpo": Case("dpo_speed", ("--precision", "bf16"), "DPO, pairs/s", _RATIO, 4.0),
    "sampling-16": Case(
        "sampling_speed", ("--only", "sampled"), "sampling, 16 rows", _GENERATE, 3.0
    ),
    "sampling-1": Case(
        "sampling_speed", ("--only", "sampled", "--rows", "1"), "sampling, 1 row", _GENERATE, 2.5
    ),
}
_PEAK = re.compile(r"^\| (lehr|TRL) \|.*\| ([\d.]+) \| [^|]*\|$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True, help="python of the peer's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    options = parser.parse_args()
    rows, failed = [], []
    for name in options.only:
        case = CASES[name]
        output, status = _printed(case, options)
        print(output, flush=True)
        if status != 0:
            failed.append(name)
        rows.append(summary(case, output))
    print("| work | ratio | target | peak memory, of the peer's |\n| --- | --- | --- | --- |")
    print("\n".join(rows))
    if failed:
        raise SystemExit(f"failed, or other losses than the peer's: {', '.join(failed)}")


def summary(case: Case, output: str) -> str:
    """The case's line of the last table.

    >>> case = Case("", (), "SFT", _RATIO, 3.5)
    >>> summary(case, "| lehr | 5 | 2 | 1.50 | x |\\n| TRL | 2 | 1 | 3.00 | x |\\nratio 2.50")
    '| SFT | 2.50 | 3.5, not met | 0.50 |'
    """
    found = re.search(case.ratio, output, re.MULTILINE)
    if found is None:
        return f"| {case.what} | no ratio printed | {case.target:g} | |"
    ratio = float(found[1])
    verdict = "met" if ratio >= case.target else "not met"
    peaks = {row[1]: float(row[2]) for line in output.splitlines() if (row := _PEAK.match(line))}
    memory = f"{peaks['lehr'] / peaks['TRL']:.2f}" if len(peaks) == 2 else "-"
    return f"| {case.what} | {ratio:.2f} | {case.target:g}, {verdict} | {memory} |"


def _printed(case: Case, options: argparse.Namespace) -> tuple[str, int]:
    command = [sys.executable, "-m", f"benchmarks.{case.module}", *case.words]
    command += ["--rounds", str(options.rounds)]
    if case.ratio == _RATIO:
        command += ["--peer-python", options.peer_python]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout if done.returncode == 0 else done.stdout + done.stderr[-2000:]
    return f"## {case.what}\n\n    {' '.join(command[1:])}\n\n{said}", done.returncode


if __name__ == "__main__":
    main()
