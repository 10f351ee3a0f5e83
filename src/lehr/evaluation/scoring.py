"""Scoring a state on suites, once: per-item scores are kept on disk under all that made them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lehr.errors import LehrError, Problem
from lehr.evaluation.suites import ItemScore, Stamp, Suite, stamp_of
from lehr.streams import content_hash

FORMAT = 1


@dataclass(frozen=True)
class Scores:
    """The scores of one state on one suite, with what makes them comparable."""

    state_key: str
    stamp: Stamp
    rows: tuple[ItemScore, ...] = ()

    def of(self, measure: str, items: Sequence[str] | None = None) -> list[ItemScore]:
        """Scores under one measure, of `items` only where they are given."""
        wanted = None if items is None else set(items)
        return [
            row
            for row in self.rows
            if row.measure == measure and (wanted is None or row.id in wanted)
        ]


def comparable(before: Scores, after: Scores) -> None:
    """Raises LehrError where two scores differ in data, scorer, unit or template."""
    differing = before.stamp.differences(after.stamp)
    if differing:
        raise LehrError(
            [
                Problem(
                    f"suite {after.stamp.suite}",
                    f"scores with the same {name} (scored before: {getattr(before.stamp, name)!r})",
                    getattr(after.stamp, name),
                )
                for name in differing
            ]
        )


@dataclass
class ScoreStore:
    """Per-item scores as JSON lines, one file for each (state, suite stamp).

    Items are added as they are asked for, so a gate that looks again pays for new items
    only. A file that is cut or damaged counts as absent.
    """

    folder: Path
    _open: dict[str, tuple[set[str], list[ItemScore]]] = field(default_factory=dict, repr=False)

    def score(
        self,
        model: Any,
        suite: Suite,
        encoder: Any,
        state_key: str,
        items: Sequence[str] | None = None,
    ) -> Scores:
        """Scores of `items` (default: all) of the state that `model` is in now.

        state_key must name that state's weights: everything the score depends on besides
        the suite and the encoder. Only items that were never scored are run.
        """
        stamp = stamp_of(suite, encoder)
        wanted = list(suite.items if items is None else items)
        done, rows = self._load(state_key, stamp)
        missing = [item for item in wanted if item not in done]
        if missing:
            fresh = suite.score(model, missing, encoder)
            _refuse_bad_rows(suite, fresh)
            self._append(state_key, stamp, missing, fresh)
            done.update(missing)
            rows.extend(fresh)
        chosen = set(wanted)
        return Scores(state_key, stamp, tuple(row for row in rows if row.id in chosen))

    def known(
        self, suite: Suite, encoder: Any, state_key: str, items: Sequence[str] | None = None
    ) -> bool:
        """Whether all of `items` were scored before: then no model is needed."""
        done, _ = self._load(state_key, stamp_of(suite, encoder))
        return done.issuperset(suite.items if items is None else items)

    def path(self, state_key: str, stamp: Stamp) -> Path:
        """Where the scores of this state under this stamp are kept."""
        name = content_hash([FORMAT, state_key, stamp.key])[:32]
        return self.folder / f"{stamp.suite.replace('/', '_')}-{name}.jsonl"

    def _load(self, state_key: str, stamp: Stamp) -> tuple[set[str], list[ItemScore]]:
        path = self.path(state_key, stamp)
        if path.name not in self._open:
            self._open[path.name] = _read(path)
        return self._open[path.name]

    def _append(
        self, state_key: str, stamp: Stamp, items: Sequence[str], rows: Sequence[ItemScore]
    ) -> None:
        """Write the whole file anew beside the old one, then rename: complete or absent."""
        done, before = self._load(state_key, stamp)
        header = {"format": FORMAT, "state": state_key, "stamp": asdict(stamp)}
        lines = [json.dumps(header, ensure_ascii=True)]
        lines += [json.dumps(_plain(row), ensure_ascii=True) for row in (*before, *rows)]
        # Items without a score (dropped by the encoder) are remembered too.
        lines.append(json.dumps({"scored": sorted({*done, *items})}, ensure_ascii=True))
        path = self.path(state_key, stamp)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        with aside.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write("\n".join(lines) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)


def score_state(
    model: Any,
    suites: Sequence[Suite],
    encoder: Any,
    store: ScoreStore | None = None,
    state_key: str = "",
    items: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Scores]:
    """Scores of the state that `model` is in, by suite; from `store` where it has them.

    items: by suite name, the items to score (default: all).
    """
    chosen = items or {}
    results = {}
    for suite in suites:
        wanted = chosen.get(suite.name)
        if store is not None:
            results[suite.name] = store.score(model, suite, encoder, state_key, wanted)
        else:
            rows = suite.score(model, list(suite.items if wanted is None else wanted), encoder)
            _refuse_bad_rows(suite, rows)
            results[suite.name] = Scores(state_key, stamp_of(suite, encoder), tuple(rows))
    return results


def _refuse_bad_rows(suite: Suite, rows: Sequence[ItemScore]) -> None:
    """A suite that scores under an unknown measure, or by a number that is none, is a bug."""
    for row in rows:
        if row.suite != suite.name or row.measure not in suite.measures:
            raise ValueError(f"suite {suite.name} scored {row.id!r} as {row.suite}.{row.measure}")
        if not (math.isfinite(row.value) and math.isfinite(row.weight)):
            raise ValueError(f"{row.suite}.{row.measure} of {row.id!r} is not finite")


def _plain(row: ItemScore) -> dict[str, Any]:
    return asdict(row)


def _read(path: Path) -> tuple[set[str], list[ItemScore]]:
    if not path.exists():
        return set(), []
    rows: list[ItemScore] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        if json.loads(lines[0]).get("format") != FORMAT:
            return set(), []
        for line in lines[1:]:
            record = json.loads(line)
            if "scored" in record:
                return set(record["scored"]), rows
            rows.append(ItemScore(**record))
    except (ValueError, TypeError, AttributeError, IndexError):
        pass
    # Without its last line the file is not whole: all of it is scored again.
    return set(), []
