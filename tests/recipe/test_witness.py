"""No dead key: every key of the schema has a witness, and is read outside lehr.recipe.

A witness is an observable outside recipe.yaml and the hashes that changes with the key:
a number, a file, a line of the plan, a refusal. The table names it and the module (or
test) where it can be seen. A new key without an entry fails here.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import lehr.recipe.schema as schema
from lehr.recipe.fields import Section
from lehr.recipe.schema import STAGE_CLASSES, Recipe

SOURCE = Path(schema.__file__).parents[1]

WITNESSES = {
    "model": "the weights that are loaded; models/loading.py",
    "template": "the rendered text of the mask sample in audit.json; data/templates.py",
    "system": "where a system message ends up in the mask sample; data/encoding.py",
    "date": "the date in a prompt whose template asks for it; data/encoding.py",
    "output": "the folder of the run; pipeline/folder.py",
    "seed": "the order of rows in metrics.jsonl (losses change); data/loader.py",
    "threads": "torch.get_num_threads() and machine.cores of plan.json; pipeline/planning.py",
    "device": "machine of plan.json, environment of a checkpoint; device.py",
    "memory_limit": "micro_batch and memory of plan.json; pipeline/planning.py",
    "trust_remote_code": "a refusal of a model with code, and its entry in the ledger",
    "adapter.kind": "trained parameters in plan.json; models/adapters.py",
    "adapter.rank": "r of adapter_config.json; models/adapters.py",
    "adapter.alpha": "lora_alpha of adapter_config.json; models/adapters.py",
    "adapter.dropout": "lora_dropout of adapter_config.json; models/adapters.py",
    "adapter.targets": "target_modules of adapter_config.json; models/adapters.py",
    "data.*.path": "files with their hashes in audit.json; data/accounting.py",
    "data.*.builtin": "text of the standard library in audit.json; pipeline/sources.py",
    "data.*.microworld": "rows of the synthetic world in audit.json; pipeline/sources.py",
    "data.*.rows": "kept rows in audit.json; pipeline/sources.py",
    "data.*.seed": "another world: other rows, other hash in audit.json; pipeline/sources.py",
    "data.*.options": "rows of the microworld; microworld/rows.py",
    "data.*.format": "the shape in audit.json; data/formats.py",
    "data.*.holdout": "held-out rows in audit.json; data/splitting.py",
    "data.*.train_on": "supervised tokens in audit.json; data/encoding.py",
    "data.*.on_bad_row": "a refusal instead of a counted row; data/",
    "stages.*.kind": "kind in plan.json and the objective's metrics; stages/",
    "stages.*.name": "the folder of the stage; pipeline/staging.py",
    "stages.*.data": "sources in audit.json; pipeline/staging.py",
    "stages.*.max_length": "dropped tokens in audit.json; data/encoding.py",
    "stages.*.overflow": "reasons of dropped rows in audit.json; data/encoding.py",
    "stages.*.packing": "packs in audit.json; the loss stays; data/packing.py",
    "stages.*.pack_length": "packs and fill in audit.json; the loss stays; data/packing.py",
    "stages.*.batch_size": "updates in plan.json; data/loader.py",
    "stages.*.micro_batch": "memory in plan.json; the loss stays; training/batch.py",
    "stages.*.max_updates": "updates in plan.json; pipeline/staging.py",
    "stages.*.epochs": "updates in plan.json; pipeline/staging.py",
    "stages.*.learning_rate": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.scale_rate.found_at": "curve of plan.json; training/batch_rules.py",
    "stages.*.scale_rate.rule": "curve and findings of plan.json; training/batch_rules.py",
    "stages.*.schedule.kind": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.schedule.warmup": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.schedule.decay": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.schedule.final": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.schedule.shape": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.schedule.initial": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.schedule.cooldown": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.schedule.hold": "learning_rate of metrics.jsonl; training/schedules.py",
    "stages.*.optimizer.kind": "the optimizer that is made; training/optimizers.py",
    "stages.*.optimizer.betas": "the loss after the second update; training/optimizers.py",
    "stages.*.optimizer.eps": "the loss after the first update; training/optimizers.py",
    "stages.*.optimizer.weight_decay": "the norm of the weights; training/optimizers.py",
    "stages.*.optimizer.beta2_half_life_tokens": "betas of checkpoints; training/optimizers.py",
    "stages.*.optimizer.momentum": "the loss after the second update; training/optimizers.py",
    "stages.*.optimizer.nesterov": "the loss after the first update; training/optimizers.py",
    "stages.*.optimizer.match_rms": "step.0.step of metrics.jsonl; training/muon.py",
    "stages.*.optimizer.groups.pattern": "step.*.rate of metrics.jsonl; training/optimizers.py",
    "stages.*.optimizer.groups.weight_decay": "the norm of these weights; training/optimizers.py",
    "stages.*.optimizer.groups.learning_rate_scale": "step.*.rate; training/optimizers.py",
    "stages.*.optimizer.watch_every": "step.* of metrics.jsonl; training/steps.py",
    "stages.*.ema.decay": "evaluation.loss of metrics.jsonl; training/averaging.py",
    "stages.*.ema.warmup": "evaluation.loss of metrics.jsonl; training/averaging.py",
    "stages.*.ema.start_after": "evaluation.loss of metrics.jsonl; training/averaging.py",
    "stages.*.ema.evaluate": "evaluation.loss, and the produced state; training/engine.py",
    "stages.*.clip": "the loss after an update whose norm is larger; training/engine.py",
    "stages.*.adaptive_clip.kind": "clipped of metrics.jsonl; training/clipping.py",
    "stages.*.adaptive_clip.limit": "clipped of metrics.jsonl; training/clipping.py",
    "stages.*.adaptive_clip.decay": "the losses; training/clipping.py",
    "stages.*.adaptive_clip.warmup": "clipped of metrics.jsonl; training/clipping.py",
    "stages.*.restart.every": "restarted of metrics.jsonl; training/restarts.py",
    "stages.*.restart.after_rewind": "restarted of metrics.jsonl; training/restarts.py",
    "stages.*.restart.moments": "the losses after it; training/restarts.py",
    "stages.*.restart.warmup": "learning_rate of metrics.jsonl; training/restarts.py",
    "stages.*.restart.initial": "learning_rate of metrics.jsonl; training/restarts.py",
    "stages.*.guard.policy": "update_norm of metrics.jsonl, status 4; training/guarding.py",
    "stages.*.guard.limit": "guard.limit of metrics.jsonl; training/guard.py",
    "stages.*.guard.window": "guard.limit of metrics.jsonl; training/robust.py",
    "stages.*.guard.rewinds": "guard_went_back events, status 4; training/guarding.py",
    "stages.*.guard.attention_queries": "objective.attention_logit; models/attention_watch.py",
    "stages.*.guard.quarantine": "skipped lines of metrics.jsonl; training/quarantine.py",
    "stages.*.precision": "precision of plan.json and its reason; pipeline/planning.py",
    "stages.*.loss_scale.init": "loss_scale of metrics.jsonl; training/loss_scale.py",
    "stages.*.loss_scale.growth_interval": "loss_scale of metrics.jsonl; training/loss_scale.py",
    "stages.*.loss_scale.floor": "the run stops at an overflow there; training/loss_scale.py",
    "stages.*.loss_scale.ceiling": "loss_scale of metrics.jsonl; training/loss_scale.py",
    "stages.*.fp8.scaling": "the losses; training/float8_linear.py",
    "stages.*.fp8.window": "the losses of delayed scaling; training/float8_scaling.py",
    "stages.*.fp8.margin": "the losses of delayed scaling; training/float8_scaling.py",
    "stages.*.fp8.convert": "fp8 of plan.json; training/float8_recipe.py",
    "stages.*.fp8.keep": "fp8 of plan.json; training/float8_recipe.py",
    "stages.*.fp8.keep_first_blocks": "fp8 of plan.json; training/float8_recipe.py",
    "stages.*.fp8.keep_last_blocks": "fp8 of plan.json; training/float8_recipe.py",
    "stages.*.fp8.smallest_features": "fp8 of plan.json; training/float8_recipe.py",
    "stages.*.fp8.backend": "the fp8 event; training/numerics.py",
    "stages.*.fp8.measure_every": "fp8.worst_* of metrics.jsonl; training/float8_convert.py",
    "stages.*.stochastic_rounding": "the losses of pure_bf16; training/bf16_weights.py",
    "stages.*.recompute": "memory in plan.json; the loss stays; pipeline/recomputing.py",
    "stages.*.recompute.budget": "recompute_keeps in plan.json; pipeline/recomputing.py",
    "stages.*.keep.replay": "source.* of metrics.jsonl; data/loader.py",
    "stages.*.gradient_flow_every": "flow.* of metrics.jsonl; training/gradient_flow.py",
    "stages.*.noise_scale_every": "noise.* of metrics.jsonl; training/noise_meter.py",
    "stages.*.evaluate_every": "held-out losses between updates; training/engine.py",
    "stages.*.checkpoint_every": "folders under checkpoints/; training/checkpoint.py",
    "stages.*.checkpoints_kept": "how many folders stay; training/checkpoint.py",
    "stages.*.promote": "which update the produced state is of; training/engine.py",
    "stages.*.early_stop": "the last update of metrics.jsonl; training/engine.py",
    "stages.*.adapter": "as adapter, for one stage; pipeline/",
    "stages.*.fold_parent": "rank of the produced adapter, and a new base; pipeline/",
    "stages.pretrain.z_loss": "objective.z_loss of metrics.jsonl; objectives/language.py",
    "stages.sft.z_loss": "objective.z_loss of metrics.jsonl; objectives/language.py",
    "stages.preference.loss": "the objective's metrics; stages/preference.py",
    "stages.preference.beta": "objective.reward of metrics.jsonl; objectives/preference.py",
    "stages.preference.label_smoothing": "the loss at a margin; objectives/preference.py",
    "gates.improve": "gates of plan.json and evaluation.json; evaluation/default_gates.py",
    "gates.protect": "limits in plan.json and evaluation.json; evaluation/default_gates.py",
    "gates.undetermined": "what is promoted, and the ledger's reason; pipeline/",
    "gates.on_refusal": "whether the next stage runs; the exit status; pipeline/",
    "gates.items": "n of a gate in evaluation.json; evaluation/scoring.py",
    "suites": "suites of evaluation.json; pipeline/",
    "export": "folders under the run, exports of the ledger; pipeline/",
    "show": "prompts of evaluation.json; pipeline/showcase.py",
}

# Keys that others read through something that has another name.
READ_THROUGH = {
    "data.*.path": "files_of",
    "stages.*.data": "mixture",
    "stages.*.keep.replay": "mixture",
    "gates.improve": "improve_gate",
}

# What the object is called that a key is read from: `stage.clip`, `planned.stage.clip`.
OWNERS = {
    "data": ("spec", "source"),
    "stages": ("stage",),
    "gates": ("gates",),
    "adapter": ("adapter",),
}

# Accepted and not read yet: a key leaves this set with the code that reads it.
UNREAD: set[str] = set()


def leaves(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Every key path of the schema whose value is no section."""
    for name, field in model.model_fields.items():
        section = section_in(field.annotation)
        path = prefix + name
        if name == "stages":
            for kind, stage in STAGE_CLASSES.items():
                own = set(stage.model_fields) - set(schema.Stage.model_fields)
                for leaf in leaves(stage, "stages.*."):
                    key = leaf.split(".")[2]
                    yield leaf if key not in own else leaf.replace("*", kind, 1)
        elif name == "adapter" and prefix:
            yield path  # the same section again
        elif section is not None:
            if typing.Literal in map(typing.get_origin, typing.get_args(field.annotation)):
                yield path  # words beside the section
            yield from leaves(section, path + (".*." if name == "data" else "."))
        else:
            yield path


def section_in(annotation: object) -> type[Section] | None:
    """The section class in a type such as Section | None, list[Section] or dict[str, Section]."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = [section_in(part) for part in typing.get_args(annotation)]
    return next((section for section in found if section is not None), None)


@lru_cache(maxsize=1)
def readings() -> frozenset[tuple[str, str]]:
    """(owner, name) of every attribute that lehr reads outside lehr.recipe; imports too."""
    found: set[tuple[str, str]] = set()
    for file in SOURCE.rglob("*.py"):
        if SOURCE / "recipe" in file.parents:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add((_last_name(node.value), node.attr))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lehr.recipe"):
                found |= {("import", alias.name) for alias in node.names}
    return frozenset(found)


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def is_read(path: str) -> bool:
    """Some module outside lehr.recipe reads this key from an object of its section."""
    if path in READ_THROUGH:
        return any(name == READ_THROUGH[path] for _, name in readings())
    *sections, key = path.split(".")
    owners = OWNERS[sections[0]] if sections else ("recipe",)
    if len(sections) > 2:
        owners = (sections[-1].removesuffix("s"),)  # `group.pattern` is read from groups
    return any(name == key and any(o in owner for o in owners) for owner, name in readings())


def test_every_key_has_a_witness_and_every_witness_a_key():
    assert set(leaves(Recipe)) == set(WITNESSES)


def test_every_key_is_read_outside_the_recipe():
    unread = {path for path in WITNESSES if not is_read(path)}
    assert unread == UNREAD, f"accepted and then read by nothing: {sorted(unread - UNREAD)}"


def test_the_search_for_readers_finds_a_key_that_nobody_reads():
    assert not is_read("stages.*.no_such_key") and not is_read("gates.no_such_key")
    assert not is_read("stages.*.schedule.betas")
