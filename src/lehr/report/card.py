"""The model card (README.md) and the lineage (lehr.json) that travel with a promoted model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lehr.report.first_screen import unknowns
from lehr.report.reading import (
    RunFiles,
    StageFiles,
    items,
    mapping,
    number,
    objects,
    read_run,
    text,
)
from lehr.report.wording import (
    change,
    count,
    duration,
    gate_name,
    interval,
    level,
    plain,
    signed_limit,
)

LINEAGE_FORMAT = 1


def model_card(run_folder: Path) -> str:
    """README.md of `model/` as Markdown, from the files of the run.

    Raises NotADirectoryError where the folder does not exist.
    """
    run = read_run(run_folder)
    base = text(run.ledger.get("model")) or "not recorded"
    adapter = _is_adapter(run)
    parts = [
        _front_matter(base, adapter),
        f"# {_line(text(run.ledger.get('name')) or run.folder.resolve().name)}",
        _opening(run, base),
        _loading(adapter, base, (run.folder / "model" / "lehr-base.json").is_file()),
        "## How it was made",
        _stage_table(run),
        "## What was measured",
        _gate_table(run.promoted or run.shown),
        "## What was not measured, or could not be told",
        "\n".join(f"- {_line(line)}" for line in [*unknowns(run), *_never_measured(run)]),
        "## Data",
        _data_list(run),
        "## Licence",
        f"This model is derived from `{_line(base)}` and from the data above: their licences apply "
        "to it. lehr adds none and has checked none.",
        f"Made with lehr {_line(text(mapping(run.ledger.get('versions')).get('lehr')) or '?')}; "
        "`lehr.json` holds the lineage from data hash to this folder, `report.html` of the run the "
        "answers that changed.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def lineage(run_folder: Path) -> dict[str, Any]:
    """`lehr.json`: data hashes, stage keys, gates and exports of a run, as strict JSON values.

    Raises NotADirectoryError where the folder does not exist.
    """
    run = read_run(run_folder)
    ledger = run.ledger
    promoted = run.promoted
    return {
        "format": LINEAGE_FORMAT,
        "name": ledger.get("name"),
        "base": ledger.get("model"),
        "recipe_hash": ledger.get("recipe_hash"),
        "verdict": run.verdict,
        "promoted_from": None if promoted is None else promoted.folder,
        "stages": [_lineage_stage(stage) for stage in run.stages if stage.finished],
        "exports": items(ledger.get("exports")),
        "versions": dict(mapping(ledger.get("versions"))),
        "machine": dict(mapping(run.plan.get("machine")) or mapping(ledger.get("machine"))),
        "precision": dict(mapping(run.plan.get("precision"))),
    }


def _lineage_stage(stage: StageFiles) -> dict[str, Any]:
    kept = ("folder", "kind", "name", "key", "parent", "produced", "promoted", "why", "seed")
    more = ("updates", "tokens", "recipe_hash", "versions")
    entry = {key: stage.entry.get(key) for key in (*kept, *more)}
    entry["data"] = [dict(file) for file in objects(stage.entry.get("data"))]
    entry["gates"] = [dict(gate) for gate in stage.gates]
    return entry


def _front_matter(base: str, adapter: bool) -> str:
    library = "peft" if adapter else "transformers"
    # A JSON string is a YAML string: a name can hold colons, quotes and line ends.
    # A tiny model was made here from scratch: it has no base that could be looked up.
    origin = "" if base.startswith("tiny:") else f"base_model: {json.dumps(base)}\n"
    return f"---\n{origin}library_name: {library}\npipeline_tag: text-generation\ntags: [lehr]\n---"


def _opening(run: RunFiles, base: str) -> str:
    promoted = run.promoted
    if promoted is None:
        return (
            f"Nothing was promoted over `{_line(base)}`: no gate-checked model is in this folder."
        )
    words = (
        f"`{_line(base)}`, post-trained on one machine; this is the state that stage "
        f"**{_line(promoted.name)}** produced, the last one whose gates it passed."
    )
    doubtful = [gate for gate in promoted.gates if gate.get("verdict") == "undetermined"]
    if doubtful:
        names = ", ".join(_line(gate_name(gate)) for gate in doubtful)
        words += f" **Promoted although undetermined: {names}.**"
    return words


def _loading(adapter: bool, base: str, four_bits: bool = False) -> str:
    if adapter:
        config, names, settings = "", "AutoTokenizer", ""
        if four_bits:
            config, names = ", quantization_config=config", "AutoTokenizer, BitsAndBytesConfig"
            settings = (
                "config = BitsAndBytesConfig(\n"
                '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True\n'
                ")\n"
            )
        code = (
            "from peft import AutoPeftModelForCausalLM\n"
            f"from transformers import {names}\n\n{settings}"
            f'model = AutoPeftModelForCausalLM.from_pretrained("model"{config})\n'
            'tokenizer = AutoTokenizer.from_pretrained("model")'
        )
        note = f"The adapter loads its base, `{_line(base)}`, by itself; no other base fits it."
        if four_bits:
            note += (
                " It was trained over that base in four bits (NF4, blocks of 64, scales quantised "
                "again), as the lines above load it; the merged export holds the dequantised base. "
                "Over the base as it is, answers differ."
            )
    else:
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'model = AutoModelForCausalLM.from_pretrained("model")\n'
            'tokenizer = AutoTokenizer.from_pretrained("model")'
        )
        note = "All weights are in the folder."
    chat = (
        'chat = [{"role": "user", "content": "Hello"}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
        ")\n"
        "answer = model.generate(**inputs, max_new_tokens=200)\n"
        "print(tokenizer.decode(answer[0]))"
    )
    return f"## How to load it\n\n```python\n{code}\n{chat}\n```\n\n{note}"


def _stage_table(run: RunFiles) -> str:
    rows = [
        (
            stage.name,
            stage.kind,
            "promoted" if stage.promoted else "parent kept",
            count(stage.entry.get("updates")),
            count(stage.entry.get("tokens")),
            duration(stage.entry.get("seconds")),
            text(stage.entry.get("why")),
        )
        for stage in run.stages
        if stage.finished
    ]
    return _table(("stage", "kind", "result", "updates", "tokens", "time", "why"), rows)


def _gate_table(stage: StageFiles | None) -> str:
    if stage is None or not stage.gates:
        return "Nothing was gated."
    rows = []
    for gate in stage.gates:
        unit = text(gate.get("unit"))
        limit = signed_limit(gate)
        improve = gate.get("kind") == "improve"
        rows.append(
            (
                gate_name(gate),
                text(gate.get("against")),
                level(gate.get("base"), unit),
                level(gate.get("tuned"), unit),
                f"{change(gate.get('difference'), unit)} {interval(gate)}",
                "better" if improve else change(limit, unit, with_unit=False),
                plain(gate.get("n"), 0),
                text(gate.get("verdict")),
            )
        )
    heading = ("gate", "against", "before", "after", "difference [95 %]", "limit", "n", "verdict")
    return _table(heading, rows)


def _never_measured(run: RunFiles) -> list[str]:
    """What no suite of the promoted stage touched; absence must not read as safety."""
    stage = run.promoted or run.shown
    measured = set() if stage is None else set(mapping(stage.evaluation.get("suites")))
    known = {
        "over_refusal": "refusal of harmless requests",
        "refusal": "refusal of forbidden requests",
        "sycophancy": "giving in to false claims",
        "forgetting": "forgetting of the parent's own text",
    }
    missing = [words for suite, words in known.items() if not _any_names(suite, measured, stage)]
    lines = [f"Not measured: {', '.join(missing)}."] if missing else []
    lines.append(
        "Never measured here: other languages than the suites', long conversations, tool use, "
        "bias, and any harm that the suites do not ask about."
    )
    return lines


def _any_names(suite: str, measured: set[str], stage: StageFiles | None) -> bool:
    gates = [] if stage is None else stage.gates
    names = [*measured, *(text(gate.get("name")) for gate in gates)]
    return any(name.split(".")[-1] == suite or name.split(".")[0] == suite for name in names)


def _data_list(run: RunFiles) -> str:
    seen: dict[str, str] = {}
    for stage in run.stages:
        for file in objects(stage.entry.get("data")):
            dropped = sum(number(n) or 0 for n in mapping(file.get("dropped")).values())
            seen[text(file.get("path"))] = (
                f"- `{_line(text(file.get('path')))}`: {count(file.get('kept'))} of "
                f"{count(file.get('rows'))} rows kept, {count(dropped)} dropped, "
                f"sha256 `{_line(text(file.get('sha256'))) or '-'}`"
            )
    return "\n".join(seen.values()) or "Not recorded."


def _is_adapter(run: RunFiles) -> bool:
    if (run.folder / "model" / "adapter_config.json").is_file():
        return True
    if (run.folder / "model" / "config.json").is_file():
        return False
    return "adapter" in {text(export.get("kind")) for export in objects(run.ledger.get("exports"))}


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return "None."
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "\n".join("| " + " | ".join(_line(cell) for cell in line) + " |" for line in lines)


def _line(value: str) -> str:
    """Text that cannot break out of a Markdown line, table cell or code span."""
    flat = " ".join(value.split())[:400]
    for sign, safe in (("|", "\\|"), ("`", "'"), ("<", "&lt;"), ("[", "\\[")):
        flat = flat.replace(sign, safe)
    return flat
