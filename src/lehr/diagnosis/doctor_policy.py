"""Signatures of preference and reinforcement learning: what its loss alone does not show."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lehr.diagnosis.doctor_features import Floats, level, noise
from lehr.diagnosis.doctor_look import FEWEST_POINTS, Look, Sign, Signature

POLICY_LIMITS: dict[str, float] = {
    "fall": 0.5,  # nats by which both log-probabilities fall
    "together": 0.6,  # share of the rejected answer's fall: less is what this loss usually does
    "collapse": 10.0,  # nats by which the chosen answer falls
    "runaway": 35.0,  # nats between policy and reference, of a sequence
    "kl": 10.0,  # end over the first third
    "reward": 0.25,  # share of the gold reward's rise that is lost again
    "entropy": 0.15,  # of its start
    "zero_variance": 0.5,  # share of groups
    "length": 0.5,  # relative change
    "clipped": 0.3,  # share of tokens
    "unstopped": 0.8,  # share of answers
}


def _ends(values: Floats) -> tuple[float, float]:
    """(level of the first tenth, level of the last tenth)."""
    return level(values, 0.0, 0.1), level(values, 0.9, 1.0)


def _sure(values: Floats, change: float) -> bool:
    """Whether a change between two tenths is more than the noise."""
    error = noise(values) * math.sqrt(2.0 / max(1.0, len(values) / 10))
    return abs(change) > 3.0 * error


def log_probabilities(look: Look) -> Sign | None:
    """Both answers become less likely; or the chosen one does while the margin grows."""
    _, chosen = look.curve.points("chosen_logratio")
    _, rejected = look.curve.points("rejected_logratio")
    column, scale = "chosen_logratio", 1.0
    if len(chosen) < FEWEST_POINTS:
        _, chosen = look.curve.points("chosen_reward")
        _, rejected = look.curve.points("rejected_reward")
        column, scale = "chosen_reward", 0.1  # the usual beta: a reward is beta times nats
    if len(chosen) < FEWEST_POINTS or len(rejected) < FEWEST_POINTS:
        return None
    first, last = _ends(chosen)
    down, other = last - first, _ends(rejected)[1] - _ends(rejected)[0]
    if not (down < 0 and _sure(chosen, down) and other < 0):
        return None
    seen = f"chosen {down / scale:+.3g} nats, rejected {other / scale:+.3g} nats"
    if -down >= POLICY_LIMITS["runaway"] * scale or -other >= POLICY_LIMITS["runaway"] * scale:
        return None  # see kl_runaway
    strength = -down / (POLICY_LIMITS["fall"] * scale)
    name = "both_fall"
    if -down >= POLICY_LIMITS["collapse"] * scale and other < 1.3 * down:
        name = "chosen_collapses"
    elif down / other < POLICY_LIMITS["together"]:
        return None
    return look.sign(name, strength, seen, column=column) if strength >= 1.0 else None


def kl_runaway(look: Look) -> Sign | None:
    """The policy leaves its reference without end."""
    _, values = look.curve.points("kl")
    if len(values) >= FEWEST_POINTS:
        early, end = level(values, 0.1, 0.35), level(values, 0.9, 1.0)
        growth = end / max(early, 0.1)
        seen = f"KL {early:.3g} early, {end:.3g} at the end"
        strength = min(growth / POLICY_LIMITS["kl"], end / 5.0)
        return look.sign("kl_runaway", strength, seen, column="kl") if strength >= 1.0 else None
    far, column = 0.0, "chosen_logratio"
    for name in ("chosen_logratio", "rejected_logratio"):
        _, values = look.curve.points(name)
        if len(values) >= FEWEST_POINTS:
            first, last = _ends(values)
            if abs(last - first) > far:
                far, column = abs(last - first), name
    seen = f"{column} moved by {far:.3g} nats from its start"
    strength = far / POLICY_LIMITS["runaway"]
    return look.sign("kl_runaway", strength, seen, column=column) if strength >= 1.0 else None


def reward_hacking(look: Look) -> Sign | None:
    """The reward goes up while what it stands for goes down."""
    _, reward = look.curve.points("reward")
    gold_steps, gold = look.curve.points("gold")
    if len(reward) < FEWEST_POINTS or len(gold) < 5:
        return None
    parts = np.array([level(gold, i / 10, (i + 1) / 10) for i in range(min(10, len(gold)))])
    top = int(np.argmax(parts))
    lost = float(parts[top] - parts[-1])
    span = max(float(parts[top] - parts[0]), 3.0 * noise(gold), 1e-9)
    at_top = level(reward, max(0.0, top / len(parts) - 0.05), min(1.0, top / len(parts) + 0.1))
    if level(reward, 0.9, 1.0) <= at_top or top == len(parts) - 1:
        return None
    seen = f"gold {parts[top]:.3g} at its best, {parts[-1]:.3g} at the end; the reward still rises"
    strength = lost / span / POLICY_LIMITS["reward"]
    first = gold_steps[min(len(gold_steps) - 1, top * len(gold_steps) // len(parts))]
    if strength < 1.0:
        return None
    return look.sign("reward_up_gold_down", strength, seen, first, column="gold")


def entropy_collapse(look: Look) -> Sign | None:
    """The policy becomes certain of everything."""
    _, values = look.curve.points("entropy")
    if len(values) < FEWEST_POINTS:
        return None
    first, last = _ends(values)
    strength = POLICY_LIMITS["entropy"] * first / max(last, 1e-3 * max(first, 1e-9))
    seen = f"entropy {first:.3g} at the start, {last:.3g} at the end"
    if first <= 0 or strength < 1.0:
        return None
    return look.sign("entropy_collapse", strength, seen, column="entropy")


def zero_variance_groups(look: Look) -> Sign | None:
    """Most groups have one reward for all answers: no gradient."""
    _, values = look.curve.points("zero_variance")
    if len(values) < FEWEST_POINTS:
        return None
    share = level(values, 0.5, 1.0)
    strength = share / POLICY_LIMITS["zero_variance"]
    seen = f"{share:.0%} of the groups have equal rewards"
    return (
        look.sign("zero_variance_groups", strength, seen, column="zero_variance")
        if strength >= 1
        else None
    )


def length_drift(look: Look) -> Sign | None:
    """Answers become much longer, or much shorter."""
    _, values = look.curve.points("length")
    if len(values) < FEWEST_POINTS:
        return None
    first, last = _ends(values)
    change = (last - first) / max(abs(first), 1e-9)
    strength = abs(math.log(max(last, 1e-9) / max(first, 1e-9))) / math.log1p(
        POLICY_LIMITS["length"]
    )
    seen = f"answers of {first:.3g} tokens at the start, {last:.3g} at the end ({change:+.0%})"
    if strength < 1.0 or not _sure(values, last - first):
        return None
    return look.sign("length_drift", strength, seen, column="length")


def clip_fraction_stuck(look: Look) -> Sign | None:
    """The ratio is clipped for a large share of tokens, update after update."""
    _, values = look.curve.points("clip_fraction")
    if len(values) < FEWEST_POINTS:
        return None
    share = level(values, 0.3, 1.0)
    strength = share / POLICY_LIMITS["clipped"]
    seen = f"{share:.0%} of the tokens are clipped"
    return (
        look.sign("clip_fraction_stuck", strength, seen, column="clip_fraction")
        if strength >= 1
        else None
    )


def never_stops(look: Look) -> Sign | None:
    """Answers run into the limit of length, or their end is not trained."""
    unended = look.context.unended
    if unended is not None and unended > 0.5:
        seen = f"the end of {unended:.0%} of the answers is not trained"
        return look.sign("never_stops", unended / 0.5 * 3.0, seen, column="supervised")
    _, values = look.curve.points("unstopped")
    if len(values) < 4:
        return None
    share = level(values, 0.6, 1.0)
    strength = share / POLICY_LIMITS["unstopped"]
    seen = f"{share:.0%} of the answers reach the limit of length"
    return look.sign("never_stops", strength, seen, column="unstopped") if strength >= 1.0 else None


POLICY_SIGNATURES: Sequence[Signature] = (
    *(log_probabilities, kl_runaway, reward_hacking, entropy_collapse),
    *(zero_variance_groups, length_drift, clip_fraction_stuck, never_stops),
)
