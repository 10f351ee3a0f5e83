"""`lehr plan` of a model that is not here: a folder with its config.json and no weights.

Nothing is trained and nothing written. Rows are read, so the number of updates is that of the
run; tokens are counted with the folder's tokenizer, or assumed from bytes where there is none.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lehr.data.encoding import Encoder
from lehr.data.shapes import Encoded, Example, Message
from lehr.data.templates import Template
from lehr.device import CPU, choose
from lehr.diagnosis.machine import describe_machine
from lehr.errors import RecipeError
from lehr.models.language_model import LanguageModel
from lehr.models.loading import require_template, set_template
from lehr.models.meta import SizesAlone
from lehr.models.sizes import has_sizes_alone, model_of_sizes
from lehr.models.tokenizer import stop_ids_of
from lehr.pipeline.events import Events
from lehr.pipeline.fitting import target_problems
from lehr.pipeline.keys import in_four_bits
from lehr.pipeline.plan_entries import plan_entries
from lehr.pipeline.planning import Encode, machine_and_precision, plan_stages, settle
from lehr.pipeline.sources import EncodedSource, ReadSource, encode_source, read_all

BYTES_PER_TOKEN = 3  # without a tokenizer; English in today's vocabularies has 4 to 5
TOKENS_PER_TURN = 8  # of a template, around a message


@dataclass
class _Bench:
    """What planning asks of a workbench, without weights."""

    model: LanguageModel
    encoder: Any
    precision: str
    device: torch.device = CPU
    is_tiny: bool = False
    packs_exactly: bool = True
    decodes_in_place: bool = False


def is_forecast(recipe: Any) -> bool:
    """Whether the recipe's model is a folder that only describes one."""
    return has_sizes_alone(recipe.folder / Path(recipe.model).expanduser())


def forecast_plan(recipe: Any, events: Events, gflops: float | None = None) -> dict[str, Any]:
    """The plan of a recipe whose model has no weights here: memory, updates, time.

    gflops  rate of matrix products of the machine that will train, in 10^9 operations a second
            (default: this machine's, measured)

    What does not fit the memory limit is a finding, not a refusal. Raises RecipeError.
    """
    folder = recipe.folder / Path(recipe.model).expanduser()
    sources = read_all(recipe)
    device = _here(recipe)
    machine, precision = machine_and_precision(recipe, _elsewhere(gflops, device), device)
    value = precision["value"]
    model = model_of_sizes(folder, value, recipe.trust_remote_code, in_four_bits(recipe))
    findings = [f"{recipe.model} has no weights here: sizes are forecast, nothing can be trained"]
    bench = _Bench(model, None, value, device)
    if model.tokenizer is None:
        encode: Encode = _encode_by_bytes
        findings.append(
            f"no tokenizer in {recipe.model}: a token for every {BYTES_PER_TOKEN} bytes is assumed"
        )
    else:
        encode = encode_source
        bench.encoder = _encoder(recipe, model)
    with SizesAlone(model), tempfile.TemporaryDirectory() as aside:
        stages, _ = plan_stages(recipe, sources, bench, Path(aside), encode)
        unknown = target_problems(recipe, stages, model.network)
        if unknown:
            raise RecipeError(unknown)
        findings += settle(recipe, stages, bench, machine, value, {}, refuse=False)
    plan = plan_entries(recipe, stages, bench, machine, precision)
    plan["findings"] = [*findings, *plan["findings"]]
    events.emit("plan", "", durable=False, stages=plan["stages"])
    for line in plan["findings"]:
        events.emit("finding", line)
    return plan


def _here(recipe: Any) -> torch.device:
    """The recipe's device where this machine has it: what is forecast may train elsewhere."""
    try:
        return choose(recipe.device)
    except RecipeError:
        return CPU


def _elsewhere(gflops: float | None, device: torch.device) -> dict[str, Any]:
    """An earlier plan's machine part with a rate that somebody gave, or nothing."""
    if gflops is None:
        return {}
    machine = describe_machine(device=device).as_json()
    machine["gemm_gflops"] = {"fp32": gflops / 8, "bf16": gflops}
    return {"machine": machine}


def _encoder(recipe: Any, model: LanguageModel) -> Encoder:
    model.new_rows = tuple(
        set_template(model.network, model.tokenizer, recipe.template, recipe.folder)
    )
    if any(stage.kind != "pretrain" for stage in recipe.stages):
        require_template(model)
    template = None
    if model.tokenizer.chat_template:
        template = Template.from_tokenizer(model.tokenizer)
    return Encoder(
        model.tokenizer,
        template,
        date=recipe.date,
        system=recipe.system,
        stop_ids=stop_ids_of(model.network),
    )


def _encode_by_bytes(source: ReadSource, _encoder: Any, stage: Any, _cache: Path) -> EncodedSource:
    """Rows as long as their bytes let expect, all ids 0."""
    train = [one for example in source.train for one in _by_bytes(example, stage)]
    heldout = [one for example in source.heldout for one in _by_bytes(example, stage)]
    accounting = source.rows.accounting(kept=len(source.train), heldout=len(source.heldout))
    accounting.tokens = sum(one.tokens for one in train)
    accounting.supervised_tokens = sum(one.supervised_tokens for one in train)
    return EncodedSource(source.name, train, heldout, accounting)


def _by_bytes(example: Example, stage: Any) -> list[Encoded]:
    longest = int(stage.max_length)
    make = partial(_row, example)
    if example.kind == "text":
        total = max(2, -(-len(example.text.encode()) // BYTES_PER_TOKEN))
        if stage.overflow != "split":
            return [make(min(total, longest), 0)]
        return [make(min(longest, total - at), 0) for at in range(0, total, longest)]
    if example.chosen:
        prompt = min(_tokens(example.messages), longest // 2)
        room = max(1, longest - prompt)
        answers = [min(_tokens(side), room) for side in (example.chosen, example.rejected) if side]
        branches = tuple(make(length, 0) for length in answers)
        return [make(prompt, prompt, branches)]
    answered = [turn for turn in example.messages if turn.get("role") == "assistant"]
    total = min(max(2, _tokens(example.messages)), longest)
    return [make(total, max(0, total - _tokens(answered)))]


def _tokens(messages: tuple[Message, ...] | list[Message]) -> int:
    return sum(
        TOKENS_PER_TURN + -(-len(str(turn.get("content") or "").encode()) // BYTES_PER_TOKEN)
        for turn in messages
    )


def _row(
    example: Example, tokens: int, unsupervised: int, branches: tuple[Encoded, ...] = ()
) -> Encoded:
    supervised = torch.ones(tokens, dtype=torch.bool)
    supervised[:unsupervised] = False
    if branches or example.kind in ("text", "chat"):
        supervised[:1] = False  # nothing is before it
    return Encoded(torch.zeros(tokens, dtype=torch.int64), supervised, example.origin, branches)
