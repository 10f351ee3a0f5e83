"""Where one SFT update of SmolLM2-135M with LoRA r=16 spends its time, by torch's profiler.

    python -m benchmarks.step_profile [--precision bf16] [--threads 2]

Forward and backward of the packs of one update (about 1,700 tokens). Every operation counts where
it was called: the self time of an operation goes to the innermost named part around it. The limit
is the time that the frozen weights' products and the head's would take at the measured rate.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.beside_peer import adapted_model
from benchmarks.sft_speed import rows_file

RANK = 16
# A call of one of these is a part; what runs inside belongs to it.
PARTS = {
    "CpuSegments": "attention",
    "CpuSegmentsBackward": "attention",
    "RmsNorm": "norms",
    "RmsNormBackward": "norms",
    "GatedSilu": "gated SiLU",
    "GatedSiluBackward": "gated SiLU",
    "FrozenHead": "head and loss",
    "FrozenHeadBackward": "head and loss",
    "_LoraProduct": "linear layers",
    "_LoraProductBackward": "linear layers",
}


def part_of(name: str, shapes: Sequence[Sequence[int]], around: Sequence[str]) -> str:
    """The part of the step that an operation belongs to; around: names from the innermost out.

    >>> part_of("aten::mm", [[900, 576], [576, 16]], ["_LoraProduct"])
    'adapter products'
    >>> part_of("aten::mm", [[900, 576], [576, 1536]], ["_LoraProduct"])
    'products of the frozen weights'
    >>> part_of("aten::mul", [[1, 9, 900, 64]], [])
    'rotary, residuals, the rest'
    """
    found = next((PARTS[each] for each in (name, *around) if each in PARTS), None)
    if found != "linear layers":
        return found or "rotary, residuals, the rest"
    if name == "aten::mm" and not any(RANK in shape for shape in shapes):
        return "products of the frozen weights"
    return "adapter products"


def shares(events: Sequence[Any]) -> dict[str, float]:
    """Share of the summed self times by part, largest first; they sum to 1."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        around, parent = [], event.cpu_parent
        while parent is not None:
            around.append(parent.name)
            parent = parent.cpu_parent
        seconds[part_of(event.name, event.input_shapes, around)] += event.self_cpu_time_total
    total = sum(seconds.values())
    return {name: took / total for name, took in sorted(seconds.items(), key=lambda pair: -pair[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    from torch.profiler import ProfilerActivity, profile

    from lehr.data.loader import UpdateBatches
    from lehr.data.sources import read_source
    from lehr.objectives.language import Language

    model, encoder = adapted_model(options, RANK)
    with tempfile.TemporaryDirectory() as folder:
        examples = read_source("rows", [rows_file(Path(folder), 64)]).examples
    encoded = [one for example in examples for one in encoder.encode(example).encoded]
    packs = UpdateBatches({"rows": encoded}, {"rows": 1.0}, 16, 0, 1024).next()
    model.train()

    def step() -> None:
        for pack in packs:
            Language().loss(model, pack).total.backward()

    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    print(f"{sum(pack.tokens for pack in packs)} tokens, {options.precision}")
    print("| part | share of the time |\n| --- | --- |")
    for name, share in shares(list(profiler.events())).items():
        print(f"| {name} | {share:.1%} |")


if __name__ == "__main__":
    main()
