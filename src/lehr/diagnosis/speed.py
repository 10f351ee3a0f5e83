"""Where an update's time goes and what it waits for: shares, one bottleneck, the predicted gain.

Arithmetic only; `speed_probe` measures. Every second of an update is in exactly one class:

    data             the wait for the loader
    host             what the processor spends on each operation whatever its size, and between
                     operations: Python, dispatch, launches; all that is in no other class
    synchronisation  an accelerator that idles because the host had waited for it
    communication    collectives that nothing hides
    memory           operations limited by the memory that they move: element-wise, norms, steps
    compute          matrix products, attention, convolutions
    recompute        what the backward pass computes again
    checkpoint, log, evaluation   an update's part of them

A prediction takes the seconds of a class away, or scales those that grow with the batch; the
counterfactual run then measures the same. Utilisation is against this machine's measured
product rate, not its data sheet (Korthikanti et al. 2022, appendix: MFU counts the operations
that the model needs, HFU also those computed again).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CLASSES = (
    "data", "host", "synchronisation", "communication", "memory", "compute", "recompute",
    "checkpoint", "log", "evaluation",
)  # fmt: skip
SPANS = ("data", "communication", "checkpoint", "log", "evaluation")  # timed as they are
WORK = ("compute", "memory", "recompute", "synchronisation")  # out of the profile
TITLES = {
    "data": "waits for data",
    "host": "overhead of each operation (Python, dispatch, launches)",
    "synchronisation": "accelerator idles after the host waited for it",
    "communication": "exchange between ranks",
    "memory": "moves memory (element-wise work, norms, optimizer)",
    "compute": "matrix products and attention",
    "recompute": "computes again what was not kept",
    "checkpoint": "writes checkpoints",
    "log": "log lines, metrics, observers",
    "evaluation": "evaluations during training",
}
NAMED_FROM = 0.10  # share from which a wait is named
AGREES = 0.15  # of the prediction's own seconds: the counterfactual run confirms it


@dataclass(frozen=True)
class Group:
    """What one part of the model (or the optimizer) costs an update, forward and backward.

    owner    e.g. "GatedMlp model.layers.*.mlp", without the modules inside it
    calls    operations; seconds of wall time, of which compute and memory are the operations' own
    fixed    does not grow with the batch: the optimizer, norms of the gradient
    """

    owner: str
    calls: int
    seconds: float
    compute: float = 0.0
    memory: float = 0.0
    fixed: bool = False

    @property
    def host(self) -> float:
        return max(0.0, self.seconds - self.compute - self.memory)

    def of(self, name: str) -> float:
        """Seconds of a class: host, compute or memory."""
        return float(getattr(self, name))


@dataclass(frozen=True)
class Trial:
    """A counterfactual run: what was changed, seconds an update as predicted and as measured.

    batches  of the plain run that one of its updates holds: 2 where the batch was doubled
    """

    change: str
    predicted: float
    measured: float
    before: float
    batches: int = 1

    @property
    def predicted_gain(self) -> float:
        """Times as fast, for the same work."""
        return self.batches * self.before / max(self.predicted, 1e-12)

    @property
    def measured_gain(self) -> float:
        return self.batches * self.before / max(self.measured, 1e-12)

    @property
    def agrees(self) -> bool:
        return abs(self.predicted - self.measured) <= AGREES * self.measured


@dataclass(frozen=True)
class Speed:
    """The answer of `lehr doctor RECIPE --speed` for one stage.

    seconds      by class, of one update; shares are these over their sum
    mfu, hfu     model operations, and operations done, over what the measured rate allows
    bandwidth    bytes moved by the memory class in its seconds, over the measured bandwidth
    busy         processor seconds over wall seconds and threads: what a monitor shows
    """

    seconds: Mapping[str, float]
    bottleneck: str
    mfu: float
    hfu: float
    bandwidth: float | None
    busy: float
    groups: Sequence[Group] = ()
    trial: Trial | None = None
    fix: str = ""
    gain: float = 1.0
    tokens: float = 0.0
    notes: Sequence[str] = ()
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        return shares(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        trial = None
        if self.trial is not None:
            trial = {
                "change": self.trial.change,
                "predicted_seconds": self.trial.predicted,
                "measured_seconds": self.trial.measured,
                "predicted_gain": self.trial.predicted_gain,
                "measured_gain": self.trial.measured_gain,
                "agrees": self.trial.agrees,
            }
        return {
            "bottleneck": self.bottleneck,
            "seconds_per_update": self.total,
            "seconds": dict(self.seconds),
            "shares": self.shares,
            "tokens_per_second": self.tokens / max(self.total, 1e-12),
            "mfu": self.mfu,
            "hfu": self.hfu,
            "bandwidth_share": self.bandwidth,
            "processor_busy": self.busy,
            "parts": [
                {"owner": one.owner, "calls": one.calls, "seconds": one.seconds, "host": one.host}
                for one in self.groups
            ],
            "counterfactual": trial,
            "fix": self.fix,
            "predicted_gain": self.gain,
            "limits": dict(self.limits),
            "notes": list(self.notes),
        }


def seconds_by_class(
    update: float, spans: Mapping[str, float], work: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of one update by class; they sum to `update` + spans.

    update  seconds of the update outside the spans
    spans   seconds of SPANS      work  seconds of WORK inside `update`, from a profile
    A profile that found more than there is (another, slower update was profiled) is scaled.

    >>> found = seconds_by_class(6.0, {"data": 3.0, "log": 1.0}, {"compute": 4.0, "memory": 1.0})
    >>> found["host"], found["data"], sum(found.values())
    (1.0, 3.0, 10.0)
    """
    known = sum(work.get(name, 0.0) for name in WORK)
    scale = min(1.0, update / known) if known > 0 else 1.0
    found = {name: spans.get(name, 0.0) for name in SPANS}
    found |= {name: scale * work.get(name, 0.0) for name in WORK}
    found["host"] = max(0.0, update - scale * known)
    return {name: found[name] for name in CLASSES}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of the sum; they add up to 1.

    >>> shares({"data": 1.0, "compute": 3.0})
    {'data': 0.25, 'compute': 0.75}
    """
    total = sum(seconds.values())
    return {name: value / total if total > 0 else 0.0 for name, value in seconds.items()}


def bottleneck_of(seconds: Mapping[str, float]) -> str:
    """The one class to do something about; compute where nothing else costs more.

    Waits count from a tenth of the update on, work per operation and memory where they
    take more than the products do.

    >>> bottleneck_of({"data": 0.2, "host": 0.15, "memory": 0.1, "compute": 0.55})
    'data'
    >>> bottleneck_of({"data": 0.05, "host": 0.3, "memory": 0.2, "compute": 0.45})
    'compute'
    """
    of = shares(seconds)
    compute = of.get("compute", 0.0)
    named = {
        name: share
        for name, share in of.items()
        if name != "compute"
        and share >= (compute if name in ("host", "memory") else NAMED_FROM)
        and share > 0
    }
    return max(named, key=named.__getitem__) if named else "compute"


def gain_without(total: float, saved: float) -> float:
    """Times as fast once `saved` of `total` seconds are gone.

    >>> gain_without(10.0, 5.0)
    2.0
    """
    return total / max(total - saved, 1e-12)


def doubled(seconds: Mapping[str, float], groups: Sequence[Group]) -> float:
    """Seconds of an update whose micro-batches hold twice as much, data at hand, no log.

    Work that grows with the batch doubles; the overhead of each operation and what is done
    once an update (the groups that are `fixed`) stay.

    >>> block = Group("block", 10, 4.0, compute=2.0, memory=1.0)
    >>> step = Group("optimizer", 4, 2.0, memory=1.5, fixed=True)
    >>> doubled({"host": 1.5, "compute": 2.0, "memory": 2.5}, [block, step])
    9.0
    """
    once = {
        kind: sum(one.of(kind) for one in groups if one.fixed) for kind in ("compute", "memory")
    }
    grows = seconds.get("recompute", 0.0)
    grows += sum(max(0.0, seconds.get(kind, 0.0) - spent) for kind, spent in once.items())
    stays = ("host", "synchronisation", "communication", "compute", "memory", "recompute")
    return grows + sum(seconds.get(name, 0.0) for name in stays)


def narrowed(seconds: Mapping[str, float], operations: float, moved: float) -> float:
    """Seconds of an update of a narrower model: its products' operations and its memory's bytes
    over those of the model at hand; the overhead of each operation and all waits stay.

    >>> narrowed({"compute": 4.0, "memory": 2.0, "host": 1.0, "data": 0.5}, 0.25, 0.5)
    3.5
    """
    factors = {"compute": operations, "recompute": operations, "memory": moved}
    return sum(factors.get(name, 1.0) * value for name, value in seconds.items())


def largest(groups: Sequence[Group], name: str) -> Group | None:
    """The group that has most of a class, where it has at least half of it."""
    if name not in ("host", "memory") or not groups:
        return None
    first = max(groups, key=lambda one: one.of(name))
    everything = sum(one.of(name) for one in groups)
    return first if everything > 0 and first.of(name) >= 0.5 * everything else None
