"""A loss spike's cause: the data, the state, both together, or bits that do not come again.

The batch of the spike is computed with the weights of several states, each time beside its
neighbours in the data (without the rows that are its own):

    unusual with other trained weights too       data
    usual there, and the weights that it met
    are worse for its neighbours as well         state
    unusual with the weights it met only         data and state together
    the same updates give other bits             not reproducible: hardware, or a change outside

(PaLM, arXiv 2204.02311, section 5.1: the same batches from another checkpoint made no spike.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lehr.training.robust import FEWEST, TAIL, WARM, Kind, median, spread

BEFORE, AFTER = 8, 4  # batches around the spike's
NEAR = 12  # lines before the update's: more of them hide a jump behind the fall of the loss
LIMIT = 4.0  # spreads: the batch is suspected already, so less than the guard asks for will do
KNOWS = 0.9  # of an untrained model's loss: below it the weights tell usual from unusual
RISE_ABSOLUTE, RISE_RELATIVE = 0.05, 0.02  # nats: so much worse for its neighbours is a bad state
MOST = 0.75  # of the neighbours
_LOSS = Kind(logarithm=False, absolute=0.03, relative=0.02)
_NORM = Kind(logarithm=True, absolute=0.15)

DATA, STATE, BOTH = "data", "state", "data and state"
BITS, NOTHING, UNCLEAR = "not reproducible", "nothing unusual", "cannot tell"
MEANING = {
    DATA: "the batch is unusual whatever trained weights see it: look at its rows",
    STATE: "the weights had gone wrong before the batch, which is usual with others",
    BOTH: "the batch is unusual with some weights only: neither alone makes the spike",
    BITS: "the same updates from the same state give other bits than the run wrote down",
    NOTHING: "neither the record nor a replay shows anything unusual",
    UNCLEAR: "what is kept of the run does not separate data from state",
}
REMEDY = {
    DATA: "repair or drop the rows; `guard: {quarantine: FILE}` leaves whole batches out",
    STATE: "go on from an older checkpoint, with a lower learning rate or `clip: 1.0`",
    BOTH: "leave the batch out (`guard: {quarantine: FILE}`); `clip: 1.0` makes it rarer",
    BITS: "test memory and processor, then run the stage again from an older checkpoint",
    NOTHING: "ask for the update whose line of metrics.jsonl is unusual",
    UNCLEAR: "run again with `checkpoint_every: 10` and `checkpoints_kept: 20`, then ask again",
}


@dataclass(frozen=True)
class Values:
    """One signal of the batch and of its neighbours in the data, with the same weights."""

    batch: float
    before: tuple[float, ...]
    after: tuple[float, ...]
    kind: Kind = _LOSS

    @property
    def usual(self) -> float:
        return self._found[0]

    @property
    def limit(self) -> float:
        return self._found[1]

    @property
    def unusual(self) -> bool:
        """Above the limit of its neighbours; not finite where they are."""
        if math.isnan(self.limit):
            return False
        return not math.isfinite(self.batch) or self.batch > self.limit

    @property
    def _found(self) -> tuple[float, float]:
        before = [one for one in self.before if math.isfinite(one)]
        after = [one for one in self.after if math.isfinite(one)]
        return limit_of(before if len(before) >= FEWEST else [*before, *after], self.kind)


@dataclass(frozen=True)
class Replay:
    """The batch with the weights of one state.

    state   where the weights are from
    met     the batch met these very weights
    norms   of gradients, where the record's loss does not show the spike
    """

    state: str
    update: int
    losses: Values
    norms: Values | None = None
    met: bool = False

    @property
    def unusual(self) -> bool:
        return self.losses.unusual or (self.norms is not None and self.norms.unusual)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"state": self.state, "update": self.update, "met": self.met}
        signals = {"loss": self.losses} | ({} if self.norms is None else {"grad_norm": self.norms})
        for name, one in signals.items():
            found[name] = {"batch": one.batch, "usual": one.usual, "limit": one.limit}
        return found | {"unusual": self.unusual}


@dataclass(frozen=True)
class Record:
    """What metrics.jsonl says of the update. signal: the unusual one, or ""."""

    attempt: int
    loss: float | None
    signal: str = ""
    value: float = math.nan
    usual: float = math.nan
    limit: float = math.nan
    skipped: bool = False
    long_step: int = 0  # an update shortly before that moved the weights unusually far


@dataclass(frozen=True)
class Bits:
    """The same updates again, compared with their lines of metrics.jsonl bit for bit.

    since        update of the state from which they were computed again
    departure    first update that came out differently; 0 = all are the same
    repeats      a second replay gave the bits of the first; None = there was no need for one
    environment  what is not as it was: then nothing can be compared
    changed      tensors of the state that training from an older one does not give;
                 None = that was not compared
    """

    since: int = 0
    departure: int = 0
    repeats: bool | None = None
    environment: tuple[str, ...] = ()
    changed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Row:
    """A row of the batch, alone, and the middle one of the batch's other rows."""

    origin: str
    loss: float
    others: float


@dataclass(frozen=True)
class Spike:
    """What the playbook found. `untrained`: the stage began from random weights."""

    stage: str
    update: int
    record: Record
    replays: tuple[Replay, ...]
    bits: Bits
    rows: tuple[Row, ...] = ()
    rows_with: str = ""
    untrained: bool = False
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return verdict(self.record, self.replays, self.bits, self.untrained)

    def as_json(self) -> dict[str, Any]:
        """The object of `lehr doctor RUN --spike N --json`; numbers that are none are null."""
        return _strict(
            {
                "stage": self.stage,
                "update": self.update,
                "attempt": self.record.attempt,
                "verdict": self.verdict,
                "meaning": MEANING[self.verdict],
                "remedy": REMEDY[self.verdict],
                "record": asdict(self.record),
                "bits": asdict(self.bits),
                "replays": [one.as_json() for one in self.replays],
                "rows": [asdict(one) for one in self.rows],
                "notes": list(self.notes),
            }
        )


def limit_of(values: Sequence[float], kind: Kind = _LOSS, tail: bool = True) -> tuple[float, float]:
    """(usual, limit) of a value beside finite `values`; NaN where they are too few.

    tail  half of a jump would have been new already (`lehr.training.robust`); without it an
          earlier spike among the values does not excuse this one

    >>> usual, limit = limit_of([1.0, 1.2] * 6)
    >>> round(usual, 3), round(limit, 3)
    (1.1, 2.088)
    """
    if kind.logarithm:
        values = [math.log(value) for value in values if value > 0]
    if len(values) < FEWEST:
        return math.nan, math.nan
    usual = median(values)
    noise = max(spread(values, usual), kind.absolute, kind.relative * abs(usual))
    allowed = LIMIT * (1 + WARM / len(values)) * noise
    if tail:
        allowed = max(allowed, TAIL * (max(values) - usual))
    found = (usual, usual + allowed)
    return (math.exp(found[0]), math.exp(found[1])) if kind.logarithm else found


def norms(batch: float, before: Sequence[float], after: Sequence[float]) -> Values:
    """Values of gradient norms: their noise is a factor."""
    return Values(batch, tuple(before), tuple(after), _NORM)


def recorded(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Record:
    """What the line of an update shows beside the lines of applied updates before it."""
    attempt = int(row["attempt"])
    past = [one for one in rows if int(one["attempt"]) < attempt and not one["skipped"]]
    base = Record(attempt, row.get("loss"), skipped=bool(row["skipped"]))
    base = replace(base, long_step=_long_step(past))
    if row.get("guard.signal"):
        value, usual, limit = (float(row[f"guard.{name}"]) for name in ("value", "usual", "limit"))
        signal = str(row["guard.signal"])
        return replace(base, signal=signal, value=value, usual=usual, limit=limit)
    if row["skipped"] or "loss" in row.get("nonfinite", ()):
        return replace(base, signal="not finite")
    for name, column, kind in (("loss", "loss", _LOSS), ("gradient norm", "grad_norm", _NORM)):
        known = [float(one[column]) for one in past[-NEAR:] if one.get(column) is not None]
        usual, limit = limit_of(known, kind, tail=False)
        value = math.nan if row.get(column) is None else float(row[column])
        if value > limit:
            return replace(base, signal=name, value=value, usual=usual, limit=limit)
    return base


def _long_step(past: Sequence[Mapping[str, Any]]) -> int:
    """The newest of the last few updates whose step was unusually long, or 0."""
    lengths = [
        (int(one["update"]), float(one["update_norm"]) / float(one["learning_rate"]))
        for one in past[-128:]
        if one.get("update_norm") and one.get("learning_rate")
    ]
    for place in range(len(lengths) - 1, max(FEWEST, len(lengths) - BEFORE) - 1, -1):
        _, limit = limit_of([length for _, length in lengths[:place]], _NORM, tail=False)
        if lengths[place][1] > limit:
            return lengths[place][0]
    return 0


def bad_state(met: Replay, others: Sequence[Replay]) -> bool:
    """Whether the met weights are worse for the neighbours than the best of the others.

    Training lowers the loss of what lies before the batch: most of it risen means damage.
    """
    if not all(math.isfinite(one) for one in met.losses.before):
        return True
    usable = [one for one in others if all(math.isfinite(x) for x in one.losses.before)]
    if not usable or not met.losses.before:
        return False
    best = min(usable, key=lambda one: median(one.losses.before))
    pairs = list(zip(met.losses.before, best.losses.before, strict=True))
    rises = [now - then for now, then in pairs]
    allowed = max(RISE_ABSOLUTE, RISE_RELATIVE * abs(median(best.losses.before)))
    return median(rises) > allowed and sum(one > 0 for one in rises) >= MOST * len(rises)


def knowing(replays: Sequence[Replay], untrained: bool) -> list[Replay]:
    """The states beside the met one that can tell usual rows from unusual ones."""
    others = [one for one in replays if not one.met]
    if not untrained:
        return others
    begin = next((one.losses.usual for one in others if one.update == 0), math.nan)
    return [one for one in others if one.update and one.losses.usual < KNOWS * begin]


def verdict(record: Record, replays: Sequence[Replay], bits: Bits, untrained: bool = False) -> str:
    """The cause, by the table at the head of this file."""
    if bits.departure or bits.repeats is False:
        return BITS
    others = [one for one in replays if not one.met]
    met = next((one for one in replays if one.met), None)
    wise = knowing(replays, untrained)
    bad = met is not None and bad_state(met, others)
    unusual = [one.unusual for one in wise]
    if unusual and all(unusual):
        return BOTH if bad else DATA
    if any(unusual):
        return BOTH
    if bad:
        return STATE
    if any(one.unusual for one in others):  # of untrained weights: even those are surprised
        return DATA
    if met is not None and met.unusual:
        return BOTH if wise else UNCLEAR
    return UNCLEAR if record.signal else NOTHING


def worst(rows: Mapping[str, float], count: int = 3) -> tuple[Row, ...]:
    """The rows with the largest losses; one that is not finite comes first."""
    order = sorted(rows, key=lambda name: -rows[name] if math.isfinite(rows[name]) else -math.inf)
    found = []
    for name in order[:count]:
        rest = [value for other, value in rows.items() if other != name and math.isfinite(value)]
        found.append(Row(name, rows[name], median(rest) if rest else math.nan))
    return tuple(found)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _strict(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return value
