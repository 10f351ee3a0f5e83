"""What FP8 loses: casts of normal values with one outlier, and training runs of a tiny model.

    python -m benchmarks.float8_numbers                # casts, then 3 seeds of 150 updates
    python -m benchmarks.float8_numbers --seeds 5 --updates 1000 --width 256

The model learns a random Markov chain: its best loss is known, and every arm sees the same
batches and starts from the same weights. Arms: fp32; bf16 by autocast; FP8 with current,
delayed and block scaling; and three that are wrong on purpose: E5M2 for everything, a stale
scale (a history that a spike of 1e8 entered and that never ends), and no scale at all.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lehr.streams import generator_for
from lehr.training.float8_convert import convert
from lehr.training.float8_formats import E4M3, E5M2, encode
from lehr.training.float8_recipe import Float8Settings, HealthLimits
from lehr.training.float8_scaling import health, quantize, quantize_blocks, quantize_int8
from lehr.training.schedules import Schedule

SYMBOLS = 32
# Nothing falls back: the wrong arms must show what they do.
_NEVER = HealthLimits(sqnr_db=-math.inf, underflow=1.0, saturation=1.0)
_FP8 = Float8Settings(keep_first_blocks=0, keep_last_blocks=0, smallest_features=1, limits=_NEVER)
ARMS: dict[str, Float8Settings | None] = {
    "fp32": None,
    "bf16": None,
    "fp8 current": _FP8,
    "fp8 delayed": replace(_FP8, scaling="delayed"),
    "fp8 block": replace(_FP8, scaling="block"),
    "e5m2 everywhere": replace(_FP8, forward_format="e5m2"),
    "stale scale": replace(_FP8, scaling="delayed", window=1_000_000),
}


@dataclass(frozen=True)
class Trained:
    """What one run came to.

    excess          Σ_s share(s) KL(chain(s) ‖ model(s)) in the arm's own arithmetic, nats: exact,
                    0 for a model that knows the chain
    gradient_error  ‖g − g_fp32‖ / ‖g_fp32‖ at the first update
    sqnr_db         worst cast measured
    """

    excess: float
    gradient_error: float
    sqnr_db: float


class Chain:
    """A Markov chain over SYMBOLS symbols with known entropy."""

    def __init__(self, seed: int) -> None:
        logits = 2 * torch.randn(SYMBOLS, SYMBOLS, generator=generator_for(seed, "chain"))
        self.rows = logits.softmax(-1)
        self.share = torch.full((SYMBOLS,), 1 / SYMBOLS)
        for _ in range(200):
            self.share = self.share @ self.rows

    def batch(self, seed: int, update: int, size: int) -> tuple[Tensor, Tensor]:
        """Symbols [size] of the chain's own frequencies, and their successors [size]."""
        stream = generator_for(seed, "batch", update)
        first = torch.multinomial(self.share, size, replacement=True, generator=stream)
        return first, torch.multinomial(self.rows[first], 1, generator=stream).squeeze(1)

    def excess(self, logits: Tensor) -> float:
        """Σ_s share(s) KL(chain(s) ‖ softmax(logits[s])), nats; logits [SYMBOLS, SYMBOLS]."""
        gap = (self.rows.log() - logits.float().log_softmax(-1)).double()
        return float((self.share.double().unsqueeze(1) * self.rows.double() * gap).sum())


def make_model(seed: int, width: int) -> nn.Sequential:
    """Embedding, two hidden layers with norms, head."""
    model = nn.Sequential(
        nn.Embedding(SYMBOLS, width),
        nn.Linear(width, 2 * width), nn.SiLU(), nn.LayerNorm(2 * width),
        nn.Linear(2 * width, width), nn.SiLU(), nn.LayerNorm(width),
        nn.Linear(width, SYMBOLS),
    )  # fmt: skip
    stream = generator_for(seed, "weights")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                fan_in = parameter.shape[1]
                parameter.copy_(torch.randn(parameter.shape, generator=stream) / fan_in**0.5)
            elif name.endswith("bias"):
                parameter.zero_()
    return model


def train(arm: str, seed: int, updates: int = 150, width: int = 64, batch: int = 256) -> Trained:
    """One run of one arm."""
    chain, model = Chain(seed), make_model(seed, width)
    exact = _gradient(model, *chain.batch(seed, 0, batch))
    settings = ARMS[arm]
    fp8 = None if settings is None else convert(model, settings)
    if arm == "stale scale" and fp8 is not None:
        state = fp8.state()
        for layer in state["layers"].values():
            layer["histories"] = {name: {"amax": [1e8]} for name in layer["histories"]}
        fp8.load(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = Schedule(kind="linear", warmup=0.1, final=0.0)
    error, worst = 0.0, math.inf
    for update in range(updates):
        inputs, targets = chain.batch(seed, update, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=arm == "bf16"):
            logits = model(inputs)
        optimizer.zero_grad()
        F.cross_entropy(logits.float(), targets).backward()
        if update == 0:
            error = float((_flat(model) - exact).norm() / exact.norm())
        optimizer.param_groups[0]["lr"] = schedule.rate(update, 3e-3, updates)
        optimizer.step()
        if fp8 is not None:
            fp8.applied(update + 1)
            worst = min(worst, fp8.metrics().get("fp8.worst_sqnr_db", worst))
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=arm == "bf16"):
        return Trained(chain.excess(model(torch.arange(SYMBOLS))), error, worst)


def _gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    F.cross_entropy(model(inputs), targets).backward()
    flat = _flat(model)
    model.zero_grad()
    return flat


def _flat(model: nn.Module) -> Tensor:
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(parts)


def cast_table() -> list[tuple[str, dict[str, float]]]:
    """(outlier, decibels by format, and per cent flushed to 0) for 256 × 4096 normal values.

    One of them is the outlier, which is left out of signal and noise.
    """
    table = []
    for outlier in (0.0, 1e2, 1e4, 1e5):
        values = torch.randn(256, 4096, generator=generator_for("casts"))
        values[0, 0] = outlier or 1.0
        rest = values[1:]
        row = {}
        for form in (E4M3, E5M2):
            whole = quantize(values, form)
            seen = health(rest, replace(whole, codes=whole.codes[1:]), form)
            row[form.name] = seen.sqnr_db
            row[f"{form.name} % zeros"] = 100 * seen.underflow
        blocks = quantize_blocks(values, E4M3)
        part = replace(blocks, codes=blocks.codes[1:], scale=blocks.scale[1:])
        row["e4m3 1x128"] = health(rest, part, E4M3).sqnr_db
        whole = quantize_int8(values)
        row["int8"] = health(rest, replace(whole, codes=whole.codes[1:])).sqnr_db
        table.append((f"{outlier:g} sigma" if outlier else "none", row))
    return table


def unscaled_zeros() -> float:
    """Share of gradients of size 1e-6 that E5M2 turns into 0 without a scale."""
    gradients = 1e-6 * torch.randn(100_000, generator=generator_for("small"))
    return float((encode(gradients, E5M2).float() == 0).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    print("SQNR in dB of 256 x 4096 normal values with one outlier")
    for outlier, row in cast_table():
        print(f"  {outlier:>12}", *(f"{name} {value:5.1f}" for name, value in row.items()))
    print(f"gradients of 1e-6 without a scale, E5M2: {unscaled_zeros():.1%} become 0")
    print(f"training, {options.updates} updates, width {options.width}: excess loss minus fp32's")
    sizes = (options.updates, options.width)
    base = [train("fp32", seed, *sizes).excess for seed in range(options.seeds)]
    print(f"  fp32's own excess: {' '.join(f'{excess:.4f}' for excess in base)} nats")
    for arm in ARMS:
        runs = [train(arm, seed, *sizes) for seed in range(options.seeds)]
        gaps = [run.excess - other for run, other in zip(runs, base, strict=True)]
        print(
            f"  {arm:>16}  mean {sum(gaps) / len(gaps):+.4f}  "
            f"seeds {' '.join(f'{gap:+.4f}' for gap in gaps)}  "
            f"first gradient off by {max(run.gradient_error for run in runs):.1%}"
        )


if __name__ == "__main__":
    main()
