"""A run before it runs: data read, model loaded, every `auto` settled, nothing trained.

plan.json keeps what was settled; a later start of the same run reads it back, so that a
timing never decides twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lehr.device import card_memory, choose
from lehr.device import prepare as ready
from lehr.diagnosis.machine import BUSY, choose_precision, describe_machine
from lehr.diagnosis.planner import (
    forecast,
    kv_cache_bytes,
    operations_per_update,
    seconds_per_update,
)
from lehr.diagnosis.schedules import schedule_findings
from lehr.diagnosis.watching_memory import Watching, watching_of
from lehr.errors import OutOfResources, Problem, RecipeError
from lehr.generation.admission import decode_in_place
from lehr.models.loading import model_fingerprint, require_template, resolve_spec
from lehr.models.nf4 import parameter_count
from lehr.pipeline.admission import admit
from lehr.pipeline.events import Events
from lehr.pipeline.files import read_json, write_json
from lehr.pipeline.fitting import batch_finding, position_problems, target_problems
from lehr.pipeline.float8_export import chosen_layers
from lehr.pipeline.four_bits import forecast_keys, settle_decoding
from lehr.pipeline.guarding import quarantine_of
from lehr.pipeline.keys import base_key
from lehr.pipeline.memory_limits import (
    SMALLEST_CHUNK,
    cast_parameters,
    product_bytes,
    require_fit,
    room_for_activations,
    settle_chunk,
    slack_share,
)
from lehr.pipeline.optimizing import require_optimizers
from lehr.pipeline.plan_entries import plan_entries
from lehr.pipeline.precision import require_precision
from lehr.pipeline.recomputing import Settled, settle_recompute
from lehr.pipeline.sources import EncodedSource, ReadSource, corpus, encode_source, read_all
from lehr.pipeline.stage_audit import finding_words, write_audit
from lehr.pipeline.staging import PlannedStage, load_of, planned_stage, settle_micro_batch
from lehr.pipeline.workbench import Workbench
from lehr.recipe.loading import recipe_hash, stage_part
from lehr.streams import content_hash
from lehr.training.batch_norm import micro_batch_problems
from lehr.training.resources import available_memory, require_disk
from lehr.training.schedules import as_updates

SAME_MACHINE = ("cpu", "capability", "threads", "device", "accelerator")
DECODED, DECODED_TOKENS = 64, 256  # sequences that an evaluation decodes together, at most
MEMORY_SHARE = 0.8  # of what is free: the rest is the system's and the allocator's
EMULATED_FLOAT8_FACTOR = 2.0  # measured on a 9 M model: benchmarks/training_core.py
Encode = Callable[[ReadSource, Any, Any, Path], EncodedSource]
TINY_FACTOR = 3.0  # small operations cost their dispatch


@dataclass
class Prepared:
    """Everything that a run needs before its first update."""

    recipe: Any
    folder: Path
    sources: dict[str, ReadSource]
    bench: Workbench
    stages: list[PlannedStage]
    plan: dict[str, Any]
    encoded: dict[tuple[Any, ...], EncodedSource] = field(default_factory=dict)
    fingerprint: str = ""  # of the base model's files


def prepare(
    recipe: Any,
    folder: Path,
    events: Events,
    stored: Any = None,
    write: bool = True,
    cache: Path | None = None,
) -> Prepared:
    """Read, load, encode and plan. Raises RecipeError and OutOfResources, all problems at once.

    stored  an earlier plan.json, whose measured choices are kept where they still apply
            (default: the folder's). write: put plan.json and audits into the folder.
    cache   where encoded rows are kept (default: the folder's .cache)
    """
    device = choose(recipe.device)
    ready(device)
    sources = read_all(recipe)
    stored = _readable(stored or read_json(folder / "plan.json"))
    machine, precision = machine_and_precision(recipe, stored, device)
    events.emit("machine", machine_line(machine, precision), machine=machine, precision=precision)
    texts = partial(corpus, sources)
    base = resolve_spec(recipe.model, recipe.folder)
    doing = "making" if base.kind == "tiny" else "loading"
    events.emit("notice", f"{doing} {recipe.model}", durable=False)
    bench = Workbench(recipe, folder, precision["value"], texts, events, device)
    model = bench.load_base()
    for notice in model.notices:
        events.emit("notice", notice)
    fingerprint = model_fingerprint(base) if base.kind != "tiny" else _corpus_hash(sources)
    beyond = position_problems(recipe, model.network)
    if beyond:
        raise RecipeError(beyond)
    admit(model, recipe.stages, "" if base.path is None else fingerprint)
    bench.packs_exactly = model.packs_exactly
    if any(stage.kind != "pretrain" for stage in recipe.stages):
        require_template(model)
    bench.name_base(base_key(recipe, fingerprint, bench.encoder.fingerprint, precision["value"]))
    float8 = require_precision(recipe, model, precision["value"])
    if "fp8" in recipe.export:  # refused now, not after the training
        chosen_layers(model.network)
    stages, encoded = plan_stages(recipe, sources, bench, cache or folder / ".cache")
    unknown = target_problems(recipe, stages, model.network)
    if unknown:
        raise RecipeError(unknown)
    for stage, choices in zip(stages, float8, strict=True):
        stage.float8 = [str(choice) for choice in choices]
    settle(recipe, stages, bench, machine, precision["value"], stored)
    require_optimizers(recipe, stages, model, precision["value"])
    plan = plan_entries(recipe, stages, bench, machine, precision)
    if write:
        needed = sum(stage.disk for stage in stages)
        require_disk(folder, needed, "states and checkpoints")
    if write:
        audits = [
            write_audit(folder / stage.folder_name, stage, sources, bench, recipe.seed)
            for stage in stages
        ]
        found = [finding_words(one) for audit in audits for one in audit["findings"]]
        plan["findings"] = list(dict.fromkeys([*plan["findings"], *found]))
        write_json(folder / "plan.json", plan)
    return Prepared(recipe, folder, sources, bench, stages, plan, encoded, fingerprint)


def _readable(stored: Any) -> dict[str, Any]:
    """An earlier plan, or {} where it has another shape: then everything is settled again."""
    if not isinstance(stored, dict):
        return {}
    stages, machine, precision = (stored.get(name) for name in ("stages", "machine", "precision"))
    shaped = isinstance(stages, list) and all(isinstance(one, dict) for one in stages)
    chosen = isinstance(precision, dict) and {"value", "why"} <= precision.keys()
    rates = machine.get("gemm_gflops") if isinstance(machine, dict) else None
    return stored if shaped and chosen and isinstance(rates, dict) else {}


def machine_line(machine: Mapping[str, Any], precision: Mapping[str, Any]) -> str:
    """One line: what computes, how much memory, in which precision and why."""
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    share = machine.get("processor_share", 1.0)
    busy = ""
    if share < BUSY:
        busy = (
            f"\nbusy: other programs had the processor for {1 - share:.0%} of the measurement; "
            "the times below are those of a quiet machine"
        )
    card = ""
    if machine["accelerator"]:
        card = (
            f"{machine['device']}: {machine['accelerator']}, "
            f"{machine.get('accelerator_gib', 0):.0f} GiB\n"
        )
    return (
        f"{card}{machine['cpu']}, {threads}, {machine['memory_gib']:.0f} GiB\n"
        f"{precision['value']}: {precision['why']}{busy}"
    )


def machine_and_precision(
    recipe: Any, stored: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(machine, precision) of plan.json; what `stored` measured of this device is kept."""
    threads = recipe.threads
    if threads != "auto":
        torch.set_num_threads(int(threads))
    asked = {stage.precision for stage in recipe.stages}
    if len(asked) > 1:
        said = ", ".join(sorted(asked))
        raise RecipeError(Problem("stages", "one precision for all stages of a run", said))
    machine = describe_machine(device=device).as_json()
    before = stored.get("machine") or {}
    rates = before.get("gemm_gflops")
    same_run = stored.get("recipe_hash") == recipe_hash(recipe) and stored.get("precision")
    same_machine = all(before.get(name) == machine[name] for name in SAME_MACHINE)
    same_device = before.get("device") == machine["device"]
    if rates and same_device and (same_run or same_machine):
        machine["gemm_gflops"] = rates  # a share of the processor that was had then is no news
    else:
        machine = describe_machine(measure=True, device=device).as_json()
    if same_run:
        return machine, dict(stored["precision"])
    requested = asked.pop()
    value, why = choose_precision(requested, machine["gemm_gflops"], machine["device"])
    if recipe.model.startswith("tiny:") and requested == "auto" and value == "bf16":
        value, why = "fp32", "a tiny model is too small to gain from bf16"
    return machine, {"value": value, "why": why}


def _corpus_hash(sources: Mapping[str, ReadSource]) -> str:
    return content_hash([[name, source.data_hash] for name, source in sorted(sources.items())])


def trains_all(recipe: Any, stage: Any, tiny_untrained: bool) -> bool:
    """Whether a stage trains every weight: as asked, or a tiny model that is untrained."""
    adapter = stage.adapter or recipe.adapter
    return tiny_untrained or adapter.kind == "none"


def plan_stages(
    recipe: Any,
    sources: Mapping[str, ReadSource],
    bench: Any,
    cache: Path,
    encode: Encode = encode_source,
) -> tuple[list[PlannedStage], dict[tuple[Any, ...], EncodedSource]]:
    stages: list[PlannedStage] = []
    encoded: dict[tuple[Any, ...], EncodedSource] = {}
    problems: list[Problem] = []
    for index, stage in enumerate(recipe.stages):
        found: dict[str, EncodedSource] = {}
        for name in stage.mixture():
            key = (name, stage.max_length, stage.overflow)
            try:
                if key not in encoded:
                    encoded[key] = encode(sources[name], bench.encoder, stage, cache)
                found[name] = encoded[key]
            except RecipeError as error:
                problems += error.problems
        if len(found) < len(stage.mixture()):
            continue
        everything = trains_all(recipe, stage, bench.is_tiny and index == 0)
        planned = planned_stage(index, stage, found, recipe.seed, everything)
        planned.quarantine = quarantine_of(recipe, stage)
        wrong = planned.settings(bench.precision).problems(bool(planned.heldout()))
        wrong += micro_batch_problems(bench.model, stage.micro_batch)
        problems += [
            Problem(f"stages.{index} {problem.where}", problem.expected, problem.value)
            for problem in wrong
        ]
        stages.append(planned)
    if problems:
        raise RecipeError(problems)
    return stages, encoded


def settle(
    recipe: Any,
    stages: list[PlannedStage],
    bench: Any,
    machine: Mapping[str, Any],
    precision: str,
    stored: Mapping[str, Any],
    refuse: bool = True,
) -> list[str]:
    """Settle recomputation, micro-batch, memory and time of each stage; what does not fit.

    refuse  raise OutOfResources for the first stage that does not fit its memory limit
    """
    beyond: list[str] = []
    before = {one.get("settled_for"): one for one in stored.get("stages", [])}
    device = bench.device
    limit = _allowed(recipe, MEMORY_SHARE, device)
    same = stored.get("recipe_hash") == recipe_hash(recipe)
    parameters = parameter_count(bench.model.network)
    bench.decodes_in_place = settle_decoding(
        bench.model,
        precision,
        max(_adapter_parameters(recipe, one.stage, bench) for one in stages),
        max(_kv_cache(bench.model, one.pack_length, precision) for one in stages),
        limit,
        (stored.get("model") or {}).get("decodes_in_place") if same else None,
    )
    decode_in_place(bench.model.network, bench.decodes_in_place)
    for planned in stages:
        stage = planned.stage
        trained = parameters if planned.trains_all else _adapter_parameters(recipe, stage, bench)
        settings = planned.settings(precision)
        moments = settings.optimizer.moments + (settings.ema is not None)
        watching = watching_of(
            settings.noise_scale_every,
            settings.gradient_flow_every,
            settings.optimizer.watch_every,
        )
        sizes = (parameters, trained, moments, watching)
        packs = planned.first_packs(recipe.seed)
        tokens = sum(one.tokens for one in packs)
        longest = max(int(one.segments.length.max()) for one in packs)
        memory = partial(_memory, bench, sizes, precision, planned, recipe.seed)
        parts = [stage_part(recipe, planned.index), precision, recipe.memory_limit]
        planned.settled_for = content_hash(parts)[:20]
        settled = before.get(planned.settled_for)
        earlier = None if settled is None else Settled.from_json(settled)
        if settled is not None and earlier is not None:
            # Free memory differs from start to start: it decides once.
            planned.recompute = earlier
            planned.micro_batch = settled["micro_batch"]
            planned.micro_batch_why = settled["micro_batch_why"]
            planned.head_chunk = settled.get("head_chunk")
        else:
            several = 1 if stage.micro_batch == "auto" else int(stage.micro_batch)
            load = load_of(planned.pack_sizes(recipe.seed), several)
            without = memory(None, several, SMALLEST_CHUNK)
            planned.recompute = settle_recompute(
                bench.model,
                stage,
                trains_all=planned.trains_all,
                packs=packs,
                room=room_for_activations(
                    without, limit, slack_share(bench.model), load.micro_batches > 1
                ),
                tokens=load.tokens,
                where=f"stages.{planned.index}.recompute",
            )
            planned.head_chunk = settle_chunk(
                bench.model.vocabulary_size,
                load.pairs,
                partial(_peak, memory, planned.recompute, several),
                limit,
            )
            estimate = partial(_peak, memory, planned.recompute, rows=planned.head_chunk)
            try:
                planned.micro_batch_why = settle_micro_batch(
                    planned, recipe.seed, estimate, limit, bench.packs_exactly
                )
            except OutOfResources:
                if refuse:
                    raise
                planned.micro_batch, planned.micro_batch_why = 1, "the smallest"
        planned.memory = memory(planned.recompute, planned.micro_batch, planned.head_chunk)
        allowed = limit if earlier is None else max(limit, _allowed(recipe, 1.0, device))
        try:
            require_fit(planned, planned.memory["peak"], allowed)
        except OutOfResources as error:
            if refuse:
                raise
            beyond += [f"does not fit: {problem}" for problem in error.problems]
        if stage.noise_scale_every is not None and len(packs) <= planned.micro_batch:
            where = f"stages.{planned.index} noise_scale_every"
            expected = (
                f"at least two micro-batches in an update; it has {len(packs)} pack(s), "
                f"micro_batch {planned.micro_batch}: raise batch_size or lower pack_length"
            )
            raise RecipeError(Problem(where, expected, stage.noise_scale_every))
        pairs = sum(int(one.targets.numel()) for one in packs)
        operations = operations_per_update(
            bench.model.config,
            tokens=tokens,
            supervised_tokens=pairs,
            vocabulary=bench.model.vocabulary_size,
            all_weights=planned.trains_all,
            segment_tokens=longest,
        )
        planned.operations_per_token = operations / tokens
        several = load_of(planned.pack_sizes(recipe.seed), planned.micro_batch).tokens
        planned.recompute_report = planned.recompute.report(
            several, longest, operations * several / tokens
        )
        operations += planned.recompute.added_operations(tokens, longest)
        products = "fp32" if precision == "fp32" else "bf16"
        rate = machine["gemm_gflops"].get(products) or 10.0
        planned.limit_tokens_per_second = rate * 1e9 / planned.operations_per_token
        planned.tokens_per_update = tokens
        planned.seconds = planned.updates * seconds_per_update(operations, rate)
        if bench.is_tiny:  # limited by the number of operations, not by their size
            planned.seconds *= TINY_FACTOR
        if precision == "fp8" and bench.model.device.type != "cuda":
            planned.seconds *= EMULATED_FLOAT8_FACTOR
        state = trained * 4
        kept = stage.checkpoints_kept + 2
        planned.disk = state * (1 + (1 + moments) * kept)
        planned.disk += parameters * 4 if planned.trains_all else 0
        if planned.rate[1]:
            planned.findings.append(f"{planned.folder_name}: {planned.rate[1]}")
        rows = sum(len(source.train) for source in planned.sources.values())
        few = batch_finding(planned.folder_name, stage.batch_size, rows)
        planned.findings += [few] if few else []
        planned.findings += [
            f"{planned.folder_name}: {line}"
            for line in schedule_findings(
                settings.schedule.curve(settings.learning_rate, planned.updates),
                settings.learning_rate,
                as_updates(settings.schedule.warmup, planned.updates),
                settings.rate(planned.updates),
            )
        ]
    return beyond


def _allowed(recipe: Any, share: float, device: torch.device) -> int:
    """Bytes that a stage may take: the recipe's limit, else a share of what its device has free."""
    if recipe.memory_limit != "auto":
        return int(recipe.memory_limit * 2**30)
    free = card_memory(device) if device.type == "cuda" else available_memory()
    return int(free * share)


def _kv_cache(model: Any, pack_tokens: int, precision: str) -> int:
    tokens = min(DECODED_TOKENS, pack_tokens)
    return kv_cache_bytes(model.config, DECODED, tokens, precision)


def _memory(
    bench: Any,
    sizes: tuple[int, int, int, Watching],
    precision: str,
    planned: PlannedStage,
    seed: int,
    recompute: Settled | None,
    packs: int,
    head_chunk: int | None = None,
) -> dict[str, int]:
    parameters, trained, moments, watching = sizes
    model = bench.model
    load = load_of(planned.pack_sizes(seed), packs)
    measured = None if recompute is None else recompute.activation_bytes(load.tokens)
    return forecast(
        model.config,
        parameters,
        trained,
        precision,
        planned.pack_length,
        packs,
        model.vocabulary_size,
        head_chunk=head_chunk,
        moments=moments,
        activation_bytes=measured,
        watching=watching,
        kv_cache_bytes=_kv_cache(model, planned.pack_length, precision),
        load=load,
        working_bytes=0 if recompute is None else recompute.working_bytes(load.tokens),
        cast_parameters=cast_parameters(model),
        product_bytes=product_bytes(model, precision),
        slack_share=slack_share(model),
        **forecast_keys(model, precision, bench.decodes_in_place),
    )


def _peak(memory: Any, recompute: Settled, packs: int, rows: int | None) -> int:
    return int(memory(recompute, packs, rows)["peak"])


def _adapter_parameters(recipe: Any, stage: Any, bench: Any) -> int:
    """LoRA: rank x (inputs + outputs) of every linear layer but the head."""
    adapter = stage.adapter or recipe.adapter
    model = bench.model
    total = 0
    head = model.network.get_output_embeddings()
    for module in model.network.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            total += adapter.rank * (module.in_features + module.out_features)
    width = model.network.get_input_embeddings().weight.shape[1]
    return total + len(model.new_rows) * int(width)
