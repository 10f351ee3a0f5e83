"""What this machine can do at best, measured: products, memory, and what an operation costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lehr.diagnosis.machine import measure_gemm
from lehr.diagnosis.speed_events import events_of
from lehr.diagnosis.speed_operations import MODULE, Overheads

LARGE = (512, 1024, 2048)  # rows, inner, columns: a product that no shape of a model holds back
COPIED_BYTES = 64 * 2**20  # more than caches hold
CALLS = 300
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "pure_bf16": torch.bfloat16}
DTYPES |= {"fp16": torch.float16, "fp8": torch.bfloat16}


def measure_limits(precision: str, device: str, seconds: float = 0.4) -> dict[str, float]:
    """{"gflops": best product rate, "gbytes": best copy, both in 10^9 a second}; under a second."""
    dtype = DTYPES.get(precision, torch.float32)
    rate = max(
        measure_gemm(dtype, seconds / 2, device), measure_gemm(dtype, seconds / 2, device, LARGE)
    )
    return {"gflops": rate, "gbytes": measure_bandwidth(device, seconds)}


def measure_bandwidth(device: str = "cpu", seconds: float = 0.4) -> float:
    """Bytes read and written by a copy, in 10^9 a second: the best of many.

    On a processor by the time of this thread, as the products: see `measure_gemm`.
    """
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    best, started = float("inf"), time.perf_counter()
    target.copy_(source)
    while time.perf_counter() - started < seconds or best == float("inf"):
        before, computed = time.perf_counter(), time.thread_time()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize(device)
        spent, waited = time.thread_time() - computed, time.perf_counter() - before
        best = min(best, spent if device == "cpu" and 0 < spent < waited else waited)
    return 2.0 * COPIED_BYTES / best / 1e9


def measure_overheads() -> Overheads:
    """What an operation costs that does nothing, and what the range of a module adds."""
    one = torch.ones(1)
    module = nn.Identity()

    def operations() -> None:
        for _ in range(CALLS):
            one.add(1.0)

    def ranges() -> None:
        for _ in range(CALLS):
            with record_function(MODULE):
                module(one)

    def modules() -> None:
        for _ in range(CALLS):
            module(one)

    _, call = _profiled(operations)
    added = _profiled(ranges)[0] - _best(modules)
    return Overheads(call=call, module=max(0.0, added) / CALLS)


def _best(run: Callable[[], None], rounds: int = 5) -> float:
    found = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - began)
    return found


def _profiled(run: Callable[[], None]) -> tuple[float, float]:
    """(seconds of `run` under a profile, median seconds of an operation in it)."""
    profiler = profile(activities=[ProfilerActivity.CPU])
    profiler.start()
    spent = _best(run)
    profiler.stop()
    events, _, _ = events_of(profiler)
    calls = [one.ended - one.began for one in events if one.name == "aten::add"]
    return spent, median(calls) if calls else 0.0
