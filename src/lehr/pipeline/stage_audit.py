"""audit.json of a stage: what became of each row, what looks wrong, which tokens are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lehr.data.audit import findings
from lehr.data.preview import end_tokens, preview, supervised_share
from lehr.data.shapes import Encoded
from lehr.pipeline.files import write_json
from lehr.pipeline.sources import ReadSource
from lehr.pipeline.staging import PlannedStage
from lehr.pipeline.workbench import Workbench

SAMPLE_CHARACTERS = 1200


def write_audit(
    folder: Path,
    planned: PlannedStage,
    sources: Mapping[str, ReadSource],
    bench: Workbench,
    seed: int,
) -> dict[str, Any]:
    """audit.json of a stage: what became of each row, what looks wrong, what is trained."""
    names = list(planned.stage.mixture())
    found = findings(
        {name: sources[name].train for name in names},
        {name: planned.sources[name].train for name in names},
        {name: sources[name].heldout for name in names},
    )
    everything = [one for name in names for one in planned.sources[name].train]
    own = [one for name in planned.stage.data for one in planned.sources[name].train]
    packs = planned.first_packs(seed)
    ended = answers = 0
    if planned.stage.kind != "pretrain":
        ended, answers = end_tokens(own, bench.encoder.stop_ids)
    audit = {
        "sources": [planned.sources[name].accounting.as_json() for name in names],
        "findings": [one.as_json() for one in found],
        "mask_sample": mask_sample(own, bench.model.tokenizer),
        "supervised_share": supervised_share(everything),
        "every_end_token": ended == answers,
        "answers": answers,
        "answers_without_end": answers - ended,
        "packs": len(packs),
        "fill": planned.fill(seed),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", audit)
    return audit


def finding_words(found: Mapping[str, Any]) -> str:
    """One finding of an audit as a sentence with its first place."""
    return f"{found['source']}: {found['sentence']} (first: {found['examples'][0]})"


def mask_sample(encoded: Sequence[Encoded], tokenizer: Any) -> list[dict[str, Any]]:
    """One example of middling length as spans of text: which tokens are trained."""
    if not encoded:
        return []
    by_length = sorted(encoded, key=lambda one: one.tokens)
    sample = by_length[len(by_length) // 2]
    spans = preview(sample, tokenizer)
    shown: list[dict[str, Any]] = []
    for span in spans:
        text = (
            span.text
            if len(span.text) <= SAMPLE_CHARACTERS
            else span.text[:SAMPLE_CHARACTERS] + " …"
        )
        shown.append({"text": text, "supervised": span.supervised, "control": span.control})
    return shown
