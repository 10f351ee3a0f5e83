"""The drawing of `--speed`: 80 columns, one bottleneck, its proof and its gain."""

from __future__ import annotations

import io

from rich.console import Console

from lehr.cli.speed import print_speed
from lehr.diagnosis.speed import CLASSES, Speed, Trial


def test_a_stage_in_eighty_columns():
    seconds = dict.fromkeys(CLASSES, 0.0) | {"data": 0.03, "compute": 0.05, "memory": 0.02}
    trial = Trial("one cached batch", 0.07, 0.072, 0.1)
    found = Speed(
        seconds, "data", 0.21, 0.25, 0.8, 0.7, trial=trial, fix="a faster source", gain=1.43,
        tokens=100.0, limits={"gflops": 90.0, "gbytes": 20.0},
    )  # fmt: skip
    stream = io.StringIO()
    print_speed(Console(file=stream, width=80, highlight=False), "01-sft", found)
    text = stream.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert " moves memory (element-wise work, norms,\n" + " " * 32 + "optimizer)" in text, text
    flat = " ".join(text.split())
    for words in (
        "01-sft 100.0 ms an update, 1,000 tokens/s",
        "bottleneck: waits for data (30%)",
        "one cached batch: predicted 70.0 ms an update, measured 72.0 (confirmed)",
        "fix: 1.43 times as fast: a faster source",
        "needed 21% (MFU), 25% were done (HFU)",
    ):
        assert words in flat, words
    assert "exchange between ranks" not in text, "what takes nothing is not listed"
