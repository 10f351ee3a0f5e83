"""Signatures in the shape of a loss curve: ends, drops, spikes, jumps, periods, climbs."""

from __future__ import annotations

import math

import numpy as np

from lehr.diagnosis.doctor_features import (
    correlation_at,
    level,
    levels,
    noise,
    regular,
    step_at,
)
from lehr.diagnosis.doctor_look import (
    FEWEST_POINTS,
    LIMITS,
    Look,
    Sign,
    sign_if,
)


def never_left_warmup(look: Look) -> Sign | None:
    """The learning rate still rises at the end."""
    _, rates = look.rate
    if len(rates) < FEWEST_POINTS or rates.max() <= 0:
        return None
    rising = float(np.mean(np.diff(rates) > 0))
    begin = float(rates[0]) / float(rates[-1]) if rates[-1] > 0 else 1.0
    if rising < 0.95 or begin > 0.5:
        return None
    seen = f"the rate rises from {rates[0]:.2g} to {rates[-1]:.2g}, its highest, at the last step"
    return look.sign("never_left_warmup", 5.0, seen, column="learning_rate")


def rate_ran_out(look: Look) -> Sign | None:
    """The learning rate is 0 for the rest of the run."""
    steps, rates = look.rate
    if len(rates) < FEWEST_POINTS or rates.max() <= 0:
        return None
    alive = np.flatnonzero(rates > 1e-3 * np.median(rates[rates > 0]))
    if not len(alive):  # rates so large that their median is infinite
        return None
    share = (len(rates) - 1 - int(alive[-1])) / len(rates)
    seen = f"the rate is 0 for the last {share:.0%} of the run"
    return sign_if(
        look, "rate_ran_out", share / LIMITS["tail"], seen, steps[alive[-1]], column="learning_rate"
    )


# -- shapes -------------------------------------------------------------------


def plateau_then_drop(look: Look) -> Sign | None:
    """Nothing for a while, then most of the fall at once."""
    if len(look.loss) < 2 * FEWEST_POINTS or look.fall < 6.0 * look.noise:
        return None
    values = look.loss.value
    smooth = levels(values, min(60, len(values) // 3))
    still = smooth > look.start - max(0.06 * look.fall, 0.8 * look.noise)
    length = int(np.argmin(still)) if not still.all() else len(still)
    if length >= len(smooth):
        return None
    later = smooth[min(len(smooth) - 1, length + max(2, len(smooth) // 8))]
    sudden = (look.start - later) / look.fall
    share = length / len(smooth)
    if sudden < 0.5:
        return None
    last = look.loss.steps[min(len(values) - 1, int(share * len(values)))]
    seen = (
        f"the loss stays at {look.start:.3g} for {share:.0%} of the run, then falls to {later:.3g}"
    )
    return sign_if(look, "plateau_then_drop", share / LIMITS["plateau"], seen, None, last)


def spike(look: Look) -> Sign | None:
    """A sudden rise that heals, or that leaves the run on a higher level."""
    if not look.spikes:
        return None
    # After several it is no single event; above its lowest level the loss rose before.
    stays = [
        one
        for number, one in enumerate(look.spikes)
        if one.end is None
        and len(look.loss) - one.start >= 6
        and number <= 2
        and one.base - look.lowest < 0.5 * one.lasting
    ]
    if stays and not _rate_rises(look, float(look.loss.steps[stays[0].start])):
        one = stays[0]
        share = one.lasting / max(one.height, 1e-9)
        seen = (
            f"the loss jumps from {one.base:.3g} by {one.height:.3g} and is {one.lasting:.3g} "
            "above that level at the end"
        )
        strength = min(share / LIMITS["stays"], one.height / look.least_spike)
        found = sign_if(look, "spike_that_stays", strength, seen, look.loss.steps[one.start])
        if found is not None:
            return found
    one = max(look.spikes, key=lambda each: each.height)
    last = None if one.end is None else look.loss.steps[min(one.end, len(look.loss) - 1)]
    more = f", and {len(look.spikes) - 1} more" if len(look.spikes) > 1 else ""
    seen = f"the loss jumps from {one.base:.3g} by {one.height:.3g} and comes back{more}"
    strength = one.height / look.least_spike
    return sign_if(look, "spike_that_heals", strength, seen, look.loss.steps[one.start], last)


def _rate_rises(look: Look, step: float) -> bool:
    """Whether the rate goes on rising after a step until the end of the run."""
    steps, rates = look.rate
    if len(rates) < FEWEST_POINTS:
        return False
    then = float(rates[min(len(rates) - 1, int(np.searchsorted(steps, step)))])
    late = float(rates[(3 * len(rates)) // 4])
    return float(rates[-1]) > 1.05 * max(late, then)


def jump_at_resume(look: Look) -> Sign | None:
    """The loss stands on another level right after a resume."""
    best: Sign | None = None
    for resume in (*look.context.resumes, *look.curve.restarts):
        index = int(np.searchsorted(look.loss.steps, resume))
        height, strength = 0.0, 0.0
        for width in (6, 12, 24):
            one, error = step_at(look.loss.value, index, width)
            trend, _ = step_at(look.loss.value, index - 20, 20)
            if one < 0:  # the loss falls anyway
                one = min(0.0, one - min(trend, 0.0))
            if abs(one) / error / LIMITS["resume"] > strength:
                height, strength = one, abs(one) / error / LIMITS["resume"]
        seen = f"the loss changes by {height:+.3g} at the resume after step {resume:g}"
        found = sign_if(look, "jump_at_resume", strength, seen, resume, resume)
        found = found or _evaluation_jumps(look, resume)
        if found is not None and (best is None or found.strength > best.strength):
            best = found
    return best


def _evaluation_jumps(look: Look, resume: float) -> Sign | None:
    """The first evaluation after a resume lies above the last one before it: far less noise."""
    steps, values = look.evaluation
    after = int(np.searchsorted(steps, resume))
    if after < 2 or after >= len(values) or len(values) < 6:
        return None
    moves = np.diff(values)
    rise = float(moves[after - 1])
    # An evaluation rises by chance too: this rise must stand out among those of the whole run.
    usual = max(float(np.delete(moves, after - 1).max()), 0.0)
    least = max(1.5 * usual, LIMITS["resume_eval"] * abs(float(values[after - 1])))
    seen = f"the evaluation rises by {rise:.3g} over the resume after step {resume:g}"
    return sign_if(
        look,
        "jump_at_resume",
        rise / max(least, 1e-9),
        seen,
        resume,
        resume,
        column="evaluation.loss",
    )


def epoch_sawtooth(look: Look) -> Sign | None:
    """The same rise and fall in every epoch."""
    _, epochs = look.curve.points("epoch")
    if not look.enough or len(epochs) < 20 or epochs[-1] - epochs[0] < 2.4:
        return None
    per_epoch = (len(look.loss) - 1) / (epochs[-1] - epochs[0])
    lag = round(per_epoch)
    if lag < 6:
        return None
    later = look.loss.value[min(lag // 2, len(look.loss) // 8) :]
    found, pairs = correlation_at(later, lag)
    if found * math.sqrt(max(pairs, 1)) < 4.0:
        return None
    seen = f"the loss of an epoch repeats that of the one before (correlation {found:.2f})"
    return sign_if(look, "epoch_sawtooth", found / LIMITS["sawtooth"], seen)


def periodic_bumps(look: Look) -> Sign | None:
    """Bumps at a fixed distance in steps that is no epoch; swings where each is higher."""
    heights = [one.height for one in look.spikes]
    growth = heights[-1] / heights[0] if len(heights) >= 3 else 0.0
    if growth > LIMITS["swings"] and float(np.mean(np.diff(heights) > 0)) > 0.6:
        seen = f"{len(heights)} swings, the last {growth:.1f} times the first"
        first = look.loss.steps[look.spikes[0].start]
        return sign_if(look, "growing_oscillation", growth / LIMITS["swings"], seen, first)
    # Regular ones may be lower than what a single spike must be: chance is not regular.
    starts = np.array([look.loss.steps[one.start] for one in look.bumps])
    if len(starts) < 5:
        return None
    period, share = regular(starts)
    seen = f"{len(starts)} bumps, one every {period:g} steps"
    return sign_if(look, "periodic_bumps", share / LIMITS["bumps"], seen, starts[0], starts[-1])


def _climb(look: Look) -> tuple[float, float, float, float, str]:
    """(share of the fall that is lost again, the rise, first step, its significance, column)."""
    values = look.loss.value
    parts = levels(values, min(20, len(values) // 4))
    low = int(np.argmin(parts))
    error = 1.25 * look.noise / math.sqrt(len(values) / len(parts))
    rise = float(np.median(parts[-2:]) - parts[low])
    share, sure = rise / look.fall, rise / max(4.0 * error, 1e-9)
    step = float(look.loss.steps[min(len(values) - 1, int((low + 0.5) / len(parts) * len(values)))])
    steps, evaluated = look.evaluation
    if len(evaluated) >= 5:
        bottom = int(np.argmin(evaluated))
        up = float(np.median(evaluated[-2:]) - evaluated[bottom])
        spread = max(noise(evaluated), 1e-9)
        by_eval = up / max(look.start - float(evaluated[bottom]), 1e-9)
        return by_eval, up, float(steps[bottom]), up / (3.0 * spread), "evaluation.loss"
    return share, rise, step, sure, "loss"


def _wavering(look: Look) -> float:
    """How much the smoothed second half goes up and down, over what it rises in all."""
    half = levels(look.loss.value[len(look.loss) // 2 :], 16)
    error = 1.25 * look.noise / math.sqrt(max(1.0, len(look.loss) / 32))
    moves = np.diff(half)
    real = np.abs(moves)[np.abs(moves) > 2.5 * error].sum()
    return float(real / max(half.max() - half[0], 4.0 * error, 1e-9))


def _gradient_growth(look: Look) -> float:
    """How many times the gradient norm is its first value at the end; 0 where it is unknown."""
    _, norms = look.curve.points("grad_norm")
    if len(norms) < FEWEST_POINTS:
        return 0.0
    return level(norms, 0.75, 1.0) / max(float(norms[0]), 1e-12)


def _smooth_gradients(look: Look, growth: float) -> Sign | None:
    """A growing norm without the noise of a batch: each gradient is the sum of all before it.

    The one shape that is there where the optimizer divides by the norm and the loss hides it.
    """
    _, norms = look.curve.points("grad_norm")
    if len(norms) < 4 * FEWEST_POINTS or growth < LIMITS["summed"]:
        return None
    rough = noise(np.log(np.maximum(norms[len(norms) // 2 :], 1e-12)))
    seen = (
        f"the gradient norm grows to {growth:.0f} times its first value and differs by only "
        f"{rough:.1%} from one batch to the next"
    )
    strength = LIMITS["batch_noise"] / max(rough, 0.1 * LIMITS["batch_noise"])
    return sign_if(look, "growing_oscillation", strength, seen, column="grad_norm")


def uncleared(look: Look) -> Sign | None:
    """The gradient norm grows and grows: smoothly, or while the loss leaves its lowest level."""
    if len(look.loss) < 2 * FEWEST_POINTS:
        return None
    growth = _gradient_growth(look)
    smooth = _smooth_gradients(look, growth)
    if smooth is not None:
        return smooth
    parts = levels(look.loss.value, 12)
    low = int(np.argmin(parts[:-1]))
    hump = float(parts[low:].max() - parts[low]) / look.fall
    strength = min(growth / LIMITS["uncleared"], hump / LIMITS["creep"])
    seen = (
        f"the gradient norm grows to {growth:.0f} times its first value, and the loss rises by "
        f"{hump:.0%} of its fall"
    )
    return sign_if(look, "growing_oscillation", strength, seen)


def climbs(look: Look) -> Sign | None:
    """The loss rises again: at once, as a slow creep, as a climb, or in growing swings."""
    if len(look.loss) < 2 * FEWEST_POINTS:
        return None
    share, rise, first, sure, column = _climb(look)
    if sure < 1.0 or share < LIMITS["creep"] or rise < LIMITS["least_rise"] * abs(look.lowest):
        return None
    values = look.loss.value
    third = len(values) // 3
    swings = noise(values[-third:]) / max(noise(values[third // 2 : third // 2 + third]), 1e-9)
    swings = max(swings, LIMITS["swings"] * _wavering(look) / 2.0)
    seen = f"the loss loses {share:.0%} of its fall again, from step {first:g} on"
    jump, where = _sudden(look, first)
    if jump > 0.6 * rise and not _rate_rises(look, where):
        seen = f"the loss jumps by {jump:.3g} at step {where:g} and stays there"
        return sign_if(look, "spike_that_stays", jump / (0.6 * rise), seen, where)
    then, now = _rates(look, first)
    raised = now > 1.5 * then
    if raised:
        seen += f"; the rate rises from {then:.2g} to {now:.2g} meanwhile"
    # Where the rate falls meanwhile it is not what drives the loss up.
    lowered = 0.0 < now < 0.5 * then and share < 2.0 * LIMITS["climb"]
    if (share < LIMITS["climb"] or lowered) and not raised:
        strength = min(share / LIMITS["creep"], sure)
        return sign_if(look, "late_creep", strength, seen, first, column=column)
    if swings >= LIMITS["swings"] and not raised:
        seen += f", and its swings grow {swings:.1f} times"
        return sign_if(look, "growing_oscillation", swings / LIMITS["swings"], seen, first)
    strength = max(share / LIMITS["climb"], 1.0) if raised else share / LIMITS["climb"]
    return sign_if(look, "falls_then_climbs", strength, seen, first, column=column)


def _rates(look: Look, step: float) -> tuple[float, float]:
    """(learning rate at a step, at the end); zeros where it is not known."""
    steps, rates = look.rate
    if len(rates) < FEWEST_POINTS:
        return 0.0, 0.0
    return float(rates[min(len(rates) - 1, int(np.searchsorted(steps, step)))]), float(rates[-1])


def _sudden(look: Look, first: float) -> tuple[float, float]:
    """(height, step) of the largest rise within a few points that stands out of the noise.

    first  step from which the loss climbs: what was sudden long before is another matter
    """
    steps, evaluated = look.evaluation
    if len(evaluated) >= 5:
        moves = np.where(steps[1:] > first, np.diff(evaluated), 0.0)
        place = int(np.argmax(moves))
        risen = float(np.median(evaluated[-2:]) - evaluated.min())
        if moves[place] > 0.75 * max(risen, 1e-9) and len(evaluated) - place > 2:
            return float(moves[place]), float(steps[place])
    values, width = look.loss.value, 8
    if len(values) < 4 * width:
        return 0.0, 0.0
    means = np.convolve(values, np.full(width, 1.0 / width), mode="valid")
    rises = means[width + 2 :] - means[: -width - 2]  # two points between both stretches
    begin = int(np.searchsorted(look.loss.steps, first)) - 3 * width
    rises = rises[max(begin, 0) :]
    if not len(rises):
        return 0.0, 0.0
    place = int(np.argmax(rises))
    height = float(rises[place])
    if height < 6.0 * look.noise * math.sqrt(2.0 / width):
        return 0.0, 0.0
    return height, float(look.loss.steps[max(begin, 0) + place + width])
