"""What a finished run measured, kept for `lehr explain`: the last number on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lehr.report.explain import record_measurement
from lehr.report.wording import gate_sentence

PAGES_OF_GATES = {
    "forgetting": "forgetting",
    "over_refusal": "refusal",
    "sycophancy": "sycophancy",
}
PAGES_OF_KINDS = {"pretrain": "continued-pretraining", "sft": "sft", "preference": "preference"}


def record_run(ledger: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Note a sentence for every page that the run has a number for; a full disk is no error."""
    run = f"run {ledger['name']}, {ledger['model']}, {time.strftime('%Y-%m-%d')}"
    found: dict[str, str] = {}
    for stage in ledger["stages"]:
        for gate in stage["gates"]:
            page = PAGES_OF_GATES.get(gate["name"])
            if gate["kind"] == "improve":
                page = PAGES_OF_KINDS.get(stage["kind"])
            if page is not None and gate["difference"] is not None:
                found[page] = f"{stage['name']}: {gate_sentence(gate)} ({run})"
        if stage["tokens"] and not stage["reused"]:
            rate = stage["tokens"] / max(stage["seconds"], 1e-9)
            found["evaluation"] = (
                f"{stage['name']}: {rate:,.0f} trained tokens a second with all of its "
                f"measuring, {stage['seconds']:.0f} s in all ({run})"
            )
    rates = plan["machine"].get("gemm_gflops") or {}
    if rates:
        said = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in rates.items())
        found["precision"] = f"{said}; chosen: {plan['precision']['value']} ({run})"
    found |= _exports(ledger["exports"], run)
    for page, text in found.items():
        try:
            record_measurement(page, text)
        except OSError:
            return


def _exports(exports: Sequence[Mapping[str, Any]], run: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in exports:
        parity = entry["parity"]
        if entry["kind"] == "fp8":  # has a page and a number of its own
            found["float8"] = (
                f"E4M3 export: loss {parity['loss']:+.4f} nats/token, KL {parity['kl']:.4f} over "
                f"{parity['positions']} positions ({run})"
            )
        elif "export" not in found:
            found["export"] = (
                f"{entry['kind']}: largest gap {parity['gap']:.1e} nats, KL {parity['kl']:.1e} "
                f"nats a token over {parity['positions']} positions ({run})"
            )
    return found
