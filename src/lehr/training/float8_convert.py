"""FP8 put on a model and taken off again, and what an engine calls around each update.

fp8 = convert(model, settings)            # before update 1; str(fp8) lists every layer
... backward passes ...
fp8.skipped()  |  events = fp8.applied(update)
with fp8.off(): ...                       # evaluation of what will be exported
fp8.restore()                             # before folding, saving, export
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lehr.errors import Diverged, Problem, RecipeError
from lehr.training.events import Event
from lehr.training.float8_linear import FLOAT8_CLASSES, LayerFloat8
from lehr.training.float8_recipe import Float8Settings, LayerChoice, select
from lehr.training.float8_scaling import Health
from lehr.training.metrics import gather


@dataclass(frozen=True)
class LayerFellBack(Event):
    """From update `update` + 1 on, `layer` computes in high precision.

    operand  input | weight | gradient      measure  sqnr_db | underflow | saturation
    value    what was measured last, outside `limit` for `updates_sick` measured updates
    """

    update: int
    layer: str
    operand: str
    measure: str
    value: float
    limit: float
    updates_sick: int

    def __str__(self) -> str:
        return (
            f"update {self.update}: {self.layer} left FP8, because {self.measure} of its "
            f"{self.operand} was {self.value:.3g} (limit {self.limit:g}) "
            f"{self.updates_sick} measurements in a row"
        )


def convert(
    model: nn.Module,
    settings: Float8Settings,
    device: str = "cpu",
    capability: tuple[int, int] | None = None,
) -> Float8Conversion:
    """Make the chosen linear layers of `model` compute in FP8, in place.

    device, capability  of the device that trains; shapes and hardware are refused by it
    Adapters are attached before, and taken off after `restore`.

    Raises RecipeError, with all problems and the model unchanged, for bad settings, a
    contradiction with the hardware, patterns that match nothing, or a model already converted.
    """
    settings = settings.on(device)
    if problems := settings.problems(device, capability):
        raise RecipeError(problems)
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if type(module) in FLOAT8_CLASSES.values():
            raise RecipeError(Problem(name, "a model that is not converted to FP8 already"))
        if type(module) in FLOAT8_CLASSES and isinstance(module, nn.Linear):
            layers[name] = module
    choices = select(model, settings, layers, device)
    return Float8Conversion(settings, choices, layers)


class Float8Conversion:
    """A model in FP8: its layers, their health, and everything that a resume needs.

    choices  the verdict for every linear layer
    layers   names of those in FP8
    """

    def __init__(
        self,
        settings: Float8Settings,
        choices: list[LayerChoice],
        modules: Mapping[str, nn.Linear],
    ) -> None:
        self.settings, self.choices = settings, choices
        self.layers = tuple(choice.name for choice in choices if choice.converted)
        self._modules = {name: modules[name] for name in self.layers}
        self._classes = {name: type(module) for name, module in self._modules.items()}
        self._sides = {name: LayerFloat8(name, settings) for name in self.layers}
        self._fallen: dict[str, LayerFellBack] = {}
        self._sick: dict[str, int] = {}  # "layer operand measure" -> measurements in a row
        self._health: dict[str, dict[str, Health]] = {}
        self._measured_now = False  # in the newest applied update
        for name, module in self._modules.items():
            # Another class on the same object: parameters, hooks, ties and the references that
            # others hold stay what they are.
            module.float8 = self._sides[name]  # type: ignore[assignment]
            module.__class__ = FLOAT8_CLASSES[type(module)]

    def __str__(self) -> str:
        head = f"FP8 in {len(self.layers)} of {len(self.choices)} linear layers"
        return "\n".join([head, *map(str, self.choices)])

    @property
    def active(self) -> tuple[str, ...]:
        """Layers that compute in FP8 now: those that have not fallen back."""
        return tuple(name for name in self.layers if name not in self._fallen)

    @property
    def fallen(self) -> tuple[LayerFellBack, ...]:
        """Layers that fell back, in order."""
        return tuple(self._fallen.values())

    def flagged(self) -> tuple[str, ...]:
        """`input of <layer>` and the like where this update saw infinities or NaN, on this rank.

        The numbers themselves go on as NaN or inf, so that loss or gradient shows them too.
        """
        return tuple(
            f"{operand} of {name}"
            for name, side in self._sides.items()
            for operand, bad in side.nonfinite.items()
            if bool(bad)
        )

    def skipped(self) -> None:
        """The update was not applied: nothing that it saw counts."""
        for side in self._sides.values():
            side.forget()

    def applied(self, update: int) -> tuple[LayerFellBack, ...]:
        """Update number `update` (from 1) was applied: histories move, sick layers fall back.

        Every rank calls it, with the same result. Raises Diverged where no layer is left in
        FP8: then the run is not what was asked for.
        """
        self._advance()
        self._measured_now = self._measuring
        events = self._measure(update) if self._measuring else ()
        for side in self._sides.values():
            side.forget()
            side.measuring = update % self.settings.measure_every == 0
        if events and not self.active:
            expected = "a layer that stays healthy in FP8; use bf16, or another scaling"
            raise Diverged([Problem(event.layer, expected, str(event)) for event in events])
        return events

    @property
    def _measuring(self) -> bool:
        return any(side.measuring for side in self._sides.values())

    def _advance(self) -> None:
        mine = {
            name: {operand: history.pending() for operand, history in side.histories.items()}
            for name, side in self._sides.items()
            if side.histories
        }
        if not mine:
            return
        parts = gather(mine)
        for name in mine:
            for operand, history in self._sides[name].histories.items():
                seen = [part[name][operand] for part in parts if part[name][operand] is not None]
                history.advance(max(seen) if seen else None)

    def _measure(self, update: int) -> tuple[LayerFellBack, ...]:
        mine = {
            name: {operand: sums.tolist() for operand, sums in self._sides[name].sums.items()}
            for name in self.active
        }
        parts = gather(mine)
        events = []
        self._health = {}
        for name in mine:
            operands = dict.fromkeys(operand for part in parts for operand in part[name])
            health = {
                operand: Health.of(
                    torch.tensor(
                        [part[name][operand] for part in parts if operand in part[name]],
                        dtype=torch.float64,
                    ).sum(0)
                )
                for operand in operands
            }
            self._health[name] = health
            event = self._judge(update, name, health)
            if event is not None:
                self._fall(event)
                events.append(event)
        return tuple(events)

    def _judge(self, update: int, name: str, health: Mapping[str, Health]) -> LayerFellBack | None:
        limits = self.settings.limits
        verdict = None
        for operand, seen in health.items():
            for measure in ("saturation", "underflow", "sqnr_db"):
                value, limit = getattr(seen, measure), getattr(limits, measure)
                key = f"{name} {operand} {measure}"
                outside = value < limit if measure == "sqnr_db" else value > limit
                self._sick[key] = self._sick.get(key, 0) + 1 if outside else 0
                count = self._sick[key]
                if count >= limits.patience and verdict is None:
                    verdict = LayerFellBack(update, name, operand, measure, value, limit, count)
        return verdict

    def _fall(self, event: LayerFellBack) -> None:
        self._fallen[event.layer] = event
        self._sides[event.layer].active = False
        self._sick = {k: n for k, n in self._sick.items() if k.split(" ")[0] != event.layer}

    def health(self) -> dict[str, dict[str, Health]]:
        """Per layer and operand, of the last measured update."""
        return {name: dict(operands) for name, operands in self._health.items()}

    def metrics(self) -> dict[str, float]:
        """Columns for metrics.jsonl: layers in FP8, and the worst numbers where this update was
        measured: a resumed run has the same lines."""
        casts = [seen for operands in self._health.values() for seen in operands.values()]
        columns = {"fp8.layers": float(len(self.active))}
        if casts and self._measured_now:
            columns["fp8.worst_sqnr_db"] = min(seen.sqnr_db for seen in casts)
            columns["fp8.worst_underflow"] = max(seen.underflow for seen in casts)
            columns["fp8.worst_saturation"] = max(seen.saturation for seen in casts)
        return columns

    @contextmanager
    def off(self) -> Iterator[None]:
        """High precision inside: what an export of these weights computes."""
        for side in self._sides.values():
            side.active = False
        try:
            yield
        finally:
            for name, side in self._sides.items():
                side.active = name not in self._fallen

    def restore(self) -> None:
        """Give every layer its own class back; weights stay as trained."""
        for name, module in self._modules.items():
            if "float8" in module.__dict__:
                del module.float8
                module.__class__ = self._classes[name]

    def state(self) -> dict[str, Any]:
        """Everything a resume needs, as JSON; scales are derived again from the histories."""
        return {
            "layers": {
                name: {
                    "measuring": side.measuring,
                    "histories": {o: history.state() for o, history in side.histories.items()},
                }
                for name, side in self._sides.items()
            },
            "sick": {key: count for key, count in self._sick.items() if count},
            "fallen": [asdict(event) for event in self._fallen.values()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave. Raises RecipeError for the state of another conversion."""
        stored = state.get("layers", {})
        if set(stored) != set(self.layers):
            differ = ", ".join(sorted(set(stored) ^ set(self.layers))[:4])
            expected = "the FP8 layers of the checkpoint; the model or the fp8 settings changed"
            raise RecipeError(Problem("float8 state", expected, differ))
        for name, side in self._sides.items():
            side.forget()
            side.measuring = bool(stored[name]["measuring"])
            if set(stored[name]["histories"]) != set(side.histories):
                found = ", ".join(stored[name]["histories"]) or "no histories"
                expected = f"a state of {self.settings.scaling} scaling"
                raise RecipeError(Problem(f"float8 state of {name}", expected, found))
            for operand, history in side.histories.items():
                history.load(stored[name]["histories"][operand], f"{operand} of {name}")
            side.active = True
        self._sick = {key: int(count) for key, count in state.get("sick", {}).items()}
        self._fallen, self._health, self._measured_now = {}, {}, False
        for event in state.get("fallen", ()):
            self._fallen[event["layer"]] = LayerFellBack(**event)
            self._sides[event["layer"]].active = False
