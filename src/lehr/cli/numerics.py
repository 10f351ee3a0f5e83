"""The table of `lehr plan --numerics`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

PEFT_PREFIX = "base_model.model."  # of an adapter's names; the table has no room for it
ROWS = 40


def print_numerics(console: Console, report: Any) -> None:
    """Ranges of the gradients, the tensors that fp16 would hurt most first."""
    console.print(
        f"\n[bold]gradients of {report.stage}, update 1[/] (fp32, loss {report.loss:.3f})"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for title in ("values", "least", "most", "fp16: 0", "blurred", "inf", "bf16: 0"):
        table.add_column(title, justify="right", no_wrap=True)
    shown = report.worst_first()[:ROWS]
    for one in shown:
        table.add_row(
            one.name.removeprefix(PEFT_PREFIX).removesuffix(".weight"),
            f"{one.values:,}",
            f"{one.smallest:.1e}",
            f"{one.largest:.1e}",
            f"{one.fp16_underflow:.1%}",
            f"{one.fp16_subnormal:.1%}",
            f"{one.fp16_overflow:.1%}",
            f"{one.bf16_underflow:.1%}",
        )
    console.print(table)
    rest = len(report.ranges) - len(shown)
    if rest:
        console.print(f"  and {rest} tensors that lose less; --json has them all", style="dim")
    console.print(
        f"fp16 would lose {report.lost_fp16:.2%} of the gradients, bf16 {report.lost_bf16:.2%}; "
        f"with loss_scale: {report.suggested_loss_scale:g} fp16 loses {report.lost_fp16_scaled:.2%}"
    )
