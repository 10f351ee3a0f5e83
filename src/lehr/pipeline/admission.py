"""Which fast paths a run may take on the model at hand, by the admission probe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lehr.device import name_of
from lehr.errors import Problem, RecipeError
from lehr.models.fetch import lehr_home
from lehr.models.probe import admission_probe
from lehr.pipeline.files import read_json, write_text
from lehr.pipeline.keys import versions
from lehr.streams import content_hash

PROBE_VERSION = 1  # raise it when the probe asks more
REMEMBERED = 200


def admit(model: Any, stages: Sequence[Any] = (), fingerprint: str = "") -> None:
    """Refuse where a path that a stage takes would give other numbers on this model.

    fingerprint  of the model's files: what passed the probe once on this machine, with these
                 versions and this precision, is not probed again

    A path that nobody asks for is not taken: where packing is not exact and every stage
    says `packing: false`, evaluation and micro-batches do not pack either.
    """
    pairs = any(stage.kind == "preference" for stage in stages)
    asked = {
        # The two answers of a pair share a pack, whatever `packing` says.
        "packing": pairs or any(stage.packing for stage in stages),
        "prefix sharing": pairs,
    }
    problems = []
    key = _key(model, fingerprint) if fingerprint else ""
    refusals = [] if key and key in _passed() else admission_probe(model)
    if key and not refusals:
        _remember(key)
    for refusal in refusals:
        if asked.get(refusal.path, True):
            where = f"model, {refusal.path} ({refusal.name})"
            problems.append(Problem(where, f"{refusal.reason}; {refusal.remedy}", says=True))
        elif refusal.path == "packing":
            model.packs_exactly = False
    if not model.packs_exactly:
        problems += [
            Problem(
                f"stages.{index} micro_batch",
                "1 or auto: this model's sequences must be computed one by one",
                stage.micro_batch,
            )
            for index, stage in enumerate(stages)
            if stage.micro_batch not in ("auto", 1)
        ]
    if problems:
        raise RecipeError(problems)


def _key(model: Any, fingerprint: str) -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    parts = [PROBE_VERSION, fingerprint, str(model.compute_dtype), capability, versions()]
    if card := name_of(model.device):
        parts.append(card)
    return content_hash(parts)[:32]


def _memory() -> Path:
    return lehr_home() / "admitted.json"


def _passed() -> list[str]:
    found = read_json(_memory())
    return [str(key) for key in found] if isinstance(found, list) else []


def _remember(key: str) -> None:
    known = [other for other in _passed() if other != key]
    with suppress(OSError):  # only a memory: the next start probes again
        write_text(_memory(), json.dumps([*known[-REMEMBERED:], key]))
