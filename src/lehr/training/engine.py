"""The one training loop.

One attempt: packs → micro-batches → denominator of the whole update → backward each →
norm and verdict → clip → optimizer → evaluation → line of metrics.jsonl → checkpoint.
The engine knows `weight` and `loss` of an objective and trains any module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lehr import ranks
from lehr.data.shapes import Pack
from lehr.device import CPU, synchronise
from lehr.errors import Interrupted, Problem, RecipeError
from lehr.models.surroundings import random_state, set_random_state
from lehr.objectives.base import Objective
from lehr.streams import content_hash
from lehr.training import events, gradients
from lehr.training.attempt import QUARANTINED, Taken, Verdict
from lehr.training.averaging import Average
from lehr.training.batch import Merge, cut
from lehr.training.batch_norm import BatchNorms
from lehr.training.clipping import AdaptiveClip
from lehr.training.gradient_flow import GradientFlow
from lehr.training.guard import Guard
from lehr.training.guarding import RunGuard
from lehr.training.interrupts import Interrupts
from lehr.training.logit_watch import LogitWatch
from lehr.training.metrics import MetricsFile, strict
from lehr.training.noise_meter import NoiseMeter
from lehr.training.numerics import Numerics
from lehr.training.optimizers import GroupRule, make_optimizer, set_rate
from lehr.training.order import FixedOrder
from lehr.training.progress import Progress, TrainingResult, result_of
from lehr.training.quarantine import Quarantine
from lehr.training.restarts import Restarts
from lehr.training.settings import EngineSettings
from lehr.training.spans import Spans
from lehr.training.state import (
    copied,
    modes_of,
    not_finite,
    put_back,
    running_buffers,
    set_modes,
    trained_parameters,
)
from lehr.training.steps import effective_steps
from lehr.training.store import Batches, Store
from lehr.training.update import StopNow, accumulate, arithmetic, denominator_of

Evaluate = Callable[[int], Mapping[str, float]]


class Engine:
    """Trains `model` on `batches` until `settings.updates` updates are applied.

    batches     see `Batches`; gives the packs of one update at a time
    folder      metrics.jsonl and checkpoints/ stand here; a run that finds a whole
                checkpoint of its own goes on from it
    seed_names  names of the random stream: (seed, stage)
    observers   called with each event, in order
    evaluate    (update) -> values; the model is in eval mode and without gradients. The
                first value decides best and early stop: lower is better
    merge       several packs -> one longer pack; needed where micro_batch > 1
    key         identity of the run (the stage's key); default: a hash of seed_names
    rules       parameter groups of their own, beside those of the settings

    Raises RecipeError for bad settings, before anything is written.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        batches: Batches,
        settings: EngineSettings,
        folder: Path,
        seed_names: Sequence[object],
        observers: Sequence[events.Observer] = (),
        evaluate: Evaluate | None = None,
        *,
        merge: Merge | None = None,
        key: str = "",
        rules: Sequence[GroupRule] = (),
    ) -> None:
        settings.check(has_evaluation=evaluate is not None)
        if settings.micro_batch > 1 and merge is None:
            expected = "1, or a function that merges packs"
            raise RecipeError(Problem("micro_batch", expected, settings.micro_batch))
        self.model = model
        self.settings = settings
        self.progress = Progress()
        self.spans = Spans()
        self._objective, self._batches, self._merge = objective, batches, merge
        self._seed_names, self._observers, self._evaluate = seed_names, observers, evaluate
        self._trained = trained_parameters(model, settings.precision)
        self._device = next(iter(self._trained.values())).device
        self._order = FixedOrder(self._device, self._emit)
        self._buffers = running_buffers(model)
        self.numerics = Numerics(model, self._trained, settings, seed_names)
        self._norms = BatchNorms(model, settings.batch_norm, self._emit)
        every = settings.gradient_flow_every
        self._flow = GradientFlow(model, self._trained, every, self._emit)
        self._noise = NoiseMeter(self._trained, settings.noise_scale_every, self._emit)
        self._logits = LogitWatch(model, settings.guard.attention_queries if settings.guard else 0)
        self._optimizer = make_optimizer(self.numerics.moved, settings.optimizer, rules)
        ema = settings.ema
        self._average = None if ema is None else Average(ema, self._trained, self._buffers)
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        key = key or content_hash([str(name) for name in seed_names])
        guard = None if settings.guard is None else Guard(settings.guard)
        adaptive = settings.adaptive_clip
        self._clip = None if adaptive is None else AdaptiveClip(adaptive)
        self._quarantine = Quarantine(folder, key, settings.quarantine)
        self._restarts = Restarts(settings.restart, lambda: self._quarantine.returned_to)
        self._store = Store(
            folder, key, settings, self._trained, self._buffers, self._optimizer, self._emit,
            self._average, self.numerics, self._quarantine, guard, self._clip,
        )  # fmt: skip
        self._guard = RunGuard(
            settings, guard, self._quarantine, self._store, self._trained, self._emit
        )
        self._stage = settings.stage or str(seed_names[-1])
        self._interrupts = Interrupts()
        self._interrupt_told = False
        folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> TrainingResult:
        """Train to the end, from wherever the folder says the run stands.

        Raises Interrupted (a checkpoint was written), Diverged (the last good one stands),
        OutOfResources (disk full), RecipeError (an update without supervision). An engine
        runs once: what goes on from a checkpoint is a new one.
        """
        if self.progress.attempt:
            raise RuntimeError("an engine runs once; make a new one to resume")
        with self._interrupts, self._surroundings(), self._norms.watched(), self._logits:
            if (converted := self.numerics.convert()) is not None:
                self._emit(converted)
            self._first_batches = self._batches.state()
            if self._average is not None:
                self._average.begin()
            self._quarantine.read()
            self._store.resume(self.progress, self._batches, self._metrics)
            self._noise.recall(self._metrics.path)
            gradients.require_equal_start(self._trained)
            resumed_from = self.progress.update
            if self._guard.may_go_back:
                self._store.save_start(self.progress, self._batches.state())
            self._emit(
                events.RunStarted(resumed_from, self.progress.attempt, self.settings.updates)
            )
            while not self._finished:
                self._next()
            self._save()
            self._stop_if_asked()
            self._noise.conclude(self.progress.update)
            promoted_update = self._promote()
            averaged = self._promote_average(promoted_update)
            self._emit(events.RunDone(self.spans.take()))
        return result_of(self.progress, promoted_update, resumed_from, averaged)

    @property
    def _finished(self) -> bool:
        return self.progress.stopped_early or self.progress.update >= self.settings.updates

    def _next(self) -> None:
        """One attempt; where an interrupt gives it up, the state is as if it had not begun."""
        self._stop_if_asked()
        before = self._batches.state()
        buffers = copied(self._buffers)
        try:
            self._attempt(buffers)
        except StopNow:
            self.numerics.abandon()
            gradients.clear(self._trained)
            put_back(self._buffers, buffers, "buffers")
            self._batches.load(before)
            self._stop_if_asked()

    def _attempt(self, buffers: Mapping[str, torch.Tensor]) -> None:
        started = time.perf_counter()
        self._norms.begin(self.progress.update)
        data = self._take()
        known = self._guard.known(data.number, data.origins)
        verdict = self._backward(data) if known is None else QUARANTINED
        skipped = not ranks.all_true(verdict.fine)
        update = self.progress.update
        learning_rate = self.settings.rate(update) * self._restarts.share(update)
        steps = self.numerics.settle(skipped, verdict.overflow)
        fallen: tuple[events.Event, ...] = ()
        if skipped:
            put_back(self._buffers, buffers, "buffers")
            if verdict.overflow:
                self.progress.overflowed()
            else:
                self.progress.passed_over(finite=not verdict.bad or known is not None)
        else:
            flow = self._flow.begin(self.progress.update + 1)
            noise = self._noise.columns(self.progress.update + 1, data.denominator)
            steps |= self._clipped(verdict)
            set_rate(self._optimizer, learning_rate)
            restarted = self._restarts.begin(self._optimizer, update)
            steps |= self._guard.before_step(restarted)
            steps |= self._step(self.progress.update + 1) | self._norms.apply()
            steps |= self._guard.after_step(data.number, self.progress.update + 1, learning_rate)
            steps |= self._flow.end(flow) | noise
            self.progress.applied(data.tokens, data.supervised_tokens, verdict.loss)
            columns, fallen = self.numerics.applied(self.progress.update)
            steps |= columns
        gradients.clear(self._trained)
        synchronise(self._device)  # else the next update would be charged for what is under way
        seconds = time.perf_counter() - started
        self.progress.seconds += seconds
        row = {
            "stage": self._stage,
            "attempt": self.progress.attempt,
            "update": self.progress.update,
            "epoch": float(self._batches.epoch),
            "tokens": data.tokens,
            "supervised_tokens": data.supervised_tokens,
            "loss": math.nan if skipped and verdict.alarm is None else verdict.loss,
            "learning_rate": learning_rate,
            "grad_norm": verdict.norm,
            "seconds": seconds,
            "skipped": skipped,
            **{_column(name): value for name, value in verdict.metrics.items()},
            **steps,
        }
        if known is not None:
            row |= {"origins": list(data.origins), "quarantined": True}
            self._write(row)
            self._emit(events.UpdateDone(strict(row), self.spans.take()))
            self._guard.passed_over(known, data.origins)
        elif skipped:
            self._after_skip(row, data, verdict)
        else:
            for event in fallen:
                self._emit(event)
            self._after_update(row)

    def _step(self, update: int) -> dict[str, float]:
        """Move the weights, and their average; columns of what moved, where that is asked."""
        every = self.settings.optimizer.watch_every
        if every is None or update % every:
            columns = self.numerics.step(self._optimizer, update)
        else:
            before = copied(self._trained)
            columns = self.numerics.step(self._optimizer, update)
            groups = effective_steps(self._optimizer, before)
            self._emit(events.StepsMeasured(update, tuple(groups)))
            columns |= {k: v for i, group in enumerate(groups) for k, v in group.columns(i).items()}
        self.numerics.release()
        if self._average is not None:
            self._average.follow(update)
        return columns

    def _take(self) -> Taken:
        with self.spans("data"):
            packs = self._batches.next()
        micro_batches = cut(packs, self.settings.micro_batch, self._merge)
        weights = [float(self._objective.weight(pack)) for pack in micro_batches]
        number = self.progress.attempt + 1
        return Taken(
            number=number,
            micro_batches=micro_batches,
            weights=weights,
            denominator=denominator_of(weights, micro_batches, number),
            tokens=int(ranks.all_sum(sum(pack.tokens for pack in packs))),
            supervised_tokens=int(ranks.all_sum(sum(pack.targets.numel() for pack in packs))),
        )

    def _backward(self, data: Taken) -> Verdict:
        """All backward passes of the update; says what is not finite, changes no weight."""
        self.numerics.begin_attempt()
        with self._order():
            done = accumulate(
                self.model,
                self._objective,
                data.micro_batches,
                data.weights,
                data.denominator,
                (*self._seed_names, "update", self.progress.update),
                self.settings.precision,
                self._may_stop_inside,
                self.numerics.scaled,
                self._norms.counting,
                self._noise.seen(self.progress.update + 1),
            )
        self._flow.name_missing()
        gradients.sum_over_ranks(self._trained)
        self.numerics.unscale()
        measured = gradients.measure(self._trained)
        bad = tuple(f"gradient of {name}" for name in measured.nonfinite)
        if not math.isfinite(done.loss):
            bad = ("loss", *bad)
        elif not bad and not math.isfinite(measured.norm):
            bad = ("gradient norm",)
        overflow = measured.nonfinite if self.numerics.overflowed(done.loss, bad) else ()
        bad = (*bad, *self.numerics.flagged()) if bad else ()
        means = done.metrics.means() | self._logits.metrics()
        alarm = None if bad else self._guard.judge(done.loss, measured.norm, means)
        return Verdict(
            done.loss, measured.norm, bad, done.nonfinite, means, overflow, alarm, measured.norms
        )

    def _clipped(self, verdict: Verdict) -> dict[str, float]:
        """Clip the gradients, the global limit first; columns of metrics.jsonl."""
        factor = gradients.clip_to(self._trained, verdict.norm, self.settings.clip)
        if self._clip is None:
            return {}
        left = {name: factor * norm for name, norm in verdict.norms.items()}
        return self._clip.apply(self._trained, left)

    def _after_skip(self, row: dict[str, Any], data: Taken, verdict: Verdict) -> None:
        """Name the batch; go back, or give the run up, where skipping does not help."""
        if verdict.overflow:
            self._after_overflow(row, verdict.overflow)
            return
        origins = verdict.origins(data)
        row |= {"origins": list(origins)} | self._guard.columns(verdict.alarm)
        self._write(row)
        self._emit(events.UpdateDone(strict(row), self.spans.take()))
        why = self._guard.after_skip(data.number, self.progress, verdict, origins)
        if why:
            self._guard.go_back(why, data.number, self.progress, self._batches, self._metrics)
            self._noise.recall(self._metrics.path)

    def _after_overflow(self, row: dict[str, Any], names: tuple[str, ...]) -> None:
        """Nothing is wrong with the batch; where no smaller scale is left, the run ends."""
        self._write(row)
        self._emit(events.UpdateDone(strict(row), self.spans.take()))
        self.numerics.stop_if_given_up()
        used, now = row["loss_scale"], self.numerics.scale
        update, attempt = self.progress.update, self.progress.attempt
        self._emit(events.ScaleLowered(attempt, update, used, now, names))

    def _after_update(self, row: dict[str, Any]) -> None:
        """Evaluation, the line of metrics.jsonl, checkpoint: in this order, so that a kill
        anywhere repeats the whole attempt."""
        self._emit(events.UpdateDone(strict(row), self.spans.take()))
        update, settings = self.progress.update, self.settings
        last = update >= settings.updates
        every = settings.evaluate_every
        is_best = False
        if self._evaluate is not None and (last or (every is not None and update % every == 0)):
            with self.spans("evaluation"):
                values, gap, is_best = self._measure(self._evaluate)
            row |= {f"evaluation.{name}": value for name, value in values.items()} | gap
        self._write(row)
        self.numerics.stop_if_given_up()
        self._guard.stop_if_decided()
        keep_best = is_best and settings.promote == "best"
        if keep_best or update % settings.checkpoint_interval == 0 or self._finished:
            self._save()

    def _measure(self, evaluate: Evaluate) -> tuple[dict[str, float], dict[str, float], bool]:
        """Evaluate now; move best and early stop. Returns the values, columns of the gap of
        batch norms, and whether the values are best."""
        progress = self.progress
        modes = modes_of(self.model)
        self.model.eval()
        try:
            with torch.no_grad(), self._as_average(), self.numerics.evaluating():
                values, gap = self._norms.measure(evaluate, progress.update)
        finally:
            set_modes(modes)
        if not values:
            raise RecipeError(Problem("evaluation", "at least one value"))
        is_best = progress.evaluated(values)
        self._emit(events.Evaluated(progress.update, values, is_best))
        patience, waited = self.settings.early_stop, progress.evaluations_without_improvement
        if patience is not None and waited >= patience and progress.update < self.settings.updates:
            progress.stopped_early = True
            self._emit(events.StoppedEarly(progress.update, waited))
        return values, gap, is_best

    @contextmanager
    def _as_average(self) -> Iterator[None]:
        """The averaged weights inside, where they are used, with statistics of their own."""
        average = self._average
        if average is None or not average.in_use:
            yield
            return
        measured = self._norms.reestimated(self._forwards()) if self._reestimates else nullcontext()
        with average.swapped(), measured:
            yield

    @property
    def _reestimates(self) -> bool:
        measure = self._average is not None and self._average.settings.buffers == "measure"
        return measure and bool(self._norms) and not self._norms.frozen(self.progress.update)

    def _forwards(self) -> Iterator[Callable[[], object]]:
        """A forward pass of each micro-batch of the run's first updates: the same ones
        whenever they are asked for, so that what was evaluated is what is kept."""
        before = self._batches.state()
        self._batches.load(self._first_batches)
        try:
            for _ in range(self.settings.batch_norm.reestimate_updates):
                for pack in cut(self._batches.next(), self.settings.micro_batch, self._merge):
                    yield partial(self._forward, pack)
        finally:
            self._batches.load(before)

    def _forward(self, pack: Pack) -> None:
        with arithmetic(self.model, self.settings.precision):
            self._objective.loss(self.model, pack)

    def _promote(self) -> int:
        """Leave the promised weights in the model; returns whose they are."""
        best, value = self.progress.best_update, self.progress.best_value
        if self.settings.promote == "last" or best is None or value is None:
            return self.progress.update
        if best != self.progress.update:
            self._store.load_weights(best)
        self._emit(events.PromotedBest(best, value))
        return best

    def _promote_average(self, update: int) -> int:
        """Leave the average in the model, where evaluations saw it; returns its updates."""
        average = self._average
        if average is None or not average.in_use:
            return 0
        average.put_into_model()
        if self._reestimates:
            modes = modes_of(self.model)
            self.model.eval()
            self._norms.reestimate(self._forwards())
            set_modes(modes)
        self._emit(events.PromotedAverage(update, average.count, average.settings.decay))
        return average.count

    def _may_stop_inside(self) -> bool:
        """Whether to stop between two micro-batches: many ranks stop only between updates."""
        if self._interrupts.requested is not None and not self._interrupt_told:
            self._interrupt_told = True
            self._emit(events.InterruptNoted(self._interrupts.requested))
        return self._interrupts.requested is not None and ranks.world_size() == 1

    def _stop_if_asked(self) -> None:
        self._may_stop_inside()
        if ranks.all_true(self._interrupts.requested is None):
            return
        self._save()
        name = self._interrupts.requested or "a signal to another rank"
        where = f"update {self.progress.update}"
        raise Interrupted(
            Problem(where, f"{name} arrived; a checkpoint was written, the same command resumes")
        )

    def _save(self) -> None:
        with self.spans("checkpoint"):
            self._metrics.sync()
            broken = not_finite(self._trained)
            if not ranks.all_true(not broken):  # what could not be gone on from is not kept
                self._guard.after_broken(broken, self.progress, self._finished)
                return
            self._store.save(self.progress, self._batches.state())

    def _write(self, row: Mapping[str, Any]) -> None:
        if ranks.is_main():
            with self.spans("log"):
                self._metrics.append(strict(row))

    def _emit(self, event: events.Event) -> None:
        with self.spans("log"):
            for observer in self._observers:
                observer(event)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Train mode inside; modes and the global random state as before outside."""
        modes = modes_of(self.model)
        devices = list(dict.fromkeys([CPU, self._device]))
        before = random_state(devices)
        self.model.train()
        try:
            yield
        finally:
            self.numerics.restore()
            gradients.clear(self._trained)
            self._metrics.close()
            set_random_state(devices, before)
            set_modes(modes)


def _column(name: str) -> str:
    return name if name.startswith("source.") else f"objective.{name}"
