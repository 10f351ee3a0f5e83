"""What follows from an unusual update: it is skipped, the run goes back, or it stops.

Going back is a resume inside the process. The batches to blame are written to the quarantine
first; then the run goes to its newest checkpoint that left them out, newer ones are deleted,
and metrics.jsonl is cut to fit. A kill anywhere in between finds the same record at its next
start, so it ends in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.nn import Parameter

from lehr import ranks
from lehr.errors import Diverged, Problem
from lehr.training import events
from lehr.training.attempt import Verdict
from lehr.training.guard import MEMORY, Alarm, Guard, signals_of
from lehr.training.metrics import MetricsFile, gather
from lehr.training.progress import Progress
from lehr.training.quarantine import Quarantine, Quarantined
from lehr.training.settings import EngineSettings
from lehr.training.step_norm import StepNorm
from lehr.training.store import Batches, Store

NEVER_FINITE = (
    ". But no update of this run was finite so far, so it is hardly the batches: `lehr doctor "
    "RECIPE --run-tests` looks for the cause, precision: fp32 tells whether it is the arithmetic"
)


class RunGuard:
    """The guard of one run, and what it does. Without settings only non-finite values count.

    Raises Diverged where skipping and going back are used up, or where the policy is `stop`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        guard: Guard | None,
        quarantine: Quarantine,
        store: Store,
        trained: Mapping[str, Parameter],
        emit: Callable[[events.Event], None],
    ) -> None:
        of_guard = settings.guard
        self._policy = "skip" if of_guard is None else of_guard.policy
        self._allowed = of_guard.rewinds if of_guard and of_guard.policy == "rewind" else 0
        self._nonfinite_limit, self._kept = settings.nonfinite_limit, settings.checkpoints_kept
        self._guard, self._quarantine, self._store = guard, quarantine, store
        self._step = None if guard is None else StepNorm(trained)
        self._emit = emit
        self._signals: dict[str, float] = {}
        self._trouble: dict[int, tuple[str, tuple[str, ...]]] = {}  # the newest unusual attempts
        self._must_stop: Diverged | None = None

    @property
    def may_go_back(self) -> bool:
        """Whether a state from before the first update may be needed."""
        return self._allowed > 0

    # -- around an attempt ----------------------------------------------------

    def known(self, attempt: int, origins: Sequence[str]) -> Quarantined | None:
        """The entry of a batch that is passed over; `origins` are this rank's."""
        if not self._quarantine.holds(attempt):
            return None
        everywhere = [name for part in gather(list(origins)) for name in part]
        return self._quarantine.of(attempt, everywhere)

    def judge(self, loss: float, norm: float, metrics: Mapping[str, float]) -> Alarm | None:
        """The verdict on finite gradients that are not applied yet."""
        if self._guard is None:
            return None
        self._signals = signals_of(loss, norm, metrics)
        return self._guard.judge(self._signals)

    def before_step(self, restarted: bool = False) -> dict[str, float]:
        """restarted: the optimizer begins anew, so its steps are like none before.

        Columns of metrics.jsonl.
        """
        if self._step is not None:
            self._step.begin()
        if restarted and self._guard is not None:
            self._guard.forget_steps()
        return {"restarted": 1.0} if restarted else {}

    def after_step(self, attempt: int, update: int, rate: float) -> dict[str, float]:
        """The attempt was applied; columns of metrics.jsonl."""
        if self._guard is None or self._step is None:
            return {}
        self._guard.accept(attempt, self._signals)
        norm = self._step.end()
        alarm = self._guard.moved(attempt, norm / rate) if rate > 0 else None
        if alarm is not None:
            self._emit(events.StepUnusual(attempt, update, str(alarm)))
            if self._policy == "stop":
                self._trouble[attempt] = (str(alarm), ())
                self._must_stop = self._stopped(attempt, [attempt], f"unusual: {alarm}")
        return {"update_norm": norm}

    def stop_if_decided(self) -> None:
        """Raise Diverged where the last step ended the run; its line is written."""
        if self._must_stop is not None:
            raise self._must_stop

    def columns(self, alarm: Alarm | None) -> dict[str, object]:
        """Columns of metrics.jsonl for an update that the guard skipped."""
        if alarm is None:
            return {}
        return {
            "guard.signal": alarm.signal,
            "guard.value": alarm.value,
            "guard.usual": alarm.usual,
            "guard.limit": alarm.limit,
        }

    # -- after a skipped attempt ----------------------------------------------

    def passed_over(self, known: Quarantined, origins: tuple[str, ...]) -> None:
        """A batch of the quarantine was drawn, and nothing computed with it."""
        self._emit(events.BatchPassedOver(known.attempt, known.update, known.why, origins))

    def after_skip(
        self, attempt: int, progress: Progress, verdict: Verdict, origins: tuple[str, ...]
    ) -> str:
        """What to do about a skipped attempt: '' = go on, else why the run should go back."""
        alarm, in_a_row = verdict.alarm, progress.nonfinite_in_a_row
        if alarm is None:
            self._emit(events.NonFinite(attempt, progress.update, verdict.bad, origins, in_a_row))
        else:
            self._emit(events.UpdateUnusual(attempt, progress.update, str(alarm), origins))
        names = events.not_finite(verdict.bad)
        self._trouble = {k: v for k, v in self._trouble.items() if k > attempt - MEMORY}
        self._trouble[attempt] = (str(alarm) if alarm else f"not finite: {names}", origins)
        too_many = self._guard is not None and self._guard.unusual(attempt)
        if alarm is None:
            last = range(attempt - in_a_row + 1, attempt + 1)
            reason = f"a finite loss and gradient; {in_a_row} attempts in a row had none ({names})"
            go_on = in_a_row < self._nonfinite_limit
        elif self._policy == "stop":
            raise self._stopped(attempt, [attempt], f"a usual update; {alarm}")
        else:
            last = range(attempt - MEMORY + 1, attempt + 1)
            count = sum(one in self._trouble for one in last)
            reason = f"usual updates; {count} of the last {MEMORY} attempts were none ({alarm})"
            go_on = not too_many
        if go_on:
            return ""
        if self._quarantine.rewinds < self._allowed:
            return reason
        raise self._stopped(attempt, last, reason, self._remedy(progress))

    def after_broken(self, names: Sequence[str], progress: Progress, last: bool) -> None:
        """Weights `names` are not finite, so no checkpoint is written.

        Where the run can still go back, the attempts that follow bring it there. Raises Diverged
        where it cannot: with another learning rate or precision it can go on.
        """
        if self._quarantine.rewinds < self._allowed and not last:
            return
        found = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        expected = (
            f"finite weights; {found} is not: the step was too large. Nothing of it was saved. "
            f"The checkpoint of update {self._store.saved_update} stands; lower learning_rate"
        )
        raise Diverged(Problem(f"update {progress.update}", expected))

    def go_back(
        self, why: str, attempt: int, progress: Progress, batches: Batches, metrics: MetricsFile
    ) -> None:
        """Return to a state from before the batches to blame, and pass them over from now on.

        Raises Diverged where no saved state is old enough.
        """
        assert self._guard is not None
        blamed = self._guard.to_blame(self._quarantine.rewinds)
        target = self._store.usable(self._quarantine.with_more(blamed)) if blamed else None
        if target is None:
            older = f"{why}, and no saved state is older than the trouble"
            raise self._stopped(attempt, self._trouble, older, self._remedy(progress, older=True))
        number = self._quarantine.rewinds + 1
        entries = self._entries(blamed, why, number, target.state, batches)
        undone, reached = progress.update, target.update
        self._quarantine.add(entries)
        if ranks.is_main():
            metrics.keep_aside(target.state["progress"]["attempt"], number)
        self._store.resume(progress, batches, metrics, told=False)
        self._trouble = {}
        origins = tuple(name for one in entries for name in one.origins)
        self._emit(events.WentBack(undone, reached, number, tuple(blamed), origins, why))

    def _entries(
        self, attempts: Sequence[int], why: str, number: int, state: Mapping[str, object],
        batches: Batches,
    ) -> list[Quarantined]:  # fmt: skip
        """The attempts with the rows of their batches, which are drawn again to be named."""
        before = batches.state()
        progress = Progress()
        progress.load(state["progress"])  # type: ignore[arg-type]
        batches.load(state["batches"])
        found = []
        for attempt in range(progress.attempt + 1, max(attempts) + 1):
            packs = batches.next()
            if attempt in attempts:
                own = [str(origin) for pack in packs for origin in pack.origins]
                origins = tuple(name for part in gather(own) for name in part)
                found.append(Quarantined(attempt, progress.update, why, origins, number))
        batches.load(before)
        return found

    def _remedy(self, progress: Progress, older: bool = False) -> str:
        """What helps beside other batches; older: an older state was needed."""
        if progress.update == 0 and self._quarantine.rewinds == 0:
            return NEVER_FINITE
        return f". More checkpoints_kept (now {self._kept}) reach further back" if older else ""

    def _stopped(self, attempt: int, last: Iterable[int], why: str, remedy: str = "") -> Diverged:
        """Write the batches down, so that the same command goes on past them."""
        blamed, count = set(last), self._quarantine.rewinds
        entries = [
            Quarantined(one, self._store.saved_update, reason, origins)
            for one, (reason, origins) in self._trouble.items()
            if one in blamed
        ]
        self._quarantine.add(entries)
        origins = self._trouble[attempt][1]
        back = (
            f" It went back {'once' if count == 1 else f'{count} times'} before." if count else ""
        )
        expected = (
            f"{why}.{back} The checkpoint of update {self._store.saved_update} stands; the same "
            f"command goes on from it and passes these batches over{remedy}"
        )
        return Diverged(Problem(f"attempt {attempt} ({', '.join(origins[:5])})", expected))
