"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

Minimise −log σ(β[(log π(y_w|x) − log π_ref(y_w|x)) − (log π(y_l|x) − log π_ref(y_l|x))]).

The reference π_ref is the frozen state that the stage began from: its numbers are
computed once, from the same weights through `model.as_of`, in the same packs' layout,
and kept on disk. Before the first update both policies are one, so the loss is ln 2:
that is asserted, because every wrong reference shows itself there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lehr.data.packing import pack
from lehr.data.shapes import Encoded
from lehr.errors import RecipeError
from lehr.objectives.preference import Dpo, check_starts_at_reference, dpo_loss
from lehr.stages.context import StageContext, train
from lehr.streams import content_hash
from lehr.training.progress import TrainingResult

REFERENCE_FILE = "reference.json"

Reference = dict[int, tuple[float, float]]
LOSSES = {"dpo": Dpo}


def preference(context: StageContext) -> TrainingResult:
    """Train on pairs against the frozen state of the stage's beginning."""
    stage = context.stage
    reference = reference_log_probabilities(context)
    objective = LOSSES[stage.loss](
        beta=stage.beta, label_smoothing=stage.label_smoothing, reference=reference
    )
    precision = "fp32" if context.model.compute_dtype == torch.float32 else "bf16"

    def starts_at_reference(event: Any) -> None:
        row = getattr(event, "row", None)
        if row is not None and row.get("update") == 1 and row.get("loss") is not None:
            try:
                check_starts_at_reference(row["loss"], precision)
            except RecipeError:
                (context.folder / REFERENCE_FILE).unlink(missing_ok=True)  # not trusted again
                raise

    return train(context, objective, starts_at_reference)


def reference_log_probabilities(context: StageContext) -> Reference:
    """log π_ref of both answers of every pair, by dataset item; from disk where it stands."""
    items = context.batches.items()
    key = content_hash(
        [context.parent_key, context.model.compute_dtype, [_fingerprint(one) for _, one in items]]
    )
    path = context.folder / REFERENCE_FILE
    stored = _read(path, key)
    if stored is not None:
        return stored
    reference = log_probabilities(
        context.model, items, context.parent, context.pack_length, context.stage.packing
    )
    rows = [[item, *pair] for item, pair in reference.items()]
    path.write_text(json.dumps({"key": key, "hash": content_hash(rows), "reference": rows}))
    return reference


def log_probabilities(
    model: Any,
    items: list[tuple[int, Encoded]],
    state: Any,
    pack_length: int,
    packing: bool = True,
) -> Reference:
    """Summed log-probability of the chosen and the rejected answer of each pair, under `state`."""
    with torch.no_grad(), model.as_of(state):
        model.eval()
        return _summed(model, items, pack_length, packing)


def _summed(
    model: Any, items: Sequence[tuple[int, Encoded]], pack_length: int, packing: bool
) -> Reference:
    """As `log_probabilities`, under the model as it is."""
    found: Reference = {}
    for one in pack(items, pack_length, packing):
        stats = model.token_stats(model.hidden(one), one.predict_from, one.targets)
        sums = one.sequence_sum(stats.log_probability.double().cpu())
        for place, item in enumerate(one.items):
            chosen, rejected = sums[one.sequence_example == place].tolist()
            found[item] = (chosen, rejected)
    return found


class HeldoutLoss:
    """The stage's own loss on held-out pairs: what best and early stop minimise.

    The likelihood of the pairs' answers would not do: a better policy makes half of them
    less likely. The reference of these pairs is computed at the first call.
    """

    def __init__(self, model: Any, pairs: Sequence[Encoded], parent: Any, stage: Any) -> None:
        self.model, self.parent, self.stage = model, parent, stage
        self.items = list(enumerate(pairs))
        self.pack_length = int(stage.pack_length or stage.max_length)
        self._reference: Tensor | None = None

    def __call__(self) -> float:
        if self._reference is None:
            found = log_probabilities(
                self.model, self.items, self.parent, self.pack_length, self.stage.packing
            )
            self._reference = torch.tensor([found[item] for item, _ in self.items]).double()
        with torch.no_grad():
            now = _summed(self.model, self.items, self.pack_length, self.stage.packing)
        ratios = torch.tensor([now[item] for item, _ in self.items]).double() - self._reference
        stage = self.stage
        return float(dpo_loss(ratios[:, 0], ratios[:, 1], stage.beta, stage.label_smoothing).mean())


def _fingerprint(encoded: Encoded) -> list[list[int]]:
    return [encoded.ids.tolist(), *(branch.ids.tolist() for branch in encoded.branches)]


def _read(path: Any, key: str) -> Reference | None:
    try:
        stored = json.loads(path.read_text())
        rows = stored["reference"]
        if stored["key"] != key or stored["hash"] != content_hash(rows):
            return None
        return {int(item): (chosen, rejected) for item, chosen, rejected in rows}
    except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: computed again
        return None
