"""Exports of what was promoted, each checked against what was trained."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lehr.data.shapes import Encoded, Example, Message, Origin
from lehr.errors import Problem, RecipeError
from lehr.models.saving import stored_dtype
from lehr.pipeline import float8_export
from lehr.pipeline.events import Events
from lehr.pipeline.files import differing, read_json, write_folder, write_json
from lehr.pipeline.float8_export import Quantization
from lehr.pipeline.parity import Parity, Trained, compare, read_plain, trained_side
from lehr.pipeline.showcase import PLAIN_PROMPTS
from lehr.pipeline.sources import ReadSource
from lehr.pipeline.states import State
from lehr.pipeline.workbench import Workbench
from lehr.report.provenance import export_words
from lehr.streams import file_hash

ENTRY_FILE = "lehr-export.json"
PARITY_TEXTS = 6
PARITY_LENGTH = 256
PARITY_PROMPTS = 3
KINDS = ("adapter", "merged", "fp8")
FLOAT8_TEXTS = 48  # of a source: enough to tell a loss of 0.02 nats
LATER = {"gguf": "GGUF export is not in this version; merged loads everywhere transformers does"}


def check_kinds(kinds: Sequence[str], state: State) -> None:
    """Refuse what cannot be written, all problems at once."""
    problems: list[Problem] = []
    for kind in kinds:
        if kind in LATER:
            problems.append(Problem("export", LATER[kind], says=True))
        elif kind not in KINDS:
            problems.append(Problem("export", f"one of {', '.join(KINDS)}", kind))
        elif kind == "adapter" and state.kind != "adapter":
            problems.append(
                Problem("export", "merged: all weights were trained, there is no adapter", kind)
            )
    if problems:
        raise RecipeError(problems)


def export_promoted(
    recipe: Any,
    run_folder: Path,
    bench: Workbench,
    state: State,
    sources: Mapping[str, ReadSource],
    events: Events,
    kinds: Sequence[str] | None = None,
) -> tuple[list[dict[str, Any]], str]:
    """Write each export of the promoted state and check it; (entries, first gap or "")."""
    # A stage that trains all weights leaves no adapter to export.
    asked = list(kinds or recipe.export)
    if not kinds and state.kind != "adapter":
        asked = ["merged" if kind == "adapter" else kind for kind in asked]
    wanted = list(dict.fromkeys(asked))
    check_kinds(wanted, state)
    entries: list[dict[str, Any]] = []
    missing = []
    for kind in wanted:
        known = _checked_before(run_folder / "exports" / kind, state)
        if known is None:
            missing.append(kind)
        else:
            entries.append(known)
    if not missing:
        return entries, ""
    events.emit("exporting", f"exporting {', '.join(missing)} and checking them", durable=False)
    model = bench.in_fp32(state)
    trained = trained_side(model, bench.encoder, *parity_texts(sources, bench.encoder))
    gap = ""
    for kind in missing:
        parity: Parity | Quantization
        if kind == "fp8":
            texts, _ = parity_texts(sources, bench.encoder, FLOAT8_TEXTS)
            entry, parity = _export_float8(run_folder, model, state, texts, bench)
        else:
            entry, parity = _export(run_folder, kind, model, state, trained, bench)
        entries.append(entry)
        text = f"export {kind}: {export_words(entry)}"
        events.emit("exported", text, kind_of_export=kind, **parity.as_json())
        gap = gap or (f"{kind}: {parity.problem}" if parity.problem else "")
    return entries, gap


def _checked_before(folder: Path, state: State) -> dict[str, Any] | None:
    """The entry of an export of this very state, if it passed and its files are as written."""
    known = read_json(folder / ENTRY_FILE)
    if not isinstance(known, dict) or known.get("key") != state.key:
        return None
    entry: dict[str, Any] = known["entry"]
    passed = entry["parity"]["problem"] == "" and not differing(folder, entry["files"])
    return entry if passed else None


def _export(
    run_folder: Path, kind: str, model: Any, state: State, trained: Trained, bench: Workbench
) -> tuple[dict[str, Any], Parity]:
    folder = run_folder / "exports" / kind
    dtype = bench.stored_dtype or torch.float32
    parity = _write(folder, kind, model, dtype, trained, bench)
    cast = None
    if parity.cast and parity.problem:  # rounding lost too much of what was trained
        cast = parity
        parity = _write(folder, kind, model, torch.float32, trained, bench)
    return _entry(folder, kind, parity, cast, state), parity


def _export_float8(
    run_folder: Path, model: Any, state: State, texts: Sequence[Encoded], bench: Workbench
) -> tuple[dict[str, Any], Quantization]:
    folder = run_folder / "exports" / "fp8"
    dtype = bench.stored_dtype or torch.float32

    def fill(aside: Path) -> None:
        float8_export.write(aside / "files", model, dtype)
        _lift(aside)

    write_folder(folder, fill)
    found = float8_export.measure(model, folder, texts)
    return _entry(folder, "fp8", found, None, state), found


def _entry(
    folder: Path, kind: str, parity: Parity | Quantization, cast: Parity | None, state: State
) -> dict[str, Any]:
    """What the ledger says of an export; it stands beside the files as well."""
    entry = {
        "kind": kind,
        "path": f"exports/{kind}",
        "parity": parity.as_json(),
        "cast_refused": None if cast is None else cast.as_json(),
        "files": {path.name: file_hash(path) for path in sorted(folder.iterdir())},
    }
    write_json(folder / ENTRY_FILE, {"key": state.key, "entry": entry})
    return entry


def _lift(aside: Path) -> None:
    """Files of the folder `files` up into `aside`."""
    for path in list((aside / "files").iterdir()):
        shutil.move(str(path), aside / path.name)
    (aside / "files").rmdir()


def _write(
    folder: Path, kind: str, model: Any, dtype: torch.dtype, trained: Trained, bench: Workbench
) -> Parity:
    """Write the export, merged weights in `dtype`, and compare it with what was trained."""

    def fill(aside: Path) -> None:
        if kind == "adapter":
            model.save_adapter(aside / "files")
        elif model.adapter is not None:
            model.save_merged(aside / "files", dtype)
        else:
            model.save_full(aside / "files")
        _lift(aside)

    write_folder(folder, fill)
    return parity_of(folder, kind, trained, bench)


def parity_of(folder: Path, kind: str, trained: Trained, bench: Workbench) -> Parity:
    """How far the export in `folder`, as plain tools load it, is from what was trained."""
    cast = kind == "merged" and stored_dtype(folder) != torch.float32
    network, tokenizer = read_plain(folder, kind, bench.four_bits)
    return compare(trained, network, tokenizer, sorted(bench.encoder.stop_ids), cast)


def parity_texts(
    sources: Mapping[str, ReadSource], encoder: Any, texts: int = PARITY_TEXTS
) -> tuple[list[Encoded], list[tuple[Message, ...]]]:
    """A few held-out (else training) sequences without branches, and prompts to answer."""
    sequences: list[Encoded] = []
    prompts: list[tuple[Message, ...]] = []
    for source in sources.values():
        taken = 0
        for example in source.heldout or source.train:
            row = _one_row(example, encoder)
            if row is None:  # too long, or refused by the template
                continue
            taken += 1
            sequences.append(row)
            turns = example.messages
            if turns and turns[-1]["role"] == "assistant":
                turns = turns[:-1]
            if turns:
                prompts.append(turns)
            if taken == texts:
                break
    if not sequences:  # a check of nothing would pass
        plain = [
            Example("text", Origin("lehr", "prompt", 1), text=text) for _, text in PLAIN_PROMPTS
        ]
        sequences = [row for one in plain if (row := _one_row(one, encoder)) is not None]
    if encoder.template is None:
        prompts = []
    elif not prompts:
        prompts = [({"role": "user", "content": text},) for _, text in PLAIN_PROMPTS]
    return sequences[: 2 * texts], prompts[:PARITY_PROMPTS]


def _one_row(example: Example, encoder: Any) -> Encoded | None:
    """The first sequence of an example as a plain row: a prompt with its first answer."""
    encoded = encoder.encode(example, max_length=PARITY_LENGTH).encoded
    if not encoded or encoded[0].tokens < 2:
        return None
    one: Encoded = encoded[0]
    if not one.branches:
        return one
    branch = one.branches[0]
    ids = torch.cat([one.ids, branch.ids])
    return Encoded(ids, torch.cat([one.supervised, branch.supervised]), one.origin)
