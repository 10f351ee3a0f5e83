"""A training curve as columns over steps, cleaned of what logs do to it.

Logs have gaps, rows twice, steps that begin again after a restart, numbers that are not finite
and columns that every tool spells otherwise. Here all of that becomes one shape; what was found
on the way stands in `notes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lehr.errors import Problem, RecipeError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Column of lehr's metrics.jsonl -> how other tools spell it, without prefixes such as `train/`.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "loss": (
        *("loss", "train_loss", "training_loss", "trainloss", "loss_train", "lm_loss", "nll"),
        *("train_loss_step", "loss_step", "train_loss_epoch", "loss_epoch", "ce_loss"),
        *("cross_entropy_loss", "cross-entropy-loss", "nll_loss", "total_loss", "avg_loss"),
        *("average_loss", "mean_loss", "batch_loss", "step_loss", "epoch_loss"),
    ),
    "evaluation.loss": (
        *("evaluation.loss", "eval_loss", "val_loss", "valid_loss", "validation_loss"),
        *("test_loss", "evaluation_loss", "dev_loss", "heldout_loss", "loss_val", "loss_eval"),
        *("val_loss_epoch", "valid_loss_epoch", "test_loss_epoch", "val_loss_step"),
    ),
    "learning_rate": ("learning_rate", "lr", "lr_adamw", "learning-rate"),
    "grad_norm": (
        "grad_norm",
        "gradient_norm",
        "gradient-norm",
        "gnorm",
        "grad_norm_total",
        "norm",
    ),
    "epoch": ("epoch", "epochs"),
    "seconds": ("seconds", "step_time", "time_per_step", "dt", "time"),
    "clock": ("wall_time", "timestamp", "_timestamp", "wall time", "relative time (wall)"),
    "skipped": ("skipped",),
    "chosen_logratio": (
        *("objective.chosen_logratio", "chosen_logratio", "logps/chosen", "policy_chosen_logps"),
        *("chosen_logps", "logp_chosen", "logps_chosen"),
    ),
    "rejected_logratio": (
        *("objective.rejected_logratio", "rejected_logratio", "logps/rejected", "rejected_logps"),
        *("policy_rejected_logps", "logp_rejected", "logps_rejected"),
    ),
    "chosen_reward": ("objective.chosen_reward", "rewards/chosen", "chosen_rewards"),
    "rejected_reward": ("objective.rejected_reward", "rewards/rejected", "rejected_rewards"),
    "margin": ("objective.margin", "margin", "rewards/margins", "reward_margin", "margins"),
    "kl": ("objective.kl", "kl", "objective/kl", "approx_kl", "policy/approxkl_avg", "mean_kl"),
    "reward": (
        *("objective.reward", "reward", "rewards", "reward_mean", "mean_reward", "proxy_reward"),
        *("objective/scores", "objective/rlhf_reward", "env/reward_mean", "rewards/mean"),
    ),
    "gold": ("objective.gold", "gold", "gold_reward", "true_reward", "eval_score", "gold_score"),
    "entropy": ("objective.entropy", "entropy", "policy/entropy_avg", "objective/entropy"),
    "zero_variance": (
        *("objective.zero_variance_groups", "frac_reward_zero_std", "zero_variance_groups"),
        *("frac_zero_std", "reward_zero_std_frac"),
    ),
    "length": (
        *("objective.length", "completion_length", "completions/mean_length", "response_length"),
        *("mean_length", "tokens/completion", "response_length/mean", "generation_length"),
    ),
    "clip_fraction": (
        *("objective.clip_fraction", "clip_fraction", "clip_ratio", "policy/clipfrac_avg"),
        *("clip_ratio/region_mean", "clipfrac", "actor/pg_clipfrac"),
    ),
    "unstopped": (
        *("objective.unstopped", "completions/clipped_ratio", "truncated_share", "unstopped"),
        *("response_length/clip_ratio",),
    ),
    "accuracy": ("objective.accuracy", "accuracy", "rewards/accuracies", "token_accuracy"),
}
STEPS = (
    *(
        "num_updates",
        "update",
        "step",
        "global_step",
        "iter",
        "iteration",
        "_step",
        "steps",
        "it",
        "n_steps",
    ),
    *("current_steps", "train_step", "num_steps", "valid_num_updates"),
)
_PREFIX = re.compile(r"^(train|training|metrics|trainer|loss|eval)[/.](?=.)")
_EVALUATED = re.compile(r"^(eval|evaluation|val|valid|validation|test|dev)[/._]")
DOUBLE = re.compile(r" \(column \d+\)$")  # a second column of a table by the same name
_WIDE = ("__min", "__max")  # what wandb writes beside each column of an export


@dataclass(frozen=True)
class Curve:
    """Columns over steps.

    steps      [n] rising; the file's own numbers, or 1..n where it has none
    columns    canonical name -> [n]; NaN where a row does not have it
    nonfinite  canonical name -> [n]: the row has it, and it is not finite
    restarts   steps at which the file goes back or begins again: resumes
    notes      what was cleaned, in words
    """

    steps: Floats
    columns: Mapping[str, Floats]
    nonfinite: Mapping[str, Flags] = field(default_factory=dict)
    restarts: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def points(self, name: str) -> tuple[Floats, Floats]:
        """(steps, values) of the finite points of a column; empty where there is none."""
        if name not in self.columns:
            return np.empty(0), np.empty(0)
        values = self.columns[name]
        good = np.isfinite(values)
        return self.steps[good], values[good]


def canonical(name: str) -> str:
    """The column of metrics.jsonl that a name of another tool means, or the name itself.

    >>> canonical("train/loss"), canonical("my run - eval/loss"), canonical("lr")
    ('loss', 'evaluation.loss', 'learning_rate')
    """
    plain = name.rsplit(" - ", 1)[-1].strip().lower()
    for known, spellings in SPELLINGS.items():
        if plain in spellings or plain.replace(" ", "_") in spellings:
            return known
    if _EVALUATED.match(plain):
        return "evaluation.loss" if _EVALUATED.sub("", plain) in ("loss", "nll") else name
    short = _PREFIX.sub("", plain)
    return canonical(short) if short != plain else name


def is_known(name: str) -> bool:
    """Whether a column by this name says something of a run: any other is not looked at.

    >>> is_known("run-7 - train/loss"), is_known("train/global_step"), is_known("gpu.0.power")
    (True, True, False)
    """
    name = DOUBLE.sub("", name)
    plain = name.rsplit(" - ", 1)[-1].strip().lower()
    steps = plain.removeprefix("train/").removeprefix("trainer/")
    return canonical(name) in SPELLINGS or steps in STEPS


def curve_of_columns(
    raw: Mapping[str, Sequence[Any] | NDArray[Any]],
    *,
    loss: str | None = None,
    where: str = "curve",
) -> Curve:
    """A curve from named columns of equal length.

    loss  the column that is the loss, where its name does not say so
    Raises RecipeError, which lists the columns, where no loss is found.
    """
    notes: list[str] = []
    numbers: dict[str, Floats] = {}
    bad: dict[str, Flags] = {}
    for name, values in raw.items():
        if name.lower().endswith(_WIDE):
            continue
        found = numbers_of(values)
        if found is not None:
            numbers[name], bad[name] = found
    columns, nonfinite = _named(numbers, bad, loss, where, notes)
    told = np.isfinite(columns["loss"]) | nonfinite["loss"]
    steps = _through_epochs(_steps(numbers, told), columns, notes)
    if "skipped" in columns and "update" in raw:  # lehr: what was passed over has no loss
        nonfinite["loss"] = nonfinite["loss"] | (columns["skipped"] > 0)
    _unhide(columns, nonfinite)
    order, restarts = _ordered(steps, columns, notes)
    return Curve(
        steps[order],
        {name: values[order] for name, values in columns.items()},
        # Rows that a later one replaces are gone by now, and with them what was not finite.
        {name: flags[order] for name, flags in nonfinite.items() if flags[order].any()},
        restarts,
        tuple(notes),
    )


def _unhide(columns: dict[str, Floats], nonfinite: dict[str, Flags]) -> None:
    """HF's Trainer shows 0.0 for a loss that is not finite, beside a gradient norm that is not."""
    if "grad_norm" in nonfinite and nonfinite["grad_norm"].any():
        hidden = nonfinite["grad_norm"] & (columns["loss"] == 0.0)
        columns["loss"] = np.where(hidden, np.nan, columns["loss"])
        nonfinite["loss"] = nonfinite["loss"] | hidden


def curve_of_rows(rows: Iterable[Any], *, loss: str | None = None, where: str = "curve") -> Curve:
    """A curve from rows (mappings of numbers), or from a plain list of losses."""
    listed = list(rows)
    if not listed:
        raise RecipeError(Problem(where, "at least one row"))
    if isinstance(listed[0], int | float) or listed[0] is None:
        return curve_of_columns({"loss": listed}, where=where)
    if not all(isinstance(row, Mapping) for row in listed):
        kinds = sorted({type(row).__name__ for row in listed})
        raise RecipeError(Problem(where, "rows of named numbers, or a list of losses", kinds))
    names = dict.fromkeys(name for row in _shapes(listed) for name in row)
    raw: dict[str, list[Any]] = {
        str(name): [row.get(name) for row in listed] for name in names if name != "nonfinite"
    }
    if "nonfinite" in names:  # lehr's strict JSON: null, and the names of what was not finite
        for index, row in enumerate(listed):
            for name in row.get("nonfinite") or ():
                if name in raw:
                    raw[name][index] = math.nan
    return curve_of_columns(raw, loss=loss, where=where)


def _shapes(rows: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """One row of each set of keys."""
    seen: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for row in rows:
        seen.setdefault(tuple(row), row)
    return seen.values()


def numbers_of(values: Sequence[Any] | NDArray[Any]) -> tuple[Floats, Flags] | None:
    """(values with NaN for what is absent, what is there and not finite); None: no numbers.

    Absent is None, an empty text or what a masked array masks.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub":
        made = np.ma.getdata(values).astype(np.float64)
        bad = ~np.isfinite(made)
        if not bad.any() and not np.ma.isMaskedArray(values):
            return made, bad
        bad &= ~np.ma.getmaskarray(values)
        made = np.where(np.ma.getmaskarray(values), np.nan, made)
        return np.where(bad, np.nan, made), bad
    try:
        made = np.array(values, dtype=np.float64)  # None becomes NaN
        if made.ndim != 1:
            return None
        bad = ~np.isfinite(made)
        if bad.any():
            bad &= np.array([one is not None for one in values])
        return np.where(np.isfinite(made), made, np.nan), bad
    except (TypeError, ValueError, OverflowError):
        pass
    made = np.full(len(values), np.nan)
    bad = np.zeros(len(values), dtype=bool)
    count = 0
    for index, value in enumerate(values):
        number = number_of(value)
        if number is None:
            continue
        count += 1
        bad[index] = not math.isfinite(number)
        made[index] = number if math.isfinite(number) else np.nan
    return (made, bad) if count else None


def number_of(value: Any) -> float | None:
    """A number, or text that is one; None for all else."""
    if isinstance(value, str):
        text = value.strip().strip("\"'").replace("_", "")
        if text.lower() in ("", "none", "null", "-", "n/a"):
            return None
        value = text
    if value is None or isinstance(value, bool | bytes | list | dict):
        return float(value) if isinstance(value, bool) else None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _named(
    numbers: Mapping[str, Floats],
    bad: Mapping[str, Flags],
    loss: str | None,
    where: str,
    notes: list[str],
) -> tuple[dict[str, Floats], dict[str, Flags]]:
    columns: dict[str, Floats] = {}
    nonfinite: dict[str, Flags] = {}
    if loss is not None and loss not in numbers:
        expected = f"the name of a column of numbers: one of {_listed(numbers)}"
        raise RecipeError(Problem(f"{where}: the loss", expected, loss))
    if loss is None:
        _ask_which_run(numbers, where)
    meant: dict[str, list[str]] = {}
    for name in numbers:
        if loss is not None and _run(name) and _run(loss) and _run(name) != _run(loss):
            continue  # of another run in the same table
        known = "loss" if name == loss else canonical(name)
        if loss is not None and known == "loss" and name != loss:
            continue
        meant.setdefault(known, []).append(name)
    for known, names in meant.items():
        name = _taken(known, names, numbers, notes)
        columns[known], nonfinite[known] = numbers[name], bad[name]
    if loss is None:
        _say_doubles(numbers, notes)
    if not _has(columns, nonfinite, "loss"):
        taken = _only_candidate(columns, nonfinite)
        if taken is None:
            expected = (
                "a column that is the loss; name it with --loss COLUMN (columns with numbers: "
                f"{_listed(numbers)})"
            )
            raise RecipeError(Problem(where, expected))
        if taken != "reward":
            notes.append(f"no column is called loss: {taken!r} was taken for it")
            columns["loss"], nonfinite["loss"] = columns.pop(taken), nonfinite.pop(taken)
        else:
            columns["loss"] = np.full(len(columns[taken]), np.nan)
            nonfinite["loss"] = np.zeros(len(columns[taken]), dtype=bool)
    return columns, nonfinite


def _taken(
    known: str, names: Sequence[str], numbers: Mapping[str, Floats], notes: list[str]
) -> str:
    """Of several columns that mean the same the one by the plainest name, if it is not sparse."""
    count = {name: int(np.isfinite(numbers[name]).sum()) for name in names}
    full = [name for name in names if 2 * count[name] >= max(count.values())]
    taken = min(full, key=_plainness)
    # `train_loss` of the last row of a HF log is the mean of the run, not a second curve.
    others = [name for name in names if name != taken and count[name] > 2]
    if others and known in ("loss", "evaluation.loss"):
        many = "two" if len(others) == 1 else str(len(others) + 1)
        why = "by its name" if len(full) > 1 else "it has more values"
        shown = ", ".join(repr(name) for name in others[:3])
        notes.append(f"{many} columns may be {known}: {taken!r} was taken, {why}; not {shown}")
    return taken


def _plainness(name: str) -> int:
    """Place of a name among the spellings of what it means; the plainest is the first."""
    plain = name.rsplit(" - ", 1)[-1].strip().lower().replace(" ", "_")
    short = _PREFIX.sub("", plain)
    spelled = SPELLINGS.get(canonical(name), ())
    return min((spelled.index(one) for one in (plain, short) if one in spelled), default=99)


def _say_doubles(numbers: Mapping[str, Floats], notes: list[str]) -> None:
    """What is said of columns that have the name of an earlier one (see `DOUBLE`)."""
    for name in numbers:
        first = DOUBLE.sub("", name)
        if first != name and first in numbers and canonical(first) in ("loss", "evaluation.loss"):
            notes.append(f"two columns are called {first!r}: the first was taken, not {name!r}")


def _run(name: str) -> str:
    """The run that a column belongs to, as wandb writes it before " - "; empty without one."""
    return name.rpartition(" - ")[0]


def _ask_which_run(numbers: Mapping[str, Floats], where: str) -> None:
    """Raise RecipeError where the losses of several runs stand in one table."""
    losses = [
        name
        for name, values in numbers.items()
        if canonical(name) == "loss" and _run(name) and np.isfinite(values).any()
    ]
    if len({_run(name) for name in losses}) > 1:
        shown = ", ".join(repr(name) for name in losses[:10])
        expected = f"the loss of one run; name it with --loss COLUMN (there are {shown})"
        raise RecipeError(Problem(where, expected))


def _has(columns: Mapping[str, Floats], bad: Mapping[str, Flags], name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any() or bad[name].any())


def _only_candidate(columns: Mapping[str, Floats], bad: Mapping[str, Flags]) -> str | None:
    """The one column that can be meant, where none is called loss."""
    if any(name in columns for name in ("reward", "kl", "margin")):
        return "reward"  # a run of reinforcement or preference learning needs no loss
    free = [
        name
        for name in columns
        if name not in SPELLINGS and name.lower() not in STEPS and _has(columns, bad, name)
    ]
    if "evaluation.loss" in columns and not free:
        return "evaluation.loss"
    return free[0] if len(free) == 1 else None


def _listed(numbers: Mapping[str, Floats]) -> str:
    shown = ", ".join(repr(name) for name in list(numbers)[:20])
    more = len(numbers) - 20
    return shown + (f" and {more} more" if more > 0 else "") if numbers else "none"


def _steps(numbers: Mapping[str, Floats], told: Flags) -> Floats:
    """Steps of the rows; counted where not every row with a loss (`told`) has one of its own.

    Rows of one file may name their steps differently (`iter 5: ...`, `step 5: val loss ...`), or
    a row has the step and one below it the loss.
    """
    plain = {name.rsplit(" - ", 1)[-1].strip().lower(): name for name in numbers}
    steps = np.full(len(told), np.nan)
    for wanted in STEPS:
        for prefix in ("", "train/", "trainer/"):
            name = plain.get(prefix + wanted)
            if name is not None:
                steps = np.where(np.isfinite(steps), steps, numbers[name])
                if np.isfinite(steps).all():
                    return steps
    there = np.isfinite(steps)
    before = np.maximum.accumulate(np.where(there, np.arange(len(told)), -1))
    if not there.any() or (before[told] < 0).any() or (np.diff(before[told]) == 0).any():
        return np.arange(1.0, len(told) + 1.0)
    return np.where(before >= 0, steps[np.maximum(before, 0)], steps[there][0])


def _through_epochs(steps: Floats, columns: Mapping[str, Floats], notes: list[str]) -> Floats:
    """Steps that begin again with every epoch, counted through; all others as they are."""
    back = np.flatnonzero(np.diff(steps) < 0)
    if "epoch" not in columns or not len(back):
        return steps
    epochs = columns["epoch"]
    rises = epochs[back + 1] > epochs[back]
    begins = steps[back + 1] <= 2.0 * abs(steps[0]) + 1.0
    if not (rises & begins).all() or (np.diff(epochs[np.isfinite(epochs)]) < 0).any():
        return steps
    notes.append(f"the steps begin again in each of {len(back) + 1} epochs: counted through")
    before, change = np.zeros(len(steps)), np.diff(steps)
    usual = float(np.median(change[change > 0])) if (change > 0).any() else 1.0
    before[back + 1] = usual - change[back]
    return steps + np.cumsum(before)


def _ordered(
    steps: Floats, columns: Mapping[str, Floats], notes: list[str]
) -> tuple[NDArray[np.int64], tuple[float, ...]]:
    """Indices of rows in rising steps, the last of equal ones; steps of restarts.

    Rows of one step that hold different columns (HF writes the evaluation apart) all stay.
    """
    gone_back = np.flatnonzero(np.diff(steps) < 0) + 1
    if len(steps) > 2 and len(gone_back) == len(steps) - 1:
        notes.append("the steps fall from row to row: read from the last row to the first")
        gone_back = gone_back[:0]
    restarts: list[float] = []
    keep = np.ones(len(steps), dtype=bool)
    for index in gone_back[:1000]:
        again = steps[index]
        if index + 1 < len(steps):
            restarts.append(float(again))
        keep[:index] &= steps[:index] < again
    if len(gone_back):
        often = "once" if len(gone_back) == 1 else f"{len(gone_back)} times"
        notes.append(f"the steps go back {often} (to {_few(restarts)}): the later rows count")
    order = np.flatnonzero(keep)
    order = order[np.argsort(steps[order], kind="stable")]
    loss = columns["loss"][order]
    same = np.zeros(len(order), dtype=bool)
    both = np.isfinite(loss[1:]) & np.isfinite(loss[:-1]) if len(order) > 1 else np.zeros(0, bool)
    same[:-1] = (np.diff(steps[order]) == 0) & both
    if same.any():
        notes.append(f"{int(same.sum())} steps stand twice: the last row of each counts")
        order = order[~same]
    if "clock" in columns:
        _say_pauses(columns["clock"][order], steps[order], notes)
    gaps = np.diff(steps[order])
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    wide = int((gaps > 20 * usual).sum()) if usual > 0 else 0
    if wide:
        gaps_seen = "a gap" if wide == 1 else f"{wide} gaps"
        notes.append(f"{gaps_seen} of more than 20 usual intervals: nothing is known of it")
    return order, tuple(restarts)


def _say_pauses(clock: Floats, steps: Floats, notes: list[str]) -> None:
    taken = np.diff(clock)
    good = taken[np.isfinite(taken)]
    if len(good) < 8:
        return
    usual = float(np.median(good))
    jumps = np.flatnonzero((taken > 50 * max(usual, 1e-9)) | (taken < 0))
    if len(jumps):
        places = _few([float(steps[index + 1]) for index in jumps])
        notes.append(f"the clock jumps at step {places}: the run may have been resumed there")


def _few(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:3])
    return shown + (", ..." if len(values) > 3 else "")
