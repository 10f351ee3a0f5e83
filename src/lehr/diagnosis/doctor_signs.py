"""Signatures of a loss curve: each a pure function from features to a sign, or none.

Here those of its level, alone or beside an evaluation; `doctor_shapes` has those of its shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lehr.diagnosis.doctor_features import (
    Floats,
    at,
    level,
    noise,
)
from lehr.diagnosis.doctor_guess import MOST, choices_guessed, of_pairs, said, tokens_guessed
from lehr.diagnosis.doctor_look import (
    LIMITS,
    Look,
    Sign,
    Signature,
    sign_if,
)
from lehr.diagnosis.doctor_shapes import (
    climbs,
    epoch_sawtooth,
    jump_at_resume,
    never_left_warmup,
    periodic_bumps,
    plateau_then_drop,
    rate_ran_out,
    spike,
    uncleared,
)


def not_finite(look: Look) -> Sign | None:
    """NaN or infinity in the loss or its gradient: at the first step, or later."""
    flags = look.curve.nonfinite
    names = [one for one in ("loss", "grad_norm") if one in flags]
    if not names:
        return _hidden(look)
    name = min(names, key=lambda one: int(np.argmax(flags[one])))  # the one that was first
    places = np.flatnonzero(flags[name])
    first = int(places[0])
    finite_before = np.isfinite(look.curve.columns["loss"][:first]).sum()
    steps = look.curve.steps
    share = len(places) / max(1, len(flags[name]) - first)
    how = "from there on" if share > 0.9 and len(places) > 1 else f"in {len(places)} rows"
    title = "nan_at_first_step" if not finite_before else "nan_at_step"
    seen = f"{name} is not finite at step {steps[first]:g}, {how}"
    return look.sign(title, 50.0, seen, steps[first], steps[places[-1]], name)


def _hidden(look: Look) -> Sign | None:
    """A loss of exactly 0 to the end, at once: how trainers that filter NaN show it."""
    values, steps = look.loss.value, look.loss.steps
    if len(values) < 4 or values[-1] != 0.0 or not values.any():
        return None
    last = int(np.flatnonzero(values)[-1])
    before = float(np.median(values[max(0, last - 4) : last + 1]))
    if len(values) - 1 - last < 3 or before < 0.1 * look.start:
        return None  # it came down to 0 by learning
    seen = (
        f"the loss falls from {before:.3g} to exactly 0 at step {steps[last + 1]:g} and stays: "
        "so trainers show a number that is not finite"
    )
    return look.sign("nan_at_step", 20.0, seen, steps[last + 1], steps[-1])


# -- levels -------------------------------------------------------------------


def start_above_chance(look: Look) -> Sign | None:
    """The first loss is well above that of guessing."""
    guess, multiple = look.context.guess, look.context.accumulation
    if not len(look.loss) or scales(look) is not None:
        return None
    if guess is None:
        return _above_all(look)
    first = float(look.loss.value[0])
    excess = first / guess - 1.0
    if multiple and multiple > 1 and abs(first / guess / multiple - 1.0) < 0.1:
        return None
    seen = f"the first loss is {first:.3g}, guessing would give {guess:.3g}"
    return sign_if(look, "start_above_chance", excess / LIMITS["start_above"], seen, last_index=0)


def _above_all(look: Look) -> Sign | None:
    """It starts above what guessing among any vocabulary costs, and comes down below that."""
    first, highest = float(look.loss.value[0]), math.log(MOST)
    if not look.enough or level(look.loss.value, 0.75, 1.0) > 0.8 * highest:
        return None  # a sum, or no loss of tokens
    seen = (
        f"the first loss is {first:.3g}; guessing among a million tokens would cost "
        f"{highest:.1f}, and no vocabulary has more"
    )
    strength = min((first / highest - 1.0) / LIMITS["start_above"], 2.0)
    return sign_if(look, "start_above_chance", strength, seen, last_index=0)


def scales(look: Look) -> Sign | None:
    """The loss is a multiple of what it should be, all along: a sum where a mean belongs."""
    factor, against = None, ""
    guess, multiple = look.context.guess, look.context.accumulation
    steps, values = look.evaluation
    if guess and multiple and multiple > 1 and len(look.loss):
        factor = look.start / guess
        against = f"{factor:.2f} times the loss of guessing"
        off = abs(math.log(max(factor, 1e-9) / multiple))
        if len(values):
            ratio = float(np.median(at(look.loss.steps, look.loss.value, steps) / values))
            off = min(off, abs(math.log(max(ratio, 1e-9) / multiple)))
    elif len(values) >= 3 and look.enough:
        ratios = at(look.loss.steps, look.loss.value, steps) / np.maximum(values, 1e-9)
        factor = float(np.median(ratios))
        if not math.isfinite(factor):
            return None
        multiple = round(factor)
        if multiple < 2 or float(np.ptp(ratios)) > 0.3 * factor:
            return None
        off = abs(math.log(factor / multiple)) * 3.0
        against = f"{factor:.2f} times the evaluation's loss, at every evaluation"
    if factor is None or multiple is None:
        return None
    seen = f"the training loss is {against}"
    return sign_if(look, "scales_with_accumulation", LIMITS["accumulation"] / max(off, 1e-3), seen)


def flat(look: Look) -> Sign | None:
    """The loss does not move: at chance, or where it began."""
    if not look.enough:
        return None
    values, guess = look.loss.value, look.context.guess
    begin = level(values, 0.0, 0.15)
    moved = max(abs(level(values, a, a + 0.25) - begin) for a in (0.25, 0.5, 0.75))
    moved = max(0.0, moved - 1.5 * look.noise / math.sqrt(len(values) / 8))
    height = max(abs(begin), 1e-9)
    at_chance = guess is not None and abs(begin / guess - 1.0) < 0.04
    at_chance = at_chance or tokens_guessed(look, begin) is not None
    # Elsewhere a model has learnt before: a small gain may be all that there is to gain.
    limit = LIMITS["flat"] * height if at_chance else LIMITS["still"] * height
    _, evaluated = look.evaluation
    if len(evaluated) > 2:
        # The same rows each time: away from chance a small move is a move.
        factor = 0.7 if at_chance else LIMITS["still"] / LIMITS["still_eval"]
        moved = max(moved, factor * float(np.ptp(evaluated)))
    name = "flat_at_chance" if at_chance else "flat_from_start"
    if not moved < limit or (not at_chance and look.noise > 5.0 * limit and len(evaluated) < 3):
        return None
    seen = f"the loss stays at {begin:.3g} (it moved by {moved:.2g})"
    strength = min(limit / max(moved, 0.1 * limit), 10.0)
    few = choices_guessed(look, begin) is not None
    if few or (at_chance and guess is None):
        name, strength = "flat_at_chance", min(strength, 3.0 if few else 6.0)
        seen += f": {said(begin)}"
    return sign_if(look, name, strength, seen)


def flat_at_unigram(look: Look) -> Sign | None:
    """The loss falls to the entropy of the token frequencies and stays there."""
    entropy, guess = look.context.unigram_entropy, look.context.guess
    if guess is None and look.enough and tokens_guessed(look, look.start) is not None:
        guess = look.start
    if entropy is None and guess is not None and look.enough:
        return _shelf(look, guess)
    if entropy is None or guess is None or not look.enough or entropy > 0.97 * guess:
        return None
    if look.start < entropy + 0.5 * (guess - entropy):
        return None  # it did not come from guessing
    if rate_ran_out(look) is not None:
        return None  # it stays because nothing is trained any more
    values = look.loss.value
    middle, end = level(values, 0.4, 0.7), level(values, 0.7, 1.0)
    if end < (1.0 - 2.0 * LIMITS["unigram"]) * entropy:
        return None  # the training rows are learnt, whatever the evaluation says
    _, evaluated = look.evaluation
    if len(evaluated) >= 4:
        half = evaluated[len(evaluated) // 2 :]
        if _moves(evaluated, 0.004 * entropy):
            return None
        if float(np.median(half[-2:])) < (1.0 - 2.0 * LIMITS["unigram"]) * entropy:
            return None  # held-out rows are not that much easier than the corpus
        # Held-out rows may be harder or easier than the corpus; they show best that nothing moves.
        middle, last = float(half[0]), float(np.median(half[-2:]))
        middle, end = min(
            ((middle, last), (middle - last + end, end)), key=lambda pair: abs(pair[1] - entropy)
        )
    distance = max(abs(end - entropy), abs(middle - entropy) * 0.7, abs(end - middle))
    strength = LIMITS["unigram"] * entropy / max(distance, 1e-3 * entropy)
    seen = f"the loss stays at {end:.3g}; the token frequencies alone give {entropy:.3g}"
    return sign_if(look, "flat_at_unigram", strength, seen)


def _shelf(look: Look, guess: float) -> Sign | None:
    """Flat where the entropy of token frequencies usually lies, if it is not known itself."""
    values = look.loss.value
    if look.context.chance is not None or abs(look.start / guess - 1.0) > 0.1 or len(values) < 60:
        return None
    middle, end = level(values, 0.5, 0.75), level(values, 0.75, 1.0)
    low, high = LIMITS["shelf_low"] * guess, LIMITS["shelf_high"] * guess
    error = 1.25 * look.noise / math.sqrt(len(values) / 4)
    strength = LIMITS["still"] * end / max(abs(end - middle), 0.25 * LIMITS["still"] * end)
    if not low < end < high or error > LIMITS["still"] * end:
        return None
    seen = (
        f"the loss stays at {end:.3g}, {end / guess:.2f} of ln V: there the entropy of the token "
        "frequencies usually lies"
    )
    return sign_if(look, "flat_at_unigram", strength, seen)


def _moves(evaluated: Floats, least: float) -> bool:
    """Whether the last quarter still falls, steadily, or the end lies above the lowest value."""
    late = evaluated[-max(3, len(evaluated) // 4 + 1) :]
    spread = max(noise(evaluated[len(evaluated) // 3 :]), 1e-9)
    steady = float(np.mean(np.diff(late) < 0)) >= 0.75
    falls = steady and late[0] - late[-1] > max(0.75 * least, 3.0 * spread)
    risen = float(np.median(evaluated[-2:]) - evaluated.min()) > max(3.0 * least, 4.0 * spread)
    return bool(falls or risen)


SOON_UPDATES = 3_000  # from there on a low loss is less and less soon


def too_low_too_soon(look: Look) -> Sign | None:
    """Almost no loss within the first pass over the data, on held-out text too."""
    if not look.enough:
        return None
    end = level(look.loss.value, 0.85, 1.0)
    whole = look.context.unigram_entropy or look.context.guess or min(look.start, math.log(MOST))
    _, evaluated = look.evaluation
    _, epochs = look.curve.points("epoch")
    if len(evaluated):
        end = max(end, float(np.median(evaluated[-2:])))
    elif len(epochs) and epochs[-1] > 1.5:
        return None  # repeated data is learned by heart: no leak is needed
    if look.context.chance is not None or of_pairs(look):
        return None  # a preference loss may go to 0
    if look.start < 0.5 * whole and look.context.guess is not None:
        whole = look.start
    limit = LIMITS["too_low"]
    if look.context.unigram_entropy and whole > look.start * 0.5:
        # From guessing: the fewer updates, the less can have been learnt in honest ways.
        sooner = math.log10(LIMITS["soon_updates"] / max(float(look.curve.steps[-1]), 1.0))
        limit += LIMITS["soon"] * min(max(sooner, 0.0), 1.0)
    # Pretraining comes this low honestly, in its tens of thousands of updates.
    limit *= max(0.25, min(1.0, SOON_UPDATES / max(float(np.ptp(look.curve.steps)), 1.0)))
    seen = f"the loss ends at {end:.3g}, from {look.start:.3g}"
    return sign_if(look, "too_low_too_soon", limit * whole / max(end, 1e-6), seen)


# -- evaluation ---------------------------------------------------------------


def _beside(look: Look) -> tuple[Floats, Floats, Floats]:
    """(steps, local training loss, evaluation) at the evaluations."""
    steps, values = look.evaluation
    return steps, at(look.loss.steps, look.loss.value, steps, points=15), values


def train_down_eval_up(look: Look) -> Sign | None:
    """The evaluation rises again, or gains no more, while the training loss goes on falling."""
    steps, train, values = _beside(look)
    if len(values) < 4:
        return None
    opened = _gap_opens(look)
    if opened is not None:
        return opened
    low = int(np.argmin(values))
    if low == len(values) - 1:
        return None
    rise = float(np.median(values[-2:]) - values[low])
    fallen = float(train[low] - np.median(train[-2:]))
    spread = noise(values)
    least = max(LIMITS["eval_up"] * max(values[0] - values[low], 0.1 * values[0]), 3.0 * spread)
    down = max(fallen, 0.0) / max(0.02 * abs(float(train[low])), 1.5 * look.noise / 4.0, 1e-12)
    seen = (
        f"evaluation {values[low]:.3g} to {values[-1]:.3g}, "
        f"training {train[low]:.3g} to {train[-1]:.3g}"
    )
    strength = min(rise / max(least, 1e-9), down)
    return sign_if(
        look, "train_down_eval_up", strength, seen, steps[low], steps[-1], "evaluation.loss"
    )


def _gap_opens(look: Look) -> Sign | None:
    """Repeated data: the training loss leaves an evaluation that has stopped to gain."""
    steps, train, values = _beside(look)
    _, epochs = look.curve.points("epoch")
    if not len(epochs) or epochs[-1] < 3.0 or scales(look) is not None:
        return None
    half = len(values) // 2
    learnt = float(np.median(train[half - 1 : half + 1]) - np.median(train[-2:]))
    gained = float(np.median(values[half - 1 : half + 1]) - np.median(values[-2:]))
    gap = values - train
    opened = float(np.median(gap[-2:]) - np.median(gap[:2]))
    if gained > 0.25 * max(learnt, 0.5 * opened):
        return None
    least = max(LIMITS["gap_noise"] * look.noise, LIMITS["gap_share"] * look.fall)
    seen = (
        f"over {epochs[-1]:.0f} epochs the training loss leaves the evaluation by {opened:.3g} "
        f"(at last {train[-1]:.3g} and {values[-1]:.3g})"
    )
    strength = opened / least
    return sign_if(
        look, "train_down_eval_up", strength, seen, steps[0], steps[-1], "evaluation.loss"
    )


def eval_below_train(look: Look) -> Sign | None:
    """The evaluation stays below the training loss by more than sets differ."""
    _, train, values = _beside(look)
    if len(values) < 4 or scales(look) is not None:
        return None
    gaps = (train - values) / np.maximum(np.abs(train), 1e-9)
    late = gaps[len(gaps) // 3 :]
    gap = float(np.median(late))
    error = look.noise / max(abs(float(np.median(train))), 1e-9) / math.sqrt(5.0 * len(late))
    if float(np.mean(late > 0)) < 0.75:
        return None
    seen = f"evaluation {np.median(values[-2:]):.3g}, training {np.median(train[-2:]):.3g}"
    strength = gap / max(LIMITS["eval_below"], 3.0 * error)
    return sign_if(look, "eval_below_train", strength, seen, column="evaluation.loss")


def eval_apart_from_start(look: Look) -> Sign | None:
    """The evaluation hardly follows what the training loss gains, from the beginning on."""
    _, train, values = _beside(look)
    if len(values) < 3 or scales(look) is not None:
        return None
    if look.fall < LIMITS["apart_fall"] * look.noise:
        return None
    progress = look.start - train
    early = [
        1.0 - float(look.start - value) / gained
        for value, gained in zip(values, progress.tolist(), strict=True)
        if gained > 0.15 * look.fall
    ][: max(2, len(values) // 2)]
    if not early:
        return None
    lacks = min(early[:3])
    if values[-1] - train[-1] < 0.15 * look.fall:
        return None
    seen = f"training {train[-1]:.3g}, evaluation {values[-1]:.3g}"
    return sign_if(
        look, "eval_apart_from_start", lacks / LIMITS["eval_apart"], seen, column="evaluation.loss"
    )


# -- the learning rate's column -----------------------------------------------


LOSS_SIGNATURES: Sequence[Signature] = (
    *(not_finite, scales, start_above_chance, flat, flat_at_unigram, too_low_too_soon),
    *(train_down_eval_up, eval_below_train, eval_apart_from_start),
    *(never_left_warmup, rate_ran_out, plateau_then_drop),
    *(spike, jump_at_resume, epoch_sawtooth, periodic_bumps, climbs, uncleared),
)
