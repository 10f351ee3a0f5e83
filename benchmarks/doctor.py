"""How often the doctor gives the right name: faults put into real tiny trainings, healthy runs.

    python -m benchmarks.doctor curves --into FOLDER [--seconds 500]   # train; goes on later
    python -m benchmarks.doctor fit --curves FOLDER     # strengths, to set limits by
    python -m benchmarks.doctor score --curves FOLDER   # the tables of docs/doctor.md

Limits are set on the parts `fit` (AdamW, widths 16 and 32), `slow` (the same, at other rates) and
`wide` (Adagrad, Adafactor), and on a look at `test` (SGD with momentum, Lion);
`sealed` has other seeds and sizes and RMSprop, and was scored once, with the limits final: whoever
changes a limit after that look needs another part.
Curves lie on disk, so that limits can be set again without training again. A part takes about ten
minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.doctor_models import Setup
from benchmarks.doctor_trainings import FAULTS, Group, context_of, fault_setup
from lehr.diagnosis.doctor import Diagnosis, diagnose, ranked
from lehr.diagnosis.doctor_curve import curve_of_columns
from lehr.diagnosis.doctor_look import Context, Look
from lehr.evaluation.statistics import wilson

RUNS = {"fit": 6, "slow": 6, "wide": 5, "test": 10, "sealed": 7}
SEEDS_FROM = {"fit": 0, "slow": 250_000, "wide": 300_000, "test": 500_000, "sealed": 800_000}
BASES = {
    "fit": (Setup(width=16, optimizer="adamw"), Setup(width=32, optimizer="adam95")),
    "wide": (
        Setup(width=40, layers=1, optimizer="adagrad"),
        Setup(width=24, layers=3, optimizer="adafactor"),
    ),
    "test": (Setup(width=24, optimizer="sgd"), Setup(width=48, layers=1, optimizer="lion")),
    "sealed": (
        Setup(width=20, optimizer="rmsprop"),
        Setup(width=40, layers=1, optimizer="sgd"),
        Setup(width=28, optimizer="lion"),
    ),
}
# Which name of the doctor is right for a fault; several where the curve shows one of several.
RIGHT: dict[str, tuple[str, ...]] = {
    "lr_zero": ("flat_at_chance",),
    "frozen": ("flat_at_chance",),
    "shuffled_labels": ("flat_at_unigram",),
    "blind_inputs": ("flat_at_unigram",),
    "init_large": ("start_above_chance",),
    "nan_at_k": ("nan_at_step",),
    "nan_first": ("nan_at_first_step",),
    "unshifted_labels": ("too_low_too_soon",),
    "lagging_mean": ("eval_below_train",),
    "tiny_data": ("train_down_eval_up",),
    "no_reshuffle": ("epoch_sawtooth",),
    "no_zero_grad": ("growing_oscillation",),
    "lr_ramp": ("falls_then_climbs",),
    "spike_heals": ("spike_that_heals",),
    "spike_stays": ("spike_that_stays",),
    "periodic": ("periodic_bumps",),
    "bad_resume": ("jump_at_resume",),
    "accumulation": ("scales_with_accumulation",),
    "late_creep": ("late_creep",),
    "endless_warmup": ("never_left_warmup",),
    "zero_tail": ("rate_ran_out",),
    "dead_start": ("plateau_then_drop",),
    "stale_eval": ("eval_apart_from_start",),
    "dpo_displacement": ("both_fall",),
    "dpo_runaway": ("kl_runaway",),
}
# No name is right here, the curve does not show them: this training is too short for a leak
# through the mask to pay, and what dropout costs is as much as one held-out set is easier than
# another. A test must find them; they are counted apart.
UNSEEN = ("no_causal_mask", "dropout")


def healthy(part: str) -> Iterator[Setup]:
    """Setups without a fault: sizes, schedules, batch sizes, lengths, LoRA, DPO, resumes."""
    for base in BASES[part]:
        yield base
        for schedule in ("linear", "constant", "wsd"):
            yield replace(base, schedule=schedule)
        yield replace(base, batch=4)
        yield replace(base, batch=16, updates=160)
        yield replace(base, updates=400, evaluate_every=40)
        yield replace(base, rows=1200, updates=300)
        yield replace(base, dropout=0.05)
        yield replace(base, source="chain")
        yield replace(base, source="chain", schedule="linear", batch=4)
        yield replace(base, resumes=True)
        yield replace(base, warmup=60, updates=300)
        yield replace(base, width=64, layers=1, updates=160)
        yield replace(base, kind="lora")
        yield replace(base, kind="lora", schedule="constant", batch=16, updates=160)
        yield replace(base, kind="preference", updates=160)


@dataclass(frozen=True)
class Curve:
    """One stored run."""

    part: str
    fault: str
    label: str
    columns: dict[str, np.ndarray]
    context: dict[str, Any]


def slow_setups() -> Iterator[Setup]:
    """Runs that learn little or late: adapters and faults at a share of the usual rate."""
    for base in BASES["fit"]:
        for speed in (0.03, 0.1, 0.3):
            yield replace(base, kind="lora", speed=speed)
            yield replace(base, kind="lora", speed=speed, schedule="constant", batch=16)
        for speed in (0.1, 0.3):
            for fault in ("tiny_data", "unshifted_labels", "spike_stays", "bad_resume"):
                yield fault_setup(fault, replace(base, speed=speed))
        for fault in ("lr_ramp", "no_zero_grad"):
            yield fault_setup(fault, replace(base, speed=3.0))
        yield replace(base, kind="lora", speed=0.3, fault="stale_eval")


def groups(part: str) -> Iterator[tuple[str, Setup]]:
    """(file name, setup) of every group of a part."""
    if part == "slow":
        for number, setup in enumerate(slow_setups()):
            yield f"slow-{setup.fault or 'healthy'}-{number}", setup
        return
    for number, base in enumerate(BASES[part]):
        for fault in FAULTS:
            yield f"{part}-{fault}-{number}", fault_setup(fault, base)
    for number, setup in enumerate(healthy(part)):
        yield f"{part}-healthy-{number}", setup


def make_curves(
    folder: Path, part_wanted: str, seconds: float, backwards: bool, only: str = "*"
) -> bool:
    """Train what is not there yet; False where the time was over before the end."""
    import torch

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for part in RUNS:
        if part_wanted not in (part, "all"):
            continue
        listed = list(enumerate(groups(part)))
        for number, (name, setup) in reversed(listed) if backwards else listed:
            path = folder / f"{name}.npz"
            if path.exists() or not fnmatch(name, f"{part}-{only}"):
                continue
            if time.monotonic() - began > seconds:
                print("time is over: the same command goes on", flush=True)
                return False
            group = Group(setup, SEEDS_FROM[part] + 1000 * (1 + number), RUNS[part])
            spent = time.process_time()
            curves = group.go()
            contexts = [context_of(setup, group, run) for run in range(RUNS[part])]
            arrays = {
                f"{run}/{column}": values.astype(np.float32)
                for run, curve in enumerate(curves)
                for column, values in curve.items()
            }
            about = {"part": part, "fault": setup.fault, "contexts": contexts}
            np.savez_compressed(path, about=json.dumps(about), **arrays)
            print(f"{name}: {time.process_time() - spent:.1f} s", flush=True)
    return True


def stored(folder: Path, part: str) -> Iterator[Curve]:
    """All curves of a part."""
    for path in sorted(folder.glob(f"{part}-*.npz")):
        with np.load(path) as file:
            about = json.loads(str(file["about"]))
            for run, context in enumerate(about["contexts"]):
                columns = {
                    name.split("/", 1)[1]: file[name].astype(float)
                    for name in file.files
                    if name.startswith(f"{run}/")
                }
                yield Curve(part, about["fault"], f"{path.stem}/{run}", columns, context)


def diagnosis_of(curve: Curve, what: str = "all", share: float = 1.0) -> Diagnosis:
    """What the doctor says of a stored run.

    what   all: every column and what lehr knows; foreign: loss, rate and evaluation without
           anything known beside them; loss: the loss alone
    share  of the run that it is shown
    """
    wanted = {"loss": ("loss",), "foreign": ("loss", "learning_rate", "evaluation.loss")}.get(what)
    kept = max(1, round(share * len(curve.columns["loss"])))
    columns: dict[str, Any] = {
        name: values[:kept]
        for name, values in curve.columns.items()
        if wanted is None or name in wanted
    }
    if "evaluation.loss" in columns:  # NaN means "no evaluation in this row" in the stored files
        column = columns["evaluation.loss"]
        columns["evaluation.loss"] = [None if one != one else one for one in column.tolist()]
        if not np.isfinite(column).any():
            del columns["evaluation.loss"]
    known = {name: tuple(v) if name == "resumes" else v for name, v in curve.context.items()}
    context = Context(**known) if wanted is None else Context()
    return diagnose(curve_of_columns(columns), context)


def score(folder: Path, part: str, what: str) -> dict[str, Any]:
    """Names of first findings by fault, false alarms, and how often a faulty run looks healthy."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    second: Counter[str] = Counter()
    halfway: Counter[str] = Counter()
    alarms: list[str] = []
    for curve in stored(folder, part):
        found = diagnosis_of(curve, what)
        first = found.findings[0].name if found.findings else "healthy"
        table[curve.fault or "healthy"][first] += 1
        if not curve.fault and found.findings:
            alarms.append(f"{curve.label}: {first} ({found.findings[0].seen})")
        if curve.fault in RIGHT:
            names = [one.name for one in found.findings]
            second[curve.fault] += any(name in RIGHT[curve.fault] for name in names)
            halfway[curve.fault] += diagnosis_of(curve, what, 0.5).healthy
    right = {fault: sum(table[fault][name] for name in names) for fault, names in RIGHT.items()}
    total = sum(sum(table[fault].values()) for fault in RIGHT)
    return {
        "table": {fault: dict(counts.most_common()) for fault, counts in table.items()},
        "runs": total,
        "right": sum(right.values()),
        "named_at_all": sum(second.values()),
        "said_healthy": sum(table[fault]["healthy"] for fault in RIGHT),
        "said_healthy_halfway": sum(halfway.values()),
        "healthy_runs": sum(table["healthy"].values()),
        "false_alarms": len(alarms),
        "alarms": alarms,
    }


def strengths(folder: Path) -> None:
    """Largest strength of every sign in healthy runs, and the weakest where it is right."""
    alarms: dict[str, float] = defaultdict(float)
    right: dict[str, list[float]] = defaultdict(list)
    for curve in chain(stored(folder, "fit"), stored(folder, "slow")):
        known = {name: tuple(v) if name == "resumes" else v for name, v in curve.context.items()}
        columns: dict[str, Any] = dict(curve.columns)
        if "evaluation.loss" in columns:
            column = columns["evaluation.loss"].tolist()
            columns["evaluation.loss"] = [None if one != one else one for one in column]
        look = Look(curve_of_columns(columns), Context(**known))
        for sign in ranked(look):
            if not curve.fault:
                alarms[sign.name] = max(alarms[sign.name], sign.strength)
            elif sign.name in RIGHT.get(curve.fault, ()):
                right[sign.name].append(sign.strength)
    for name in sorted({*alarms, *right}):
        values = right.get(name, [])
        low = f"{min(values):8.2f} {np.median(values):8.2f}" if values else "       -        -"
        print(f"{name:26} healthy at most {alarms[name]:6.2f}   right from, median {low}")


def interval(count: int, runs: int) -> str:
    """Wilson interval of a share at 95 %, which takes runs for independent."""
    if not runs:
        return "-"
    found = wilson(count, runs)
    return f"{100 * found.low:.1f} to {100 * found.high:.1f} %"


def print_score(found: dict[str, Any]) -> None:
    print("| fault put in | runs | right name first | 95 % (Wilson) | other first findings |")
    print("| --- | --- | --- | --- | --- |")
    for fault, counts in sorted(found["table"].items()):
        names = RIGHT.get(fault, ("healthy",))
        runs = sum(counts.values())
        other = ", ".join(f"{name} {n}" for name, n in counts.items() if name not in names)
        good = sum(counts.get(name, 0) for name in names)
        print(
            f"| {fault} | {runs} | {good} ({names[0]}) | {interval(good, runs)} | {other or '-'} |"
        )
    runs, sound = found["runs"], found["healthy_runs"]
    for what, count, of in (
        ("right name first", found["right"], runs),
        ("right name among the findings", found["named_at_all"], runs),
        ("faulty runs called healthy at the end", found["said_healthy"], runs),
        ("the same at half of the run", found["said_healthy_halfway"], runs),
        ("false alarms in healthy runs", found["false_alarms"], sound),
    ):
        print(f"{what}: {count} of {of} ({interval(count, of)})")
    for line in found["alarms"]:
        print("  ", line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("curves", "fit", "score"))
    parser.add_argument("--into", "--curves", dest="folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--columns", default="all", choices=("all", "foreign", "loss"))
    parser.add_argument("--part", default="all", choices=(*RUNS, "all"))
    parser.add_argument("--backwards", action="store_true", help="a second process, from the end")
    parser.add_argument("--only", default="*", help="groups whose name fits, as 'lr_ramp-*'")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.what == "curves":
        rest = (asked.part, asked.seconds, asked.backwards, asked.only)
        sys.exit(0 if make_curves(asked.folder, *rest) else 1)
    if asked.what == "fit":
        strengths(asked.folder)
        return
    found = score(asked.folder, "test" if asked.part == "all" else asked.part, asked.columns)
    print_score(found)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
