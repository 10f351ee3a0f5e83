"""Attention over a pack of segments on a CPU: batches of plain products beside torch's kernel.

    python -m benchmarks.attention_speed [--dtype fp32] [--threads 2]

Heads of SmolLM2-135M (9 over 3 groups of keys, 64 wide), about a thousand tokens a pack. The two
take turns on the same tensors; the lower third of 15 rounds, milliseconds forward and backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lehr.models import attention_cpu
from lehr.models.attention_cpu import CpuSegments
from lehr.models.segments import SegmentPlan, Span
from lehr.training.allocator import keep_freed_memory

PACKS = {
    "20 to 190 (9)": [34, 41, 43, 63, 74, 84, 98, 112, 175],
    "47 to 161 (9)": [60, 60, 75, 107, 141, 149, 149, 149, 161],
    "256 (4)": [256] * 4,
    "512 (2)": [512] * 2,
    "1,024 (1)": [1024],
}
HEADS, GROUPS, WIDTH = 9, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    print(f"{options.dtype}, {options.threads} threads, torch {torch.__version__}")
    print("| tokens a segment | kernel, ms | batches, ms | kernel / batches |")
    print("| --- | --- | --- | --- |")
    for name, lengths in PACKS.items():
        kernel, batches = compared(lengths, dtype)
        print(f"| {name} | {kernel:.1f} | {batches:.1f} | {kernel / batches:.2f} |")


def compared(lengths: list[int], dtype: torch.dtype) -> tuple[float, float]:
    """Milliseconds by the kernel alone and by batches alone, whatever SHORT says."""
    tokens, spans, start = sum(lengths), [], 0
    for length in lengths:
        spans.append(Span(start, length))
        start += length
    inputs = [
        torch.randn(tokens, heads, WIDTH).to(dtype).transpose(0, 1).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    grad = torch.randn(tokens, HEADS, WIDTH).to(dtype)
    plans = {short: SegmentPlan(tokens, tuple(spans)) for short in (0, tokens)}

    def run(short: int) -> Callable[[], None]:
        def once() -> None:
            attention_cpu.SHORT = short
            out: Tensor = CpuSegments.apply(*inputs, plans[short], WIDTH**-0.5, None)
            torch.autograd.grad(out, inputs, grad)

        return once

    seconds: dict[int, list[float]] = {0: [], tokens: []}
    before = attention_cpu.SHORT
    try:
        for _ in range(16):
            for short, took in seconds.items():
                began = time.perf_counter()
                run(short)()
                took.append(time.perf_counter() - began)
    finally:
        attention_cpu.SHORT = before
    kernel, batches = (1e3 * sorted(took[1:])[5] for took in seconds.values())
    return kernel, batches


if __name__ == "__main__":
    main()
