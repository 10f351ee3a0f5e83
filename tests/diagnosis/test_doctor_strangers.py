"""Logs of other trainers, as their users paste them in public: each is read, and its fault named.

The lines are made by hand after the layout of each tool; the numbers are of one curve.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from lehr.diagnosis.doctor import diagnose
from lehr.diagnosis.doctor_readers import curve_of_text

COUNT = 300
EVERY = 25  # steps between two evaluations


def healthy() -> list[float]:
    noise = np.random.default_rng(4).normal(0.0, 0.02, COUNT)
    return [round(float(v), 4) for v in 2.0 + 2.0 * np.exp(-np.arange(COUNT) / 45.0) + noise]


def spiked() -> list[float]:
    """Jumps at step 200 and stays."""
    return [round(v + (1.5 if i >= 200 else 0.0), 4) for i, v in enumerate(healthy())]


def broken() -> list[float]:
    """Not a number from step 150 on."""
    return [v if i < 150 else math.nan for i, v in enumerate(healthy())]


def evaluations(values: Sequence[float]) -> dict[int, float]:
    """Step -> loss of the evaluation after it."""
    return {i: round(values[i] + 0.1, 4) for i in range(EVERY - 1, len(values), EVERY)}


# -- one function for each trainer --------------------------------------------


def keras(values: Sequence[float]) -> str:
    """A bar that is drawn three times in each epoch, with carriage returns."""
    lines = []
    for i, v in enumerate(values, 1):
        lines.append(f"Epoch {i}/{len(values)}\n")
        for done, mean in ((1, 9.0), (60, 8.5)):
            bar = "[=>............................]"
            lines.append(f"\r{done:3d}/100 {bar} - ETA: 3s - loss: {mean} - accuracy: 0.1000")
        bar = "[==============================]"
        lines.append(f"\r100/100 {bar} - 2s 21ms/step - loss: {v} - accuracy: 0.5000")
        lines.append(f" - val_loss: {v + 0.1:.4f} - val_accuracy: 0.4000\n")
    return "".join(lines)


def keras_3(values: Sequence[float]) -> str:
    """The same in colours, and with another bar."""
    lines = []
    for i, v in enumerate(values, 1):
        lines.append(f"Epoch {i}/{len(values)}\n")
        lines.append(
            "\x1b[1m  1/100\x1b[0m \x1b[37m━━━━\x1b[0m \x1b[1m12s\x1b[0m 120ms/step - loss: 9.0"
        )
        lines.append("\b" * 40)
        lines.append("\r\x1b[1m100/100\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m2s\x1b[0m ")
        lines.append(f"21ms/step - loss: {v} - val_loss: {v + 0.1:.4f}\n")
    return "".join(lines)


def lightning(values: Sequence[float]) -> str:
    """metrics.csv: a row has what was logged at once, all other cells are empty."""
    rows = ["epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss"]
    for i, v in enumerate(values):
        rows.append(f"{i // EVERY},0.0001,{i},,,")
        rows.append(f"{i // EVERY},,{i},,{v},")
        if i in evaluations(values):
            rows.append(f"{i // EVERY},,{i},,,{evaluations(values)[i]}")
            rows.append(f"{i // EVERY},,{i},{v},,")
    return "\n".join(rows) + "\n"


def hf_printed(values: Sequence[float]) -> str:
    """Dictionaries between the states of a progress bar."""
    lines = []
    for i, v in enumerate(values):
        row = {"loss": v, "grad_norm": 1.25, "learning_rate": 9.5e-05, "epoch": round(i / 100, 2)}
        lines.append(f"\r {i // 3:2d}%|███▎      | {i}/{COUNT} [00:10<02:00,  1.05s/it]")
        lines.append(f"{row}" + " " * 20 + "\n")
        if i in evaluations(values):
            row = {"eval_loss": evaluations(values)[i], "eval_runtime": 9.5, "epoch": i / 100}
            lines.append(f"{row}\n")
    row = {"train_runtime": 100.5, "train_samples_per_second": 9.5, "train_loss": 2.3, "epoch": 3.0}
    return "".join(lines) + f"{row}\n"


def hf_printed_as_texts(values: Sequence[float]) -> str:
    """The newer form: every number in quotes."""
    return "".join(
        f"{{'loss': '{v}', 'grad_norm': '1.25', 'learning_rate': '9e-05', 'epoch': '{i / 100}'}}\n"
        + (f"{{'eval_loss': '{evaluations(values)[i]}'}}\n" if i in evaluations(values) else "")
        for i, v in enumerate(values)
    )


def llama_factory(values: Sequence[float]) -> str:
    lines = []
    for i, v in enumerate(values):
        common = {"epoch": i / 100, "percentage": i / 3, "elapsed_time": f"0:00:{i % 60:02d}"}
        common["remaining_time"] = "0:10:00"
        counted = {"current_steps": 10 * (i + 1), "total_steps": 3000}
        lines.append(json.dumps({**counted, "loss": v, "lr": 9e-5, **common}))
        if i in evaluations(values):
            lines.append(json.dumps({**counted, "eval_loss": evaluations(values)[i], **common}))
    return "\n".join(lines) + "\n"


def nanogpt(values: Sequence[float]) -> str:
    lines = ["tokens per iteration will be: 491,520", "number of parameters: 123.59M"]
    for i, v in enumerate(values):
        lines.append(f"iter {i}: loss {v:.4f}, time {45 + i % 7}.12ms, mfu {12 + i % 3}.34%")
        if i in evaluations(values):
            lines.append(f"step {i}: train loss {v:.4f}, val loss {evaluations(values)[i]:.4f}")
            lines.append("saving checkpoint to out")
    return "\n".join(lines)


def mlx(values: Sequence[float]) -> str:
    lines = ["Starting training..., iters: 300"]
    for i, v in enumerate(values):
        if i in evaluations(values):
            lines.append(f"Iter {i}: Val loss {evaluations(values)[i]:.4f}, Val took 9.512s")
        lines.append(
            f"Iter {i}: Train loss {v:.4f}, Learning Rate 1.000e-05, It/sec 1.133, "
            f"Tokens/sec {600 + i % 9}.667, Trained Tokens {1000 * i}, Peak mem 2.334 GB"
        )
    return "\n".join(lines)


def torchtune(values: Sequence[float]) -> str:
    return "".join(
        f"Step {i} | loss:{v} lr:2e-05 tokens_per_second_per_gpu:{400 + i % 9}.25 "
        "peak_memory_active:12.5\n"
        for i, v in enumerate(values, 1)
    )


def torchtitan(values: Sequence[float]) -> str:
    """Colours, and a comma in the clock of every line, the first line too."""
    lines = ["[rank0]:[titan] 2025-03-12 11:10:20,001 - root - INFO - Starting job, please wait"]
    for i, v in enumerate(values, 1):
        lines.append(
            f"[rank0]:[titan] 2025-03-12 11:10:21,{100 + i} - root - INFO - \x1b[31mstep: {i:2}  "
            f"\x1b[32mloss: {v:7.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.2500  \x1b[34mtps: 193,831"
            "  \x1b[36mtflops: 18.36  \x1b[35mmfu: 1.86%\x1b[39m"
        )
    return "\n".join(lines)


def megatron(values: Sequence[float]) -> str:
    """More than one loss in a line, and a scale of the loss."""
    lines = []
    for i, v in enumerate(values, 1):
        lines.append(
            f" [2026-05-28 22:26:{i % 60:02d}] iteration {i:8d}/     300 | consumed samples: "
            f"{512 * i:12d} | elapsed time per iteration (ms): 26813.0 | learning rate: 5.80000E-05"
            f" | global batch size:   512 | lm loss: {v:.6E} | load_balancing_loss: 1.253194E+00 | "
            "mtp_1 loss: 9.115410E+00 | loss scale: 1.0 | grad norm: 0.852 | params norm: 99.500 | "
            "number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    return "\n".join(lines)


def nanotron(values: Sequence[float]) -> str:
    return "".join(
        f"11/01/2024 11:05:18 [INFO|DP=0|PP=0|TP=0]: iteration: {i} / 300 | "
        f"consumed_tokens: 25.2G | elapsed_time_per_iteration_ms: 28.2K | lm_loss: {v} | "
        "lr: 0.000289 | model_tflops_per_gpu: 26.7 | grad_norm: 0.15\n"
        for i, v in enumerate(values, 1)
    )


def fairseq(values: Sequence[float]) -> str:
    """JSON in the lines of a log, every number a text; `update` is a share of an epoch."""
    lines = []
    for i, v in enumerate(values, 1):
        head = "2022-11-11 14:05:27 | INFO | train_inner | "
        row = {
            "epoch": 1,
            "update": round(i / 300, 3),
            "loss": f"{v}",
            "nll_loss": f"{v - 0.5:.4f}",
        }
        row |= {"ppl": "16.4", "num_updates": f"{i}", "lr": "1e-05", "gnorm": "1.9", "clip": "0"}
        lines.append(head + json.dumps(row))
        if i - 1 in evaluations(values):
            loss = evaluations(values)[i - 1]
            row = {"epoch": 1, "valid_loss": f"{loss}", "valid_ppl": "9.1"}
            row |= {"valid_num_updates": f"{i}"}
            lines.append(head.replace("train_inner", "valid") + json.dumps(row))
    return "\n".join(lines)


def fairseq_of_2019(values: Sequence[float]) -> str:
    return "".join(
        f"| epoch 001:  {10 * i:5d} / 8223 loss={v} (3.500), nll_loss={v - 0.5:.3f}, ppl=9.57, "
        f"wps=52922, num_updates={i}, lr=8.9e-05, gnorm=1.543, clip=0%, oom=0, loss_scale=2.000\n"
        for i, v in enumerate(values, 1)
    )


def deepspeed(values: Sequence[float]) -> str:
    """The step in one line, the loss in another; steps that overflowed are counted on."""
    return "".join(
        f"[2022-03-11 02:06:58,985] [INFO] [logging.py:96:log_dist] [Rank 0] step={10 * i}, "
        f"skipped=2, lr=[5e-05, 5e-05], mom=[[0.9, 0.999]]\n"
        f"Epoch 0, Step {10 * i}, loss={v}, lr=5e-05\n"
        for i, v in enumerate(values, 1)
    )


def olmo_core(values: Sequence[float]) -> str:
    """A step is a block of lines."""
    return "".join(
        f"2025-01-01 10:00:{i % 60:02d}.123 host:0 olmo_core.train.callbacks.console:92 INFO "
        f"[step={i}/300,epoch=1]\n"
        f"    optim/LR (group 0)=1.2E-05\n    optim/total grad norm=1.250\n"
        f"    throughput/device/TPS=11,402\n    train/CE loss={v}\n    train/PPL=12.2\n"
        for i, v in enumerate(values, 1)
    )


def a_loop_of_a_tutorial(values: Sequence[float]) -> str:
    """Steps that begin again with every epoch, in brackets."""
    return "".join(
        f"Epoch [{i // 100 + 1}/3], Step [{i % 100 + 1}/100], Loss: {v}\n"
        for i, v in enumerate(values)
    )


def tqdm(values: Sequence[float]) -> str:
    """The states of a bar in one line: each is a step."""
    bars = (
        f"\rEpoch 0:  50%|███ | {i}/300 [00:10<00:10, 9.5it/s, loss={v}]"
        for i, v in enumerate(values)
    )
    return "".join(bars) + "\n"


EVALUATED: list[Callable[[Sequence[float]], str]] = [
    *(lightning, hf_printed, hf_printed_as_texts, llama_factory, nanogpt, mlx, fairseq),
]
TRAINERS = [
    *EVALUATED,
    *(
        megatron,
        keras,
        keras_3,
        torchtune,
        torchtitan,
        nanotron,
        fairseq_of_2019,
        deepspeed,
        olmo_core,
    ),
    *(a_loop_of_a_tutorial, tqdm),
]


@pytest.mark.parametrize("write", TRAINERS)
def test_the_loss_is_found_point_for_point(write: Callable[[Sequence[float]], str]):
    curve = curve_of_text(write(healthy()))
    steps, values = curve.points("loss")
    np.testing.assert_allclose(values, healthy(), atol=1e-6)
    assert (np.diff(steps) > 0).all() and not curve.restarts
    assert diagnose(curve).healthy


@pytest.mark.parametrize("write", EVALUATED)
def test_the_evaluation_stands_apart(write: Callable[[Sequence[float]], str]):
    curve = curve_of_text(write(healthy()))
    told = evaluations(healthy())
    np.testing.assert_allclose(curve.points("evaluation.loss")[1], list(told.values()), atol=1e-6)


@pytest.mark.parametrize("write", TRAINERS)
def test_a_planted_fault_is_named(write: Callable[[Sequence[float]], str]):
    assert diagnose(curve_of_text(write(spiked()))).findings[0].name == "spike_that_stays"
    assert diagnose(curve_of_text(write(broken()))).findings[0].name == "nan_at_step"


@pytest.mark.parametrize(
    ("write", "columns"),
    [
        (hf_printed, {"grad_norm": 1.25, "learning_rate": 9.5e-05}),
        (llama_factory, {"learning_rate": 9e-5}),
        (mlx, {"learning_rate": 1e-5}),
        (torchtitan, {"grad_norm": 1.25}),
        (megatron, {"grad_norm": 0.852, "learning_rate": 5.8e-05}),
        (fairseq, {"grad_norm": 1.9, "learning_rate": 1e-05}),
        (deepspeed, {"learning_rate": 5e-05}),
        (olmo_core, {"grad_norm": 1.25}),
    ],
)
def test_the_other_columns(write: Callable[[Sequence[float]], str], columns: dict[str, float]):
    curve = curve_of_text(write(healthy()))
    for name, value in columns.items():
        assert set(curve.points(name)[1]) == {value}


@pytest.mark.parametrize(
    ("write", "last"),
    [
        *((llama_factory, 3000), (nanogpt, 299), (mlx, 299), (torchtune, 300), (torchtitan, 300)),
        *((megatron, 300), (nanotron, 300), (fairseq, 300), (fairseq_of_2019, 300)),
        *((deepspeed, 3000), (olmo_core, 300), (a_loop_of_a_tutorial, 300), (lightning, 299)),
    ],
)
def test_steps_are_those_of_the_trainer(write: Callable[[Sequence[float]], str], last: int):
    assert curve_of_text(write(healthy())).points("loss")[0][-1] == last


# -- preferences --------------------------------------------------------------


def trl_dpo(chosen: Sequence[float], margins: Sequence[float]) -> str:
    """What TRL and Axolotl print of a DPO run."""
    lines = []
    for i, (c, m) in enumerate(zip(chosen, margins, strict=True)):
        row = {"loss": round(math.log1p(math.exp(-m)), 4), "learning_rate": 4.2e-05}
        row |= {"rewards/chosen": 0.1 * c, "rewards/rejected": 0.1 * c - m}
        row |= {"rewards/accuracies": 0.75, "rewards/margins": m}
        row |= {"logps/rejected": -148.0 + c - 10 * m, "logps/chosen": -138.0 + c}
        row |= {"logits/rejected": -2.5, "logits/chosen": -2.25, "epoch": i / 100}
        lines.append(f"{row}\n")
    return "".join(lines)


def test_a_dpo_log_whose_chosen_answers_collapse():
    share = np.linspace(0.0, 1.0, 200)
    noise = np.random.default_rng(3).normal(0.0, 0.02, 200)
    curve = curve_of_text(
        trl_dpo([float(v) for v in -90 * share + noise], [float(v) for v in 2 * share + noise])
    )
    assert len(curve.points("loss")[1]) == 200
    assert curve.points("margin")[1][-1] == pytest.approx(2.0, abs=0.1)
    names = [one.name for one in diagnose(curve).findings]
    assert names and names[0] in ("both_fall", "chosen_collapses", "kl_runaway")


def test_a_healthy_dpo_log():
    share = np.linspace(0.0, 1.0, 200)
    noise = np.random.default_rng(3).normal(0.0, 0.02, 200)
    curve = curve_of_text(
        trl_dpo([float(v) for v in 2 * share + noise], [float(v) for v in share + noise])
    )
    assert diagnose(curve).healthy
