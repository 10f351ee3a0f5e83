"""Real tiny trainings with a fault put in on purpose: the curves that the doctor is judged on.

A group of runs of one setup trains at once: every tensor has a leading axis of runs, so that the
losses of a group are independent and the overhead of small operations is paid once. Runs of a
group differ in weights, data order, learning rate and the place and size of the fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.doctor_models import (
    CONTEXT,
    HELDOUT_ROWS,
    VOCABULARY,
    Setup,
    Weights,
    corpus,
    unigram_entropy,
)
from benchmarks.doctor_optimizers import RATES, Optimizer


@dataclass
class Draws:
    """What differs between the runs of a group, each [runs]."""

    rate: Tensor
    place: np.ndarray  # update at which a fault begins
    size: np.ndarray  # of the fault, 0..1


FAULTS = (
    *("lr_zero", "frozen", "shuffled_labels", "blind_inputs", "init_large"),
    *("nan_at_k", "nan_first", "unshifted_labels", "no_causal_mask", "dropout", "tiny_data"),
    *("no_reshuffle", "no_zero_grad", "lr_ramp", "spike_heals", "spike_stays"),
    *("periodic", "bad_resume", "accumulation", "late_creep", "endless_warmup", "zero_tail"),
    *("dead_start", "stale_eval", "lagging_mean", "dpo_displacement", "dpo_runaway"),
)


def shape_of_rate(setup: Setup, update: int) -> float:
    """Share of the peak rate at an update."""
    total, warmup = setup.updates, setup.warmup
    if setup.fault == "endless_warmup":
        return (update + 1) / (1.5 * total)
    if update < warmup:
        return (update + 1) / warmup
    done = (update - warmup) / max(1, total - warmup)
    if setup.schedule == "cosine":
        return 0.55 + 0.45 * math.cos(math.pi * done)
    if setup.schedule == "linear":
        return 1.0 - 0.95 * done
    if setup.schedule == "wsd":
        return 1.0 if done < 0.8 else max(0.02, (1.0 - done) / 0.2)
    return 1.0


# Share of a weight that decays in an update at the usual rate, whatever the optimizer's rate is.
DECAY_PER_UPDATE = 3e-4
# Adapters and preferences: share of the usual rate at which a stage trains, see docs/doctor.md.
STAGE_RATES: dict[str, dict[str, float]] = {
    "lora": {},
    "preference": {"sgd": 0.015, "adafactor": 0.03, "rmsprop": 0.1, "lion": 0.07},
}
USUAL_STAGE_RATES = {"language": 1.0, "lora": 3.0, "preference": 0.05}


def share_of_rate(setup: Setup) -> float:
    """Of the optimizer's usual rate, by the kind of the stage."""
    usual = USUAL_STAGE_RATES[setup.kind]
    return STAGE_RATES.get(setup.kind, {}).get(setup.optimizer, usual)


class Group:
    """One group of runs from the first update to its curves."""

    def __init__(self, setup: Setup, seed: int, runs: int) -> None:
        self.setup, self.runs = setup, runs
        self.generator = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)
        draws = self.numpy
        spread = np.exp(draws.uniform(math.log(0.5), math.log(1.6), runs))
        usual = RATES[setup.optimizer] * spread * (32 / setup.width) ** 0.5
        self.usual = torch.tensor(usual, dtype=torch.float32)
        rate = setup.speed * share_of_rate(setup) * usual
        place = draws.integers(int(0.3 * setup.updates), int(0.75 * setup.updates), runs)
        self.draws = Draws(torch.tensor(rate, dtype=torch.float32), place, draws.random(runs))
        self.weights = Weights(runs, setup, self.generator)
        self._adjust()
        tokens = corpus(setup.source)
        count = len(tokens) // (CONTEXT + 1)
        rows = tokens[: count * (CONTEXT + 1)].reshape(count, CONTEXT + 1)
        order = np.stack([draws.permutation(count) for _ in range(runs)])
        held = order[:, :HELDOUT_ROWS]
        self.train = torch.tensor(
            rows[order[:, HELDOUT_ROWS : HELDOUT_ROWS + setup.rows]]
        )  # [runs, rows, t + 1]
        self.heldout = torch.tensor(rows[held])
        if setup.fault == "no_reshuffle":
            self._sort()
        self.order = [np.arange(self.train.shape[1]) for _ in range(runs)]
        self.columns: dict[str, list[np.ndarray]] = {}

    def _adjust(self) -> None:
        """Faults of the beginning."""
        fault, size = self.setup.fault, torch.tensor(self.draws.size, dtype=torch.float32)
        if fault == "init_large":
            with torch.no_grad():
                self.weights.tensors["head"].mul_((15 + 60 * size)[:, None, None])
        elif fault == "lr_zero":
            self.draws.rate.zero_()

    def _sort(self) -> None:
        """Rows in the order of how usual their letters are, as files come from a disk."""
        shares = np.bincount(corpus(self.setup.source), minlength=VOCABULARY) + 1.0
        cost = torch.tensor(-np.log(shares / shares.sum()))
        by_cost = cost[self.train].mean(-1).argsort(-1)
        self.train = torch.gather(self.train, 1, by_cost[..., None].expand_as(self.train))

    def batch(self, update: int) -> tuple[Tensor, float]:
        """ids [runs, batch, t + 1] of an update, and the epoch after it."""
        size, count = self.setup.batch, self.train.shape[1]
        chosen = np.empty((self.runs, size), dtype=np.int64)
        for place in range(size):
            position = (update * size + place) % count
            if position == 0 and self.setup.fault != "no_reshuffle":
                self.order = [self.numpy.permutation(count) for _ in range(self.runs)]
            chosen[:, place] = [order[position] for order in self.order]
        index = torch.tensor(chosen)[..., None].expand(-1, -1, CONTEXT + 1)
        return torch.gather(self.train, 1, index), (update + 1) * size / count

    def go(self) -> list[dict[str, np.ndarray]]:
        """Train; returns each run's columns."""
        if self.setup.kind == "preference":
            return self._preference()
        if self.setup.kind == "lora":
            self._pretrain()
            self.weights.add_adapters(self.runs, 4, self.generator)
        self._language(self.setup, record=True)
        self.columns.pop("raw", None)
        return self._split()

    def _pretrain(self) -> None:
        """120 updates of all weights at the optimizer's usual rate."""
        stage, self.draws.rate = self.draws.rate, self.usual
        self._language(replace(self.setup, kind="language", fault="", updates=120), record=False)
        self.draws.rate = stage

    def _split(self) -> list[dict[str, np.ndarray]]:
        return [
            {name: np.array([one[run] for one in column]) for name, column in self.columns.items()}
            for run in range(self.runs)
        ]

    def _record(self, **values: Any) -> None:
        for name, value in values.items():
            array = np.broadcast_to(np.asarray(value, dtype=np.float64), (self.runs,)).copy()
            self.columns.setdefault(name, []).append(array)

    def _losses(self, ids: Tensor, update: int) -> Tensor:
        """Mean loss of each run [runs], with the faults of the forward pass."""
        fault, dropout = self.setup.fault, self.setup.dropout
        inputs, targets = ids[..., :-1], ids[..., 1:]
        if fault == "blind_inputs":
            inputs = torch.zeros_like(inputs)
        elif fault == "unshifted_labels":
            targets = inputs
        elif fault == "shuffled_labels":
            flat = targets.reshape(self.runs, -1)
            mixed = torch.rand(flat.shape, generator=self.generator).argsort(-1)
            targets = torch.gather(flat, 1, mixed).reshape(targets.shape)
        logits = self.weights.logits(inputs, fault != "no_causal_mask", dropout)
        losses = functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="none"
        )
        return losses.reshape(self.runs, -1).mean(-1)

    def _poisoned(self, ids: Tensor, update: int) -> Tensor:
        """Faults of the data of this update."""
        fault, draws = self.setup.fault, self.draws
        noise = torch.randint(0, VOCABULARY, ids.shape, generator=self.generator)
        length = 1 + (draws.size * 3).astype(int)
        if fault == "spike_heals":
            hit = (update >= draws.place) & (update < draws.place + length)
        elif fault == "periodic":
            period = 12 + (draws.size * 14).astype(int)
            hit = (update % period) < 2
            noise = torch.where(torch.rand(ids.shape, generator=self.generator) < 0.5, noise, ids)
        else:
            return ids
        return torch.where(torch.tensor(hit)[:, None, None], noise, ids)

    def _rate(self, setup: Setup, update: int) -> Tensor:
        """[runs], with the faults of the schedule."""
        fault, place, total = setup.fault, self.draws.place, setup.updates
        rate = self.draws.rate * shape_of_rate(setup, update)
        size = torch.tensor(self.draws.size, dtype=torch.float32)
        after = torch.tensor(place <= update)
        if fault == "lr_ramp":
            return self.draws.rate * (0.3 * 10 ** ((2.0 + size) * update / total))
        if fault == "zero_tail":
            return torch.where(torch.tensor(0.9 * place <= update), torch.zeros_like(rate), rate)
        if fault == "dead_start":
            early = torch.tensor(update < 0.7 * place)
            return torch.where(early, rate * 1e-3, self.draws.rate)
        if fault == "spike_stays":
            burst = torch.tensor((place <= update) & (update < place + 2))
            return torch.where(
                burst, rate * (60 + 60 * size), torch.where(after, rate * 0.02, rate)
            )
        return rate

    def _language(self, setup: Setup, record: bool) -> None:
        fault, draws = setup.fault, self.draws
        trained = self.weights.trained()
        optimizer = Optimizer(setup.optimizer, trained)
        kept: dict[int, dict[str, Tensor]] = {}
        total_gradient: dict[str, Tensor] = {}
        slow = {name: one.detach().clone() for name, one in trained.items()}
        factor = 2.0 ** (1 + (draws.size * 3).astype(int))  # micro-batches that were not averaged
        for update in range(setup.updates):
            ids, epoch = self.batch(update)
            losses = self._losses(self._poisoned(ids, update), update)
            if fault == "nan_at_k":
                hit = torch.tensor(draws.place == update)
                losses = losses * torch.where(hit, math.inf, 1.0)  # a batch without one target
            elif fault == "nan_first" and update == 0:
                losses = losses * math.nan
            names = list(trained)
            found = torch.autograd.grad(losses.sum(), list(trained.values()))
            gradients = dict(zip(names, found, strict=True))
            if fault == "no_zero_grad":
                total_gradient = {n: total_gradient.get(n, 0) + g for n, g in gradients.items()}
                gradients = total_gradient
            if fault == "accumulation":
                gradients = {n: g * _each(factor, g) for n, g in gradients.items()}
            norm = torch.stack(
                [g.reshape(self.runs, -1).square().sum(-1) for g in gradients.values()]
            )
            norm = norm.sum(0).sqrt()
            scale = (setup.clip / (norm + 1e-12)).clamp(max=1.0)
            rate = self._rate(setup, update)
            if record:
                shown = losses.detach().numpy().astype(float)
                if fault == "accumulation":
                    shown = shown * factor
                elif fault == "lagging_mean":  # what is shown is the mean of the run so far
                    shown = np.mean([*self.columns.get("raw", []), shown], axis=0)
                    self._record(raw=losses.detach().numpy())
                self._record(
                    update=update + 1, epoch=epoch, loss=shown,
                    learning_rate=rate.numpy(), grad_norm=norm.numpy(),
                )  # fmt: skip
            clipped = {n: g * _each(scale.numpy(), g) for n, g in gradients.items()}
            decay = DECAY_PER_UPDATE / RATES[setup.optimizer]
            if fault == "late_creep" and update > 0.5 * setup.updates:
                decay = (
                    (1.0 + 3.0 * float(draws.size.mean()))
                    * update
                    / setup.updates
                    / float(rate.mean())
                    * 6e-3
                )
            if fault != "frozen":
                optimizer.step(clipped, rate, decay)
            if fault == "bad_resume":
                self._resume(update, kept, trained, optimizer)
            with torch.no_grad():
                for name, one in trained.items():
                    slow[name].mul_(0.999).add_(one, alpha=0.001)
            if record:
                self._evaluate(update, setup, slow if fault == "stale_eval" else None)

    def _resume(
        self,
        update: int,
        kept: dict[int, dict[str, Tensor]],
        trained: dict[str, Tensor],
        optimizer: Optimizer,
    ) -> None:
        """At the resume the weights are those of long ago, and the moments are gone."""
        kept[update] = {name: one.detach().clone() for name, one in trained.items()}
        kept.pop(update - 130, None)
        for run in np.flatnonzero(self.draws.place == update):
            back = int(self.draws.place[run] * (0.5 + 0.4 * self.draws.size[run]))
            old = kept.get(update - back) or kept[min(kept)]
            with torch.no_grad():
                for name, one in trained.items():
                    one[run] = old[name][run]
                    optimizer.first[name][run] = 0.0

    @torch.no_grad()
    def _evaluate(self, update: int, setup: Setup, slow: dict[str, Tensor] | None) -> None:
        value: Any = math.nan
        if (update + 1) % setup.evaluate_every == 0:
            live = {name: one.detach().clone() for name, one in self.weights.trained().items()}
            if slow is not None:
                for name, one in self.weights.trained().items():
                    one.copy_(slow[name])
            dropout, self.setup = self.setup.dropout, replace(self.setup, dropout=0.0)
            value = self._losses(self.heldout, update).numpy()
            self.setup = replace(self.setup, dropout=dropout)
            for name, one in self.weights.trained().items():
                one.copy_(live[name])
        self._record(**{"evaluation.loss": value})

    # -- preference -----------------------------------------------------------

    def _preference(self) -> list[dict[str, np.ndarray]]:
        """DPO on continuations: the corpus's own is chosen, a disturbed one rejected."""
        setup, fault = self.setup, self.setup.fault
        self._pretrain()
        beta = 0.1
        prompt = CONTEXT // 2
        reference = {name: one.detach().clone() for name, one in self.weights.tensors.items()}
        trained = self.weights.trained()
        if fault == "dpo_displacement":  # similar answers and a frozen head: both go down
            trained = {n: one for n, one in trained.items() if n not in ("head", "embed")}
        optimizer = Optimizer(setup.optimizer, trained)
        rate_scale = {"dpo_displacement": 8.0, "dpo_runaway": 25.0}.get(fault, 1.0)
        if fault == "dpo_displacement" and setup.optimizer == "sgd":
            rate_scale = 30.0  # at 8 nothing happens: SGD moves by the gradient, which is small
        for update in range(setup.updates):
            chosen, epoch = self.batch(update)
            rejected = self._rejected(chosen, prompt)
            both = torch.cat([chosen, rejected], 1)
            with torch.no_grad():
                live = dict(self.weights.tensors)
                self.weights.tensors = reference
                before = self._answer(both, prompt)
                self.weights.tensors = live
            ratio = self._answer(both, prompt) - before
            better, worse = ratio[:, : setup.batch], ratio[:, setup.batch :]
            margin = beta * (better - worse)
            losses = -functional.logsigmoid(margin).mean(-1)
            found = torch.autograd.grad(losses.sum(), list(trained.values()))
            gradients = dict(zip(trained, found, strict=True))
            norm = torch.stack(
                [g.reshape(self.runs, -1).square().sum(-1) for g in gradients.values()]
            )
            norm = norm.sum(0).sqrt()
            rate = rate_scale * self.draws.rate * shape_of_rate(setup, update)
            self._record(
                update=update + 1, epoch=epoch, loss=losses.detach().numpy(),
                learning_rate=rate.numpy(), grad_norm=norm.numpy(),
            )  # fmt: skip
            self._record(
                **{
                    "objective.margin": margin.detach().mean(-1).numpy(),
                    "objective.accuracy": (margin > 0).float().mean(-1).numpy(),
                    "objective.chosen_logratio": better.detach().mean(-1).numpy(),
                    "objective.rejected_logratio": worse.detach().mean(-1).numpy(),
                }
            )
            scale = (setup.clip / (norm + 1e-12)).clamp(max=1.0).numpy()
            optimizer.step({n: g * _each(scale, g) for n, g in gradients.items()}, rate, 0.0)
        return self._split()

    def _rejected(self, chosen: Tensor, prompt: int) -> Tensor:
        """Healthy: half of the answer's tokens are random. Displacement: two neighbours swap."""
        worse = chosen.clone()
        if self.setup.fault == "dpo_displacement":
            worse[..., prompt + 2], worse[..., prompt + 3] = (
                chosen[..., prompt + 3],
                chosen[..., prompt + 2],
            )
            return worse
        noise = torch.randint(0, VOCABULARY, chosen.shape, generator=self.generator)
        hit = torch.rand(chosen.shape, generator=self.generator) < 0.5
        hit[..., : prompt + 1] = False
        return torch.where(hit, noise, worse)

    def _answer(self, ids: Tensor, prompt: int) -> Tensor:
        """Summed log-probability of the tokens after the prompt [runs, rows]."""
        logits = self.weights.logits(ids[..., :-1]).log_softmax(-1)
        picked = torch.gather(logits, -1, ids[..., 1:, None])[..., 0]
        return picked[..., prompt:].sum(-1)


def _each(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype).reshape(-1, *[1] * (like.dim() - 1))


def fault_setup(fault: str, base: Setup) -> Setup:
    """The setup in which a fault can show itself."""
    changes: dict[str, dict[str, Any]] = {
        "dropout": {"dropout": 0.45},
        "tiny_data": {"rows": 40},
        "no_reshuffle": {"rows": base.batch * 48},
        "bad_resume": {"resumes": True},
        "dpo_displacement": {"kind": "preference"},
        "dpo_runaway": {"kind": "preference"},
        "dead_start": {"warmup": 1},
    }
    return replace(base, fault=fault, **changes.get(fault, {}))


def context_of(setup: Setup, group: Group, run: int) -> dict[str, Any]:
    """What whoever runs the training knows, beside the curve."""
    known: dict[str, Any] = {"resumes": []}
    if setup.kind != "preference":
        known |= {"vocabulary": VOCABULARY, "unigram_entropy": unigram_entropy(setup.source)}
    if setup.kind == "preference":
        known["chance"] = math.log(2.0)
    if setup.fault == "accumulation":
        known["accumulation"] = int(2.0 ** (1 + int(group.draws.size[run] * 3)))
    if setup.resumes:
        known["resumes"] = [int(group.draws.place[run]) + 1]
    return known
