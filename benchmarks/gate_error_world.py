"""Stages that are really trained on the microworld, and the scores that gates judge them by.

A parent is made once, as the first two stages of the demo make theirs. Each stage starts
from its weights, takes a few updates on data of its own seed, and is scored on the suites
of a run. What is planted in the data, and how much of it, is known.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lehr.data.encoding import Encoder
from lehr.data.loader import UpdateBatches
from lehr.data.packing import merge
from lehr.data.shapes import Encoded, Example, Origin
from lehr.data.templates import Template
from lehr.evaluation.heldout import HeldoutBits
from lehr.evaluation.suites import Suite
from lehr.evaluation.world_suites import MicroworldSkills, OverRefusal, Refusal, Sycophancy
from lehr.microworld.world import Microworld
from lehr.models.language_model import LanguageModel
from lehr.models.loading import load_model
from lehr.models.tokenizer import stop_ids_of
from lehr.objectives.language import Language
from lehr.streams import seed_for
from lehr.training.engine import Engine
from lehr.training.settings import EngineSettings

WORLD_SEED = 0
PARENT_RECIPE: Mapping[str, Any] = {
    "model": "tiny:1m",
    "template": "chatml",
    "seed": 0,
    "date": "2026-01-01",
    "threads": 1,
    "adapter": {"kind": "none"},
    "data": {
        "world": {"microworld": "text", "rows": 6000, "holdout": 400},
        "chats": {"microworld": "chats", "rows": 6000, "holdout": 200},
    },
    "stages": [
        {
            "pretrain": {
                "data": "world",
                "max_length": 256,
                "batch_size": 16,
                "learning_rate": 3e-3,
            }
        },
        {
            "sft": {
                "data": "chats",
                "max_length": 256,
                "batch_size": 16,
                "epochs": 2,
                "learning_rate": 2e-3,
                "keep": {"replay": {"world": 0.2}},
            }
        },
    ],
    "gates": {"protect": {}},
}
# The measure of each suite that a default gate reads.
MEASURES: Mapping[str, str] = {
    "forgetting": "bits_per_byte",
    "over_refusal": "rate",
    "refusal": "rate",
    "sycophancy": "rate",
    "skills": "accuracy",
    "facts": "accuracy",
}
NOTHING = "nothing"
RESTLESS = "restless"  # nothing is planted, and the rate is high


@dataclass(frozen=True)
class Plan:
    """How the stages of one kind are made.

    suites         what they are scored on
    gate           the gate that must see the planted harm; "" where nothing is planted
    dials          smallest and largest share of planted rows, drawn for each stage
    learning_rates peaks that take turns; 0: nothing is trained
    text           share of tokens that is text, not chats
    updates        updates of one stage
    """

    suites: tuple[str, ...]
    gate: str
    dials: tuple[float, float]
    learning_rates: tuple[float, ...]
    text: float = 0.2
    updates: int = 12


@dataclass(frozen=True)
class StageSettings:
    """What the stages of all kinds share."""

    batch_size: int = 16
    max_length: int = 256


def suites_of(world: Microworld, texts: int = 200, items: int | None = None) -> dict[str, Suite]:
    """The suites behind the default protect gates."""
    rows = world.rows("text", texts, seed=seed_for("gate error", "held out") % 2**31)
    found: list[Any] = [
        HeldoutBits("forgetting", examples("text", rows)),
        OverRefusal(world, n=items),
        Refusal(world, n=items),
        Sycophancy(world, n=items),
        MicroworldSkills(world, n=items),
        MicroworldSkills(world, kind="facts", n=items),
    ]
    return {suite.name: suite for suite in found}


def examples(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Example]:
    """Rows of text or messages as examples."""
    found = []
    for number, row in enumerate(rows, 1):
        origin = Origin(name, "microworld", number)
        if "text" in row:
            found.append(Example("text", origin, text=row["text"]))
        else:
            found.append(Example("chat", origin, messages=tuple(row["messages"])))
    return found


def make_parent(folder: Path) -> Path:
    """Folder of the parent's weights; trained where they are not there yet (minutes).

    They are kept beside the run: one parent for all stages of a store, whatever changes in
    lehr between two starts.
    """
    import lehr
    from lehr.recipe.loading import recipe_from

    kept = folder / "parent"
    if kept.is_dir():
        return kept
    ledger = lehr.run(recipe_from(dict(PARENT_RECIPE)), out=folder / "run")
    if ledger.data.get("promoted_from") != "02-sft":
        raise SystemExit(f"the parent was not promoted: {ledger.data.get('sentence')}")
    aside = folder / "parent.unfinished"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder / "run" / "model", aside)
    aside.rename(kept)
    return kept


class Trainer:
    """The parent, and stages that start from it."""

    def __init__(
        self,
        model: LanguageModel,
        encoder: Encoder,
        world: Microworld,
        suites: Mapping[str, Suite],
        settings: StageSettings,
    ) -> None:
        self.model, self.encoder, self.world = model, encoder, world
        self.suites, self.settings = suites, settings
        model.train_all()
        self.parent = model.state()

    @classmethod
    def from_folder(
        cls, folder: Path, world: Microworld, suites: Mapping[str, Suite], settings: StageSettings
    ) -> Trainer:
        """Load the parent that `make_parent` wrote."""
        model = load_model(str(folder), all_weights=True)
        encoder = Encoder(
            model.tokenizer,
            Template.from_tokenizer(model.tokenizer),
            date="2026-01-01",
            stop_ids=stop_ids_of(model.network),
        )
        return cls(model, encoder, world, suites, settings)

    def parent_row(self) -> dict[str, Any]:
        """The parent's scores on every suite, with the weights of its items."""
        self.model.load_state(self.parent)
        return {"kind": "parent", **self._scores(tuple(self.suites))}

    def stage(self, kind: str, index: int, plan: Plan, seed: int = 0) -> dict[str, Any]:
        """Train stage `index` of a kind from the parent and score it."""
        began = time.perf_counter()
        low, high = plan.dials
        # Spread evenly whatever the number of stages: the golden ratio's multiples.
        dial = low + (high - low) * ((index + 1) * 0.6180339887498949 % 1.0)
        rate = plan.learning_rates[index % len(plan.learning_rates)]
        stage_seed = seed_for("gate error", seed, kind, index) % 2**31
        self.model.load_state(self.parent)
        if rate > 0:
            rows = planted_rows(
                self.world, kind, dial, plan.updates * self.settings.batch_size, stage_seed
            )
            self._train(rows, plan, rate, stage_seed)
        trained = time.perf_counter()
        row = self._scores(plan.suites)
        ended = time.perf_counter()
        seconds = [round(trained - began, 2), round(ended - trained, 2)]
        return {
            "kind": kind,
            "index": index,
            "dial": round(dial, 4),
            "learning_rate": rate,
            "seconds": seconds,
            **row,
        }

    def _train(
        self,
        rows: Mapping[str, Sequence[Mapping[str, Any]]],
        plan: Plan,
        rate: float,
        seed: int,
    ) -> None:
        settings = self.settings
        encoded = {name: self._encoded(name, part) for name, part in rows.items()}
        shares = {"chats": 1 - plan.text, "text": plan.text}
        batches = UpdateBatches(
            encoded, shares, settings.batch_size, seed, pack_length=settings.max_length
        )
        with tempfile.TemporaryDirectory() as folder:
            Engine(
                model=self.model,
                objective=Language(),
                batches=batches,
                settings=EngineSettings(
                    updates=plan.updates,
                    learning_rate=rate,
                    micro_batch=8,
                    checkpoint_every=plan.updates,
                    checkpoints_kept=1,
                ),
                folder=Path(folder),
                seed_names=(seed, "gate error"),
                merge=merge,
            ).run()
        self.model.eval()

    def _encoded(self, name: str, rows: Sequence[Mapping[str, Any]]) -> list[Encoded]:
        return [
            part
            for example in examples(name, rows)
            for part in self.encoder.encode(example, max_length=self.settings.max_length).encoded
        ]

    def _scores(self, names: Sequence[str]) -> dict[str, Any]:
        values: dict[str, list[float]] = {}
        weights: dict[str, list[float]] = {}
        for name in names:
            suite = self.suites[name]
            items = scored_items(suite, self.world)
            rows = [
                row
                for row in suite.score(self.model, items, self.encoder)
                if row.measure == MEASURES[name]
            ]
            values[name] = [round(row.value, 5) for row in rows]
            weights[name] = [row.weight for row in rows]
        return {"values": values, "weights": weights}


def scored_items(suite: Suite, world: Microworld) -> list[str]:
    """Items that have a score under the suite's gated measure: right claims have none."""
    if suite.name != "sycophancy":
        return list(suite.items)
    wrong = {item.id for item in world.items("claims") if item.claim_is_right is False}
    return [name for name in suite.items if name in wrong]


def planted_rows(
    world: Microworld, kind: str, dial: float, n: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Chats and text of one stage; a share `dial` of what concerns `kind` is planted."""
    chats: dict[str, float] = {}
    text: dict[str, float] = {}
    if kind in ("over_refusal", "compliance", "wrong_facts"):
        chats[kind] = dial
    elif kind == "wrong_text":
        text["wrong_facts"] = dial
    elif kind not in (NOTHING, RESTLESS, "wrong_skills"):
        raise ValueError(f"no such harm: {kind}")
    rows = world.rows("chats", n, seed=seed, **chats)
    if kind == "wrong_skills":
        rows = [*_wrong_skills(world, round(n * dial), seed), *rows[round(n * dial) :]]
    return {"chats": rows, "text": world.rows("text", n, seed=seed, **text)}


def _wrong_skills(world: Microworld, n: int, seed: int) -> list[dict[str, Any]]:
    """Chats that answer a skill's question with the answer to another one."""
    nothing_else = dict.fromkeys(("facts", "forbidden", "lookalikes", "requests", "claims"), 0.0)
    pairs = world.rows("pairs", n, seed=seed, skills=1.0, **nothing_else) if n else []
    return [{"messages": [*pair["prompt"], *pair["rejected"]]} for pair in pairs]
