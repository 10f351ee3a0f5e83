"""The decisive tests that need a model, a batch and seconds: one small function each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from lehr.data.shapes import Pack
from lehr.diagnosis.decisive import (
    CANNOT_TELL,
    CONFIRMS,
    WITHDRAWS,
    Answer,
    Desk,
    Test,
    backward,
    log_probabilities,
    mean_loss,
    optimizer_of,
    peak_rate,
    step,
)
from lehr.training import gradients
from lehr.training.robust import median
from lehr.training.state import copied, put_back

OVERFIT_STEPS, OVERFIT_FALL = 30, 0.05  # share of the first loss
BRANCH, RAMP, LAST = 24, 6, 6  # updates of a branch, of its warm-up, that are judged
MOVED = 1e-4  # nats: a log-probability that changed; rounding in bf16 stays below on equal shapes
SAME_LOSS = {"fp32": 1e-4}  # relative difference between two cuts
OTHERS_SAME_LOSS = 2e-2
MODE_GAP = 0.02  # of the loss
CHANCE_ABOVE, CHANCE_BELOW = 0.5, 0.1  # nats


def overfit(desk: Desk) -> Answer:
    """One batch, over and over: a model that can learn anything learns this."""
    base = Answer(
        "overfit", "nothing is learnt: frozen, cut off, or a rate far too small",
        f"one batch, {OVERFIT_STEPS} updates at the stage's highest rate",
        f"its loss falls by {OVERFIT_FALL:.0%} or more", "", CANNOT_TELL,
    )  # fmt: skip
    rate = peak_rate(desk)
    first, last, moved = _repeat(desk, rate)
    seen = f"{first:.3f} to {last:.3f}; the weights moved by {moved:.3g} of their norm"
    if not math.isfinite(last) or last > 1.5 * first:
        return replace(base, seen=f"{seen}: it blows up, another fault (rate_halved)")
    if last <= first * (1 - OVERFIT_FALL):
        return replace(base, seen=seen, verdict=WITHDRAWS)
    if moved == 0.0:
        why = "the rate is 0" if rate == 0 else "no gradient arrives, or the optimizer has others"
        return replace(base, seen=f"{seen}: {why}", verdict=CONFIRMS)
    _, larger, _ = _repeat(desk, 10 * rate)
    if math.isfinite(larger) and larger <= first * (1 - OVERFIT_FALL):
        return replace(base, seen=f"{seen}; at ten times the rate {larger:.3f}", verdict=CONFIRMS)
    return replace(base, seen=f"{seen}, also at ten times the rate: labels?", verdict=CONFIRMS)


def _repeat(desk: Desk, rate: float) -> tuple[float, float, float]:
    """(first loss, last loss, relative change of the weights) of one batch repeated."""
    begin = copied(desk.trained)
    optimizer = optimizer_of(desk)
    losses = [
        step(desk, optimizer, desk.updates[0], rate, number) for number in range(OVERFIT_STEPS)
    ]
    now = desk.trained
    change = math.sqrt(
        sum(float((now[n].detach().double() - begin[n]).square().sum()) for n in begin)
    )
    norm = math.sqrt(sum(float(one.double().square().sum()) for one in begin.values()))
    put_back(now, begin, "weights")
    return losses[0], losses[-1], change / max(norm, 1e-30)


def future_tokens(desk: Desk) -> Answer:
    """Change the end of each sequence: what is predicted before it must not move."""
    base = Answer(
        "future_tokens", "the target can be seen: mask or shift",
        "every token after the middle pair of a sequence is changed",
        "no earlier log-probability moves", "", CANNOT_TELL,
    )  # fmt: skip
    pack = desk.updates[0][0]
    first_changed, changed = _second_halves(desk, pack)
    early = pack.predict_from < first_changed[pack.predict_from]
    if not bool(early.any()):
        return replace(base, seen="no pair lies before another token")
    moved = (log_probabilities(desk, pack) - log_probabilities(desk, changed)).abs()
    worst = float(moved[early].max())
    itself = float((pack.ids[pack.predict_from] == pack.targets).double().mean())
    seen = f"{int(early.sum())} log-probabilities moved by at most {worst:.2g} nats"
    if itself > 0.5:
        seen += f"; {itself:.0%} of the targets are the very token they are predicted from"
        return replace(base, seen=seen, verdict=CONFIRMS)
    return replace(base, seen=seen, verdict=CONFIRMS if worst > MOVED else WITHDRAWS)


def _second_halves(desk: Desk, pack: Pack) -> tuple[Tensor, Pack]:
    """(by position: first changed position of its segment, the changed pack).

    What is predicted from a position before it sees none of the change.

    A segment that others continue stays: what is after it in the row is not after it in time.
    """
    first = torch.full_like(pack.ids, 1 << 60)
    ids = pack.ids.clone()
    segments = pack.segments
    prefixes = set(segments.prefix.tolist())
    rows = zip(segments.start.tolist(), segments.length.tolist(), strict=True)
    for number, (start, length) in enumerate(rows):
        if number in prefixes:
            continue
        inside = pack.predict_from[
            (pack.predict_from >= start) & (pack.predict_from < start + length)
        ]
        if not len(inside):
            continue
        middle = int(inside[len(inside) // 2]) + 1
        first[start : start + length] = middle
        ids[middle : start + length] = _other(ids[middle : start + length], desk)
    return first, replace(pack, ids=ids)


def _other(ids: Tensor, desk: Desk) -> Tensor:
    return (ids + 7) % desk.model.vocabulary_size


def shuffled_inputs(desk: Desk) -> Answer:
    """Change each pair's own token, then only the token before it: both must be felt."""
    base = Answer(
        "shuffled_inputs", "inputs do not reach the output, or labels belong to other rows",
        "other tokens at, and before, each predicting position",
        "log-probabilities move; each target is the next token", "", CANNOT_TELL,
    )  # fmt: skip
    pack = desk.updates[0][0]
    before = log_probabilities(desk, pack)
    all_changed = replace(pack, ids=_other(pack.ids, desk))
    own = float((log_probabilities(desk, all_changed) - before).abs().mean())
    starts = torch.zeros_like(pack.ids, dtype=torch.bool)
    starts[pack.segments.start] = True
    # Every third position keeps its token, and its two predecessors change.
    kept = torch.zeros_like(starts)
    kept[2::3] = True
    changed = replace(pack, ids=torch.where(kept, pack.ids, _other(pack.ids, desk)))
    inside = kept[pack.predict_from] & ~starts[pack.predict_from]
    if not bool(inside.any()):
        return replace(base, seen="no predicting position has a token before it")
    past = float((log_probabilities(desk, changed) - before).abs()[inside].mean())
    following = (pack.predict_from + 1).clamp(max=pack.tokens - 1)
    known = ~starts[following] & (following > pack.predict_from)
    wrong = float((pack.ids[following] != pack.targets)[known].double().mean())
    seen = f"own token: {own:.2g} nats, tokens before it: {past:.2g} nats"
    if wrong > 0.0:
        seen += f"; {wrong:.0%} of the targets are not the next token"
    bad = own <= MOVED or past <= MOVED or wrong > 0.0
    return replace(base, seen=seen, verdict=CONFIRMS if bad else WITHDRAWS)


def accumulation(desk: Desk) -> Answer:
    """One batch whole and in four micro-batches: loss and gradient are those of one update."""
    base = Answer(
        "accumulation", "the loss scales with the number of micro-batches",
        "one batch as 1 and as 4 micro-batches",
        "the same loss and gradient", "", CANNOT_TELL,
    )  # fmt: skip
    packs = list(islice(desk.examples, 8))
    if len(packs) < 4:
        return replace(base, seen="fewer than four examples")
    desk.model.eval()  # dropout depends on the cut
    found = []
    for micro_batch in (len(packs), math.ceil(len(packs) / 4)):
        done = backward(desk, packs, ("test",), micro_batch)
        found.append((done.loss, gradients.measure(desk.trained).norm))
        gradients.clear(desk.trained)
    (loss, norm), (cut_loss, cut_norm) = found
    apart = abs(cut_loss - loss) / max(abs(loss), 1e-12)
    steeper = abs(cut_norm - norm) / max(norm, 1e-12)
    seen = f"loss {loss:.4f} and {cut_loss:.4f}, gradient norm {norm:.4g} and {cut_norm:.4g}"
    if not math.isfinite(loss) or not math.isfinite(norm):
        return replace(base, seen=f"{seen}: not finite")
    allowed = SAME_LOSS.get(desk.settings.precision, OTHERS_SAME_LOSS)
    bad = apart > allowed or steeper > 10 * allowed or not math.isfinite(cut_loss)
    return replace(base, seen=seen, verdict=CONFIRMS if bad else WITHDRAWS)


def chance(desk: Desk) -> Answer:
    """The first loss against that of guessing."""
    guess = f"{desk.chance:.3f}"
    if desk.pairs:
        expected = f"ln 2 = {guess}: policy and reference are one"
    elif desk.untrained:
        expected = f"near ln V = {guess}"
    else:
        expected = f"clearly below ln V = {guess}"
    base = Answer(
        "chance", "initial weights, labels or tokens that do not fit the model",
        "the loss of the first update before any training", expected, "", CANNOT_TELL,
    )  # fmt: skip
    desk.model.eval()
    loss = mean_loss(desk, desk.updates[0])
    seen = f"{loss:.3f}"
    if not math.isfinite(loss):
        bad = True
    elif desk.pairs:
        bad = abs(loss - desk.chance) > 0.01
    elif desk.untrained:
        bad = abs(loss - desk.chance) > CHANCE_ABOVE
    else:
        bad = loss > desk.chance - CHANCE_BELOW
    return replace(base, seen=seen, verdict=CONFIRMS if bad else WITHDRAWS)


def update_norm(desk: Desk) -> Answer:
    """Two updates: every group of the optimizer moves."""
    base = Answer(
        "update_norm", "a group of weights stands still",
        "two updates at the stage's highest rate",
        "every group of the optimizer moves", "", CANNOT_TELL,
    )  # fmt: skip
    begin, optimizer, rate = copied(desk.trained), optimizer_of(desk), peak_rate(desk)
    for number in range(2):
        step(desk, optimizer, desk.updates[0], rate, number)
    now = desk.trained
    sizes = []
    for group in optimizer.param_groups:
        names = group["names"]
        sizes.append(
            math.sqrt(sum(float((now[n].detach() - begin[n]).square().sum()) for n in names))
        )
    still = [
        group["names"][0]
        for group, size in zip(optimizer.param_groups, sizes, strict=True)
        if not size
    ]
    seen = f"norms {', '.join(f'{size:.2g}' for size in sizes)}"
    if still:
        seen += f"; the group of {still[0]} stands still"
    return replace(base, seen=seen, verdict=CONFIRMS if still else WITHDRAWS)


def trained_list(desk: Desk) -> Answer:
    """What is trained, what the optimizer holds, what gets a gradient."""
    base = Answer(
        "trained_list", "weights are frozen, or get no gradient",
        "two updates' gradients, tensor by tensor",
        "every trained tensor gets a gradient", "", CANNOT_TELL,
    )  # fmt: skip
    trained, optimizer = desk.trained, optimizer_of(desk)
    held = {name for group in optimizer.param_groups for name in group["names"]}
    reached: set[str] = set()
    for number in range(2):  # an adapter's second matrix is zero at first: so is A's gradient
        backward(desk, desk.updates[0], ("test", number))
        reached |= {
            name
            for name, one in trained.items()
            if one.grad is not None and float(one.grad.abs().max()) > 0
        }
        set_to = peak_rate(desk) or 1e-3
        for group in optimizer.param_groups:
            group["lr"] = set_to
        optimizer.step()
        gradients.clear(trained)
    missing = sorted((set(trained) - reached) | (set(trained) ^ held))
    seen = f"{len(trained)} tensors of {sum(one.numel() for one in trained.values()):,} numbers"
    seen += f", {len(reached)} with a gradient"
    if missing:
        seen += f"; without: {', '.join(missing[:2])}"
    return replace(base, seen=seen, verdict=CONFIRMS if missing else WITHDRAWS)


def eval_mode(desk: Desk) -> Answer:
    """After a few updates: the same packs in train mode and in evaluation mode."""
    base = Answer(
        "eval_mode", "evaluation computes with something else than training: dropout, statistics",
        f"the same packs in both modes, after {BRANCH // 2} updates",
        f"losses within {MODE_GAP:.0%}", "", CANNOT_TELL,
    )  # fmt: skip
    optimizer, rate = optimizer_of(desk), peak_rate(desk)
    for number in range(BRANCH // 2):
        step(desk, optimizer, desk.updates[number % len(desk.updates)], rate, number)
    packs = list(desk.heldout) or list(desk.updates[0])
    desk.model.train()
    train = mean_loss(desk, packs)
    desk.model.eval()
    evaluated = mean_loss(desk, packs)
    if not math.isfinite(train) or not math.isfinite(evaluated):
        return replace(base, seen=f"{train:.3f} and {evaluated:.3f}: not finite")
    kind = "held-out" if desk.heldout else "training"
    seen = f"{kind} rows: {train:.4f} in train mode, {evaluated:.4f} in evaluation mode"
    apart = abs(train - evaluated) > MODE_GAP * max(abs(evaluated), 1e-6)
    return replace(base, seen=seen, verdict=CONFIRMS if apart else WITHDRAWS)


def rate_halved(desk: Desk) -> Answer:
    """The first updates at the stage's highest rate and at half of it."""
    base = Answer(
        "rate_halved", "the learning rate is too high",
        f"{BRANCH} updates at the highest rate ({RAMP} of warm-up), and at half of it",
        "the loss falls at the full rate", "", CANNOT_TELL,
    )  # fmt: skip
    rate = peak_rate(desk)
    begin = median([mean_loss(desk, packs) for packs in desk.updates])
    seen, found = judged(begin, _branch(desk, rate), _branch(desk, rate / 2))
    return replace(base, seen=seen, verdict=found)


def _branch(desk: Desk, rate: float) -> list[float]:
    """Losses of the last updates of a branch; the weights are put back."""
    begin, optimizer = copied(desk.trained), optimizer_of(desk)
    losses: list[float] = []
    for number in range(BRANCH):
        packs = desk.updates[number % len(desk.updates)]
        now = rate * min(1.0, (number + 1) / RAMP)
        losses.append(step(desk, optimizer, packs, now, number))
        if not math.isfinite(losses[-1]):
            break
    put_back(desk.trained, begin, "weights")
    return losses[-LAST:]


def judged(begin: float, full: Sequence[float], half: Sequence[float]) -> tuple[str, str]:
    """(what was seen, verdict) of two branches' last losses.

    >>> judged(5.0, [6.0, 6.2, 6.1], [4.0, 4.1, 4.2])[1]
    'confirms'
    >>> judged(5.0, [4.0, 4.2, 4.1], [4.4, 4.5, 4.5])[1]
    'withdraws'
    """
    now, lower = level(full), level(half)
    seen = f"{begin:.3f} at first; {now:.3f} at the full rate, {lower:.3f} at half"
    if now < begin * (1 - 1e-3) and now < lower * 1.05:
        return seen, WITHDRAWS
    if lower < now:
        return seen, CONFIRMS
    return f"{seen}: half the rate is no better", CANNOT_TELL


def level(losses: Sequence[float]) -> float:
    """The middle loss; infinite where one is not finite, or there is none."""
    whole = bool(losses) and all(math.isfinite(one) for one in losses)
    return median(losses) if whole else math.inf


TESTS: Mapping[str, Test] = {
    "trained_list": trained_list,
    "update_norm": update_norm,
    "chance": chance,
    "overfit": overfit,
    "shuffled_inputs": shuffled_inputs,
    "future_tokens": future_tokens,
    "accumulation": accumulation,
    "eval_mode": eval_mode,
    "rate_halved": rate_halved,
}
# What else is asked where a finding names the first: the same fault from another side.
BESIDE: Mapping[str, tuple[str, ...]] = {"overfit": ("update_norm", "trained_list")}
