"""What plan.json says of a plan that is settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lehr.models.nf4 import parameter_count
from lehr.pipeline.four_bits import model_keys
from lehr.pipeline.staging import PlannedStage
from lehr.recipe.loading import recipe_hash
from lehr.training.restarts import Restarts


def plan_entries(
    recipe: Any,
    stages: Sequence[PlannedStage],
    bench: Any,
    machine: Mapping[str, Any],
    precision: Mapping[str, Any],
) -> dict[str, Any]:
    model = bench.model
    chats = bool(getattr(model.tokenizer, "chat_template", None))
    return {
        "recipe_hash": recipe_hash(recipe),
        "date": recipe.date,
        "machine": machine,
        "precision": precision,
        "model": {
            "name": recipe.model,
            "parameters": parameter_count(model.network),
            "layers": int(getattr(model.config, "num_hidden_layers", 0)),
            "vocabulary": model.vocabulary_size,
            "assistant": chats and not model.new_rows,
            "template": recipe.template,
            "new_rows": len(model.new_rows),
            **model_keys(model, precision["value"], bench.decodes_in_place),
        },
        "stages": [_planned_entry(one, precision["value"]) for one in stages],
        "gates": [],
        "data": list(
            {
                name: source.accounting.as_json()
                for one in stages
                for name, source in one.sources.items()
            }.values()
        ),
        "findings": [line for one in stages for line in one.findings],
    }


def _planned_entry(planned: PlannedStage, precision: str) -> dict[str, Any]:
    settings = planned.settings(precision)
    step = max(1, planned.updates // 100)
    restarts = Restarts(settings.restart, lambda: None)  # those by plan
    drawn = range(0, planned.updates, step)
    return {
        "folder": planned.folder_name,
        "kind": planned.stage.kind,
        "name": planned.name,
        "data": ", ".join(planned.stage.mixture()),
        "updates": planned.updates,
        "tokens_per_update": planned.tokens_per_update,
        "seconds": round(planned.seconds, 1),
        "limit_tokens_per_second": round(planned.limit_tokens_per_second, 1),
        "learning_rate": settings.learning_rate,
        "curve": [settings.rate(index) * restarts.share(index) for index in drawn],
        "settled_for": planned.settled_for,
        "micro_batch": planned.micro_batch,
        "micro_batch_why": planned.micro_batch_why,
        "head_chunk": planned.head_chunk,
        **planned.recompute.as_json(),
        "recompute_report": planned.recompute_report,
        "trains": "all weights" if planned.trains_all else "adapter",
        "memory": dict(planned.memory or {}),
        "disk": planned.disk,
        **({"fp8": planned.float8} if planned.float8 else {}),
    }
