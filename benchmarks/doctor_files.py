"""Seconds that `lehr doctor FILE` takes on a curve of a million points, format by format.

    python -m benchmarks.doctor_files --into FOLDER [--rows 1000000] [--only WORD]

Writes one file for each format (0.01 to 0.9 GB each, all of the same curve: it falls, and one spike
heals), reads it as `lehr doctor` does and looks at it. `read` and `look` are processor seconds of
this process; the start of the command (0.6 s) is not in them. `right` says whether the curve has
all points and the spike was named.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lehr.diagnosis.doctor import diagnose
from lehr.diagnosis.doctor_readers import read_curve

Writer = Callable[[list[float]], Iterator[str]]
SPIKE_AT, SPIKE = 0.6, 5.0


def losses(count: int) -> list[float]:
    """A curve that falls from 4 to 2; at 60 % of it one point is `SPIKE` higher."""
    noise = np.random.default_rng(7).normal(0.0, 0.02, count)
    values = 2.0 + 2.0 * np.exp(-np.arange(count) / (0.15 * count)) + noise
    values[int(SPIKE_AT * count)] += SPIKE
    return [float(value) for value in np.round(values, 4)]


def trainer_state(indent: int | None) -> Writer:
    def write(values: list[float]) -> Iterator[str]:
        gap, deeper, end = ("\n    ", "\n      ", "\n") if indent else ("", "", "")
        space = "" if indent else " "
        yield f'{{{end}  "best_metric": null,{end}  "log_history": ['
        for i, value in enumerate(values, 1):
            pairs = {
                "epoch": i / 1000,
                "grad_norm": 1.2,
                "learning_rate": 1e-4,
                "loss": value,
                "step": i,
            }
            body = f",{deeper or space}".join(f'"{k}": {v}' for k, v in pairs.items())
            yield f"{gap}{{{deeper}{body}{gap}}},{space}"
            if i % 1000 == 0:
                body = f",{deeper or space}".join(
                    f'"{k}": {v}'
                    for k, v in {"epoch": i / 1000, "eval_loss": 2.0, "step": i}.items()
                )
                yield f"{gap}{{{deeper}{body}{gap}}},{space}"
        last = {"epoch": 1.0, "step": len(values), "train_loss": 2.2, "train_runtime": 9.5}
        yield gap + json.dumps(last) + end + f'  ],{end}  "global_step": {len(values)}{end}}}'

    return write


def lines(shape: str) -> Writer:
    """A line for each value, by a format of `i` (from 1), `v` and `h` (thousands of i)."""

    def write(values: list[float]) -> Iterator[str]:
        for i, v in enumerate(values, 1):
            yield shape % {"i": i, "v": v, "h": i / 1000, "j": i % 60} + "\n"

    return write


def headed(head: str, shape: str) -> Writer:
    def write(values: list[float]) -> Iterator[str]:
        yield head + "\n"
        yield from lines(shape)(values)

    return write


def keys(count: int) -> Writer:
    more = "".join(f', "gpu.{n}.power": {n}.5' for n in range(count - 3))
    return lines('{"step": %(i)d, "loss": %(v)s, "lr": 0.0001' + more + "}")


def of_lehr(values: list[float]) -> Iterator[str]:
    for i, v in enumerate(values, 1):
        row = {
            "stage": "sft",
            "update": i,
            "loss": v,
            "grad_norm": 1.25,
            "learning_rate": 1e-4,
            "tokens": 4096,
            "seconds": 0.125,
            "tokens_per_second": 32768.5,
            "skipped": False,
            "log_z": 11.25,
            "update_norm": 0.0125,
        }
        yield json.dumps(row) + "\n"


def one_line(values: list[float]) -> Iterator[str]:
    yield ", ".join(map(str, values))


def columns(values: list[float]) -> Iterator[str]:
    yield json.dumps({"loss": values, "step": list(range(1, len(values) + 1))})


def tensorboard_json(values: list[float]) -> Iterator[str]:
    yield json.dumps([[1.7e9 + i, i, v] for i, v in enumerate(values, 1)])


def objects(values: list[float]) -> Iterator[str]:
    yield json.dumps([{"step": i, "loss": v, "lr": 1e-4} for i, v in enumerate(values, 1)])


def keras(values: list[float]) -> Iterator[str]:
    for i, v in enumerate(values, 1):
        yield f"Epoch {i}/{len(values)}\n"
        yield f"100/100 - 2s - 21ms/step - accuracy: 0.5000 - loss: {v} - val_loss: 2.5000\n"


def long_table(values: list[float]) -> Iterator[str]:
    yield "Run ID,key,value,step,timestamp\n"
    for i, v in enumerate(values[::2], 1):
        yield f"0f3a,train_loss,{v},{2 * i - 1},{1_700_000_000_000 + i}\n"
        yield f"0f3a,lr,0.0001,{2 * i - 1},{1_700_000_000_000 + i}\n"


def lightning(values: list[float]) -> Iterator[str]:
    yield "epoch,step,train_loss_epoch,train_loss_step,val_loss\n"
    for i, v in enumerate(values, 1):
        yield f"{i // 1000},{i},,{v},\n"
        if i % 1000 == 0:
            yield f"{i // 1000},{i},,,2.5\n{i // 1000},{i},2.5,,\n"


def nanogpt(values: list[float]) -> Iterator[str]:
    for i, v in enumerate(values):
        if i % 1000 == 0:
            yield f"step {i}: train loss {v:.4f}, val loss 2.5000\n"
        yield f"iter {i}: loss {v:.4f}, time 45.13ms, mfu 12.34%\n"


WANDB = '"Step","calm-1 - train/loss","calm-1 - train/loss__MIN","calm-1 - train/loss__MAX"'
HF = "{'loss': %(v)s, 'grad_norm': 1.2034, 'learning_rate': 9.8e-05, 'epoch': %(h)s}"
MEGATRON = (
    " [2024-05-01 12:00:%(j)02d] iteration %(i)8d/ 1000000 | consumed samples: %(i)12d | elapsed "
    "time per iteration (ms): 812.4 | learning rate: 1.500E-04 | global batch size: 256 | "
    "lm loss: %(v)E | loss scale: 1.0 | grad norm: 1.203 | number of skipped iterations: 0 | "
)
FORMATS: dict[str, Writer] = {
    "trainer_state.json": trainer_state(2),
    "trainer_state.json, one line": trainer_state(None),
    "CSV: step, loss, rate": headed("step,loss,lr", "%(i)d,%(v)s,0.0001"),
    "CSV with semicolons, decimal commas": headed("step;loss", "%(i)d;%(v)s"),
    "CSV of wandb": headed(WANDB, '"%(i)d","%(v)s","%(v)s","%(v)s"'),
    "CSV of TensorBoard": headed("Wall time,Step,Value", "17000%(i)d.5,%(i)d,%(v)s"),
    "CSV of Lightning": lightning,
    "mlflow's long table": long_table,
    "mlflow's metric file": lines("17000%(i)09d %(v)s %(i)d"),
    "JSON lines of 3 keys": keys(3),
    "JSON lines of 40 keys": keys(40),
    "metrics.jsonl of lehr": of_lehr,
    "JSON: columns": columns,
    "JSON: array of objects": objects,
    "JSON of TensorBoard": tensorboard_json,
    "numbers in one line": one_line,
    "numbers, one a line": lines("%(v)s"),
    "pairs": lines("%(i)d %(v)s"),
    "printed dictionaries": lines(HF),
    "iter 1: loss 2.1, time 45ms": nanogpt,
    "step: 1 | loss: 2.1 | lr: 1e-5": lines("step: %(i)d | loss: %(v)s | lr: 1.00e-05"),
    "Keras": keras,
    "Megatron": lines(MEGATRON),
}


def written(folder: Path, name: str, count: int) -> Path:
    """The file of a format; written where it is not there yet."""
    path = folder / f"{''.join(c if c.isalnum() else '_' for c in name)}_{count}"
    if not path.exists():
        text = "".join(FORMATS[name](losses(count)))
        if "decimal commas" in name:
            text = text.replace(".", ",")
        path.write_text(text, encoding="utf-8")
    return path


def measured(path: Path, count: int) -> tuple[float, float, bool]:
    """(seconds to read, seconds to look, whether curve and finding are right)."""
    begin = time.process_time()
    curve = read_curve(path)
    middle = time.process_time()
    found = diagnose(curve)
    end = time.process_time()
    names = [finding.name for finding in found.findings]
    whole = found.points in (count, count // 2) and "spike_that_heals" in names
    return middle - begin, end - middle, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    for name in FORMATS:
        if given.only in name:
            path = written(given.into, name, given.rows)
            read, look, right = measured(path, given.rows)
            size = path.stat().st_size / 1e6
            print(f"| {name} | {size:.0f} MB | {read:.2f} | {look:.2f} | {right} |", flush=True)


if __name__ == "__main__":
    main()
