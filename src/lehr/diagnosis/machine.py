"""The machine that a run is on: what it has, how fast its products are, which precision pays.

Everything here answers on any platform; what cannot be found out is said as such.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from lehr.device import choose, name_of

GAIN_THAT_PAYS = 1.2  # bf16 costs accuracy; below this gain fp32 is kept
BUSY = 0.6  # share of the processor below which a machine is called busy
ENOUGH_ROUNDS, LONGEST = 10, 5  # products that are measured, for at most so many times the time
GEMM_SIZES = (256, 576, 1024)  # rows, inner, columns: a small model's MLP on one pack
CARD_SIZES = (4096, 2048, 8192)  # a card is done with the small ones before the next is asked for


@dataclass(frozen=True)
class Machine:
    """One machine as a run sees it.

    cores      usable processors (affinity and container limits counted)
    threads    what torch computes with
    memory_gib usable memory: the container's limit where that is smaller
    capability the vector instructions that torch uses ("AVX2", "AVX512", "DEFAULT", ...)
    device     what trains: "cpu", or "cuda:0" and so on; accelerator is its name and
               accelerator_gib its memory
    gemm_gflops measured matrix-product rates by precision, in 10^9 operations a second
    processor_share of the time of that measurement that this process had a processor; below
                BUSY other programs have them, and a stage takes longer than is forecast
    """

    cpu: str
    cores: int
    threads: int
    memory_gib: float
    capability: str
    device: str
    accelerator: str = ""
    system: str = ""
    gemm_gflops: Mapping[str, float] = field(default_factory=dict)
    processor_share: float = 1.0
    accelerator_gib: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The `machine` part of plan.json."""
        card = {"accelerator_gib": round(self.accelerator_gib, 2)} if self.accelerator else {}
        return {
            "cpu": self.cpu,
            "cores": self.cores,
            "threads": self.threads,
            "memory_gib": round(self.memory_gib, 2),
            "capability": self.capability,
            "device": self.device,
            "accelerator": self.accelerator,
            **card,
            "system": self.system,
            "gemm_gflops": {name: round(rate, 1) for name, rate in self.gemm_gflops.items()},
            "processor_share": round(self.processor_share, 2),
        }


def describe_machine(measure: bool = False, device: torch.device | None = None) -> Machine:
    """Describe this machine; with `measure` the matrix-product rates too (under a second).

    device  what trains (default: a card where there is one)
    """
    device = choose() if device is None else device
    cuda = device.type == "cuda"
    rates: dict[str, float] = {}
    share = 1.0
    if measure:
        started, computed = time.perf_counter(), time.thread_time()
        rates = measure_rates(str(device))
        if not cuda:
            waited = time.perf_counter() - started
            share = min(1.0, (time.thread_time() - computed) / max(waited, 1e-9))
    return Machine(
        cpu=_cpu_name(),
        cores=_usable_cores(),
        threads=torch.get_num_threads(),
        memory_gib=usable_memory_bytes() / 2**30,
        capability=_capability(),
        device=str(device),
        accelerator=name_of(device),
        accelerator_gib=torch.cuda.mem_get_info(device)[1] / 2**30 if cuda else 0.0,
        system=f"{platform.system()} {platform.machine()}".strip(),
        gemm_gflops=rates,
        processor_share=share,
    )


def measure_rates(device: str = "cpu", rounds: int = 3) -> dict[str, float]:
    """Matrix-product rates by precision: the best of rounds taken in turn.

    A machine that is busy for a moment slows both, and not the one that was measured then.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    found = dict.fromkeys(dtypes, 0.0)
    for _ in range(rounds):
        for name, dtype in dtypes.items():
            found[name] = max(found[name], measure_gemm(dtype, 0.3 / rounds, device))
    return found


def measure_gemm(
    dtype: torch.dtype,
    seconds: float = 0.3,
    device: str = "cpu",
    sizes: tuple[int, int, int] | None = None,
) -> float:
    """Rate of x @ W.T in 10^9 operations a second; 0 where it fails.

    sizes  rows, inner, columns (default: a small model's; of a card, those of a billion)

    The best of many short rounds: other programs can only make a round slower. Where every
    round is interrupted, the processor time of this thread still is that of a quiet machine.
    """
    if sizes is None:
        sizes = GEMM_SIZES if device == "cpu" else CARD_SIZES
    try:
        rows = torch.ones(sizes[0], sizes[1], dtype=dtype, device=device)
        weight = torch.ones(sizes[2], sizes[1], dtype=dtype, device=device)
        started = time.perf_counter()
        with torch.inference_mode():
            _product(rows, weight, device)  # the first call sets up threads and kernels
            best = float("inf")
            done = 0
            while True:
                before, computed = time.perf_counter(), time.thread_time()
                _product(rows, weight, device)
                spent, now = time.thread_time() - computed, time.perf_counter()
                waited = now - before
                # Some clocks of a thread tick too slowly to see one product: they show 0.
                best = min(best, spent if device == "cpu" and 0 < spent < waited else waited)
                done += 1
                if now - started >= (seconds if done >= ENOUGH_ROUNDS else LONGEST * seconds):
                    break
    except (RuntimeError, TypeError, NotImplementedError):
        return 0.0
    operations = 2.0 * math.prod(sizes)
    return operations / best / 1e9 if best > 0 else 0.0


def _product(rows: torch.Tensor, weight: torch.Tensor, device: str) -> None:
    torch.nn.functional.linear(rows, weight)
    if device != "cpu":
        torch.cuda.synchronize(device)


def choose_precision(
    requested: str, rates: Mapping[str, float] | None = None, device: str = "cpu"
) -> tuple[str, str]:
    """(precision, why) of a run. `auto` takes bf16 where it multiplies 1.2 x faster.

    The answer is written to plan.json and read back by a resumed run, so that a timing
    never decides twice.

    >>> choose_precision("auto", {"fp32": 100.0, "bf16": 40.0})
    ('fp32', 'bf16 products run at 0.40 x the speed of fp32 here; it pays from 1.2 x on')
    >>> choose_precision("bf16")
    ('bf16', 'the recipe says so')
    """
    if requested != "auto":
        return requested, "the recipe says so"
    if rates is None:
        rates = measure_rates(device)
    single, brain = rates.get("fp32", 0.0), rates.get("bf16", 0.0)
    if single <= 0 or brain <= 0:
        return "fp32", "the speed of bf16 products could not be measured"
    gain = brain / single
    if gain >= GAIN_THAT_PAYS:
        return "bf16", f"bf16 products run {gain:.1f} x as fast as fp32 here"
    return "fp32", (
        f"bf16 products run at {gain:.2f} x the speed of fp32 here; "
        f"it pays from {GAIN_THAT_PAYS} x on"
    )


def usable_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its container's where smaller."""
    total = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _first_word(Path("/sys/fs/cgroup") / name)
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _usable_cores() -> int:
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        cores = os.cpu_count() or 1
    quota = _first_line(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
        cores = min(cores, max(1, round(int(quota[0]) / int(quota[1]))))
    return max(1, cores)


def _cpu_name() -> str:
    if platform.system() == "Darwin":
        name = _sysctl("machdep.cpu.brand_string")
    else:
        name = _linux_cpu_name()
    return name or platform.processor() or platform.machine() or "unknown processor"


def _linux_cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                key, _, value = line.partition(":")
                if key.strip() in {"model name", "Model", "Hardware"}:
                    return " ".join(value.split())
    except OSError:
        pass
    return ""


def _sysctl(key: str) -> str:
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _capability() -> str:
    try:
        return str(torch.backends.cpu.get_cpu_capability())
    except (AttributeError, RuntimeError):
        return "unknown"


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _first_word(path: Path) -> str:
    words = _first_line(path).split()
    return words[0] if words else ""
