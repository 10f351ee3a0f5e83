"""What is wrong with this curve: signs, ranked, with causes, the test that decides and a remedy.

>>> found = doctor([4.1, 3.2, float("nan"), float("nan")])
>>> found.findings[0].name, found.healthy
('nan_at_step', False)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lehr.diagnosis.doctor_curve import Curve, curve_of_rows
from lehr.diagnosis.doctor_guess import of_pairs
from lehr.diagnosis.doctor_look import Context, Look, Sign
from lehr.diagnosis.doctor_policy import POLICY_SIGNATURES
from lehr.diagnosis.doctor_signs import LOSS_SIGNATURES
from lehr.diagnosis.doctor_table import TABLE, Entry

PAIRS = {"margin", "chosen_reward", "rejected_reward", "chosen_logratio", "rejected_logratio"}

# A sign and what it explains: the other one is its consequence, not a second fault.
_RISES = ("late_creep", "falls_then_climbs", "growing_oscillation")
_JUMPS = ("spike_that_heals", "spike_that_stays")
EXPLAINS: dict[str, tuple[str, ...]] = {
    "nan_at_first_step": ("*",),
    "nan_at_step": ("*",),
    "scales_with_accumulation": ("start_above_chance", "eval_below_train", "eval_apart_from_start"),
    "flat_at_chance": (
        *("flat_at_unigram", "eval_apart_from_start", "rate_ran_out", "plateau_then_drop"),
        *("eval_below_train", *_JUMPS, *_RISES, "train_down_eval_up"),
    ),
    "flat_from_start": ("eval_apart_from_start", "eval_below_train", *_JUMPS, "rate_ran_out"),
    "flat_at_unigram": ("late_creep", "plateau_then_drop", "spike_that_heals", "eval_below_train"),
    "start_above_chance": ("plateau_then_drop", "too_low_too_soon", "eval_below_train"),
    "epoch_sawtooth": ("periodic_bumps", *_JUMPS, "flat_at_unigram", *_RISES, "eval_below_train"),
    "periodic_bumps": (*_JUMPS, "late_creep", "falls_then_climbs", "eval_below_train"),
    "jump_at_resume": (*_JUMPS, *_RISES, "flat_at_unigram", "eval_below_train"),
    "too_low_too_soon": ("eval_below_train", "spike_that_heals"),
    "eval_apart_from_start": ("train_down_eval_up", *_RISES),
    "train_down_eval_up": (*_RISES, "too_low_too_soon"),
    "plateau_then_drop": ("spike_that_heals", "eval_below_train"),
    "growing_oscillation": (
        *(*_JUMPS, "late_creep", "falls_then_climbs", "train_down_eval_up"),
        *("eval_below_train", "flat_at_unigram"),
    ),
    "falls_then_climbs": ("never_left_warmup", *_JUMPS, "eval_below_train"),
    "spike_that_stays": (
        "late_creep",
        "falls_then_climbs",
        "rate_ran_out",
        "eval_below_train",
        "spike_that_heals",
    ),
    "spike_that_heals": ("late_creep", "eval_below_train"),
    "rate_ran_out": ("late_creep", "eval_below_train"),
    "never_left_warmup": ("plateau_then_drop", "spike_that_heals", "eval_below_train"),
    "kl_runaway": ("both_fall", "chosen_collapses", *_JUMPS, *_RISES),
    "both_fall": ("flat_at_chance", "flat_from_start", *_RISES, *_JUMPS),
    "chosen_collapses": ("flat_at_chance", "flat_from_start", *_RISES, *_JUMPS),
    "reward_up_gold_down": ("length_drift", *_RISES),
    "zero_variance_groups": ("flat_from_start",),
}


@dataclass(frozen=True)
class Finding:
    """One thing that the curve shows.

    where          column and steps, in words; first, last are the steps
    seen           the numbers
    causes         the likely ones, the likeliest first
    decisive_test  the one that separates them
    fix            {"do": a sentence, "patch": keys of the stage in a recipe}
    also_possible  names that this curve cannot exclude
    """

    name: str
    title: str
    confidence: float
    where: str
    seen: str
    causes: tuple[str, ...]
    decisive_test: str
    fix: dict[str, Any]
    also_possible: tuple[str, ...]
    first: float
    last: float
    stage: str = ""

    def as_json(self) -> dict[str, Any]:
        """The object of `lehr doctor --json`."""
        return {
            "name": self.name,
            "title": self.title,
            "confidence": self.confidence,
            "where": self.where,
            "seen": self.seen,
            "causes": list(self.causes),
            "decisive_test": self.decisive_test,
            "fix": self.fix,
            "also_possible": list(self.also_possible),
        }


# Columns that tell more than the loss; docs/doctor.md: how many faults stay unseen without them.
TELLING = {
    "evaluation.loss": "a held-out loss",
    "grad_norm": "the gradient norm",
    "learning_rate": "the learning rate",
}
ENOUGH_POINTS = 12  # below that nothing found is no sign of health


@dataclass(frozen=True)
class Diagnosis:
    """Findings, the likeliest root first; `notes`: what the curve's file made necessary;
    `missing`: what the file does not have, in words, though it would tell more."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    points: int = 0
    missing: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing was found; of a curve too short to say anything, that says little."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "healthy": self.healthy,
            "notes": list(self.notes),
        }

    def _repr_markdown_(self) -> str:
        lines = [f"- {note}" for note in self.notes]
        for finding in self.findings:
            lines += [f"### {finding.title} ({finding.confidence:.0%})", finding.seen, ""]
            lines += [f"{n}. {cause}" for n, cause in enumerate(finding.causes, 1)]
            lines += ["", f"**Test:** {finding.decisive_test}", f"**Fix:** {finding.fix['do']}"]
        return "\n".join(lines or ["Nothing suspicious in this curve."])


def doctor(
    rows: Iterable[Any],
    *,
    vocabulary: int | None = None,
    unigram_entropy: float | None = None,
    accumulation: int | None = None,
    chance: float | None = None,
    loss: str | None = None,
) -> Diagnosis:
    """What is wrong with a curve: rows of numbers by name, or a list of losses.

    vocabulary       number of tokens: the loss of guessing is its logarithm
    unigram_entropy  of the targets, in nats
    accumulation     micro-batches of an update
    chance           loss of guessing, where it is not ln(vocabulary)
    loss             name of the column that is the loss
    Raises RecipeError for rows in which no loss is found; it lists the columns.
    """
    context = Context(vocabulary, chance, unigram_entropy, accumulation)
    return diagnose(curve_of_rows(rows, loss=loss), context)


def diagnose(curve: Curve, context: Context | None = None, stage: str = "") -> Diagnosis:
    """As `doctor`, for a curve that has been read."""
    context = context or Context()
    if context.guess is None and "margin" in curve.columns:
        context = Context(**{**vars(context), "chance": math.log(2.0)})
    look = Look(curve, context)
    with np.errstate(all="ignore"):  # numbers of 1e300: what overflows is no sign
        findings = tuple(_finding(sign, look, stage) for sign in ranked(look))
    notes = list(curve.notes)
    points = len(curve.points("loss")[1])
    if points < ENOUGH_POINTS and not findings:
        seen = "one point of the loss is" if points == 1 else f"{points} points of the loss are"
        notes.append(f"{seen} too few to say more: at least {ENOUGH_POINTS} are needed")
    if points >= ENOUGH_POINTS and of_pairs(look) and not PAIRS & set(curve.columns):
        notes.append(
            "the loss begins at ln 2, as one of pairs (DPO) does: with the rewards or "
            "log-probabilities of chosen and rejected answers more can be said"
        )
    missing = tuple(words for name, words in TELLING.items() if not len(curve.points(name)[1]))
    return Diagnosis(findings, tuple(notes), points, missing)


def ranked(look: Look) -> list[Sign]:
    """The signs of a curve without the consequences of others, roots first."""
    signs = [
        sign for signature in (*LOSS_SIGNATURES, *POLICY_SIGNATURES) if (sign := signature(look))
    ]
    order = list(TABLE)
    kept: list[Sign] = []
    seen: set[str] = set()
    roots = _climbs_before_nan(signs)
    signs = [one for one in signs if not roots or one.name in ("nan_at_step", *roots)]
    for sign in sorted(signs, key=lambda one: (order.index(one.name), -one.strength)):
        explained = {name for one in kept for name in EXPLAINS.get(one.name, ())}
        if sign.name not in explained | seen and "*" not in explained:
            kept.append(sign)
            seen.add(sign.name)
    if roots:  # what climbed until it was not finite any more
        return [*(one for one in signs if one.name in roots), *kept]
    return [one for number, one in enumerate(kept) if one.name not in _later(kept[number + 1 :])]


def _climbs_before_nan(signs: Sequence[Sign]) -> tuple[str, ...]:
    """The climb that ended in numbers that are not finite, if it was steep: the rate's."""
    nan = next((one for one in signs if one.name == "nan_at_step"), None)
    steep = [one for one in signs if one.name == "falls_then_climbs" and one.strength >= 2.0]
    return tuple(one.name for one in steep[:1] if nan is not None and one.first < nan.first)


def _later(signs: Sequence[Sign]) -> set[str]:
    """What signs further down the table explain."""
    return {name for one in signs for name in EXPLAINS.get(one.name, ())}


def confidence(strength: float, ceiling: float) -> float:
    """0.5 at the limit, towards the ceiling (what the bench showed) far above it.

    >>> confidence(1.0, 0.95), confidence(10.0, 0.95)
    (0.5, 0.9)
    """
    return (
        round(ceiling - (ceiling - 0.5) / max(strength, 1.0), 2)
        if strength < 10
        else round(ceiling - 0.05, 2)
    )


def _finding(sign: Sign, look: Look, stage: str) -> Finding:
    entry = TABLE[sign.name]
    where = f"{sign.column}, steps {sign.first:g} to {sign.last:g}"
    if sign.first == sign.last:
        where = f"{sign.column}, step {sign.first:g}"
    return Finding(
        name=sign.name,
        title=entry.title,
        confidence=confidence(sign.strength, entry.ceiling),
        where=f"{stage}: {where}" if stage else where,
        seen=sign.seen,
        causes=_causes(entry, look, sign),
        decisive_test=entry.test,
        fix={"do": entry.fix, "patch": _patch(entry, look)},
        also_possible=entry.also,
        first=sign.first,
        last=sign.last,
        stage=stage,
    )


def _causes(entry: Entry, look: Look, sign: Sign) -> tuple[str, ...]:
    if sign.name == "growing_oscillation" and sign.column == "grad_norm":  # a sum of gradients
        first = [one for one in entry.causes if "not cleared" in one]
        return (*first, *(one for one in entry.causes if one not in first))
    _, rates = look.rate
    if "flat" in entry.title and len(rates) and float(rates.max()) == 0.0:
        return ("the learning rate is 0 in every row", *entry.causes)
    return entry.causes


def _patch(entry: Entry, look: Look) -> dict[str, Any]:
    """The keys of a stage that would change, with numbers where the curve has them."""
    _, rates = look.rate
    peak = float(rates.max()) if len(rates) else 0.0
    patch: dict[str, Any] = {}
    for key, value in entry.patch.items():
        if key == "learning_rate":
            if peak > 0:
                patch[key] = float(f"{peak * value:.2g}")
        else:
            patch[key] = value
    return patch


def worst(findings: Sequence[Finding]) -> Finding | None:
    """The finding that a status line names."""
    return findings[0] if findings else None
